"""Stratified and grouped splits, saved as a table that every command takes as a data set.

Groups are chosen by a hash of their name and the seed, as in :func:`semaug.data.readers.split_validation`: the choice
is the same on every machine, and an added image changes the place of few others. scikit-learn's StratifiedGroupKFold
depends on the order of images, and may leave a class without training images.
"""

import csv
import hashlib
import io
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from semaug.data.samples import DataSet, ImageFiles
from semaug.data.tables import read_groups
from semaug.util.errors import DataError, FileError, SettingError
from semaug.util.files import write_atomically
from semaug.util.names import escape_formula, some
from semaug.util.untrusted import read_bytes


@dataclass(frozen=True)
class SplitRow:
    """An image file with its class, split and group."""

    file: Path
    class_name: str
    split: str
    group: str


def draw_groups(rows: Sequence[SplitRow], fraction: float, seed: int) -> set[str]:
    """Draw groups that hold about a fraction of the images of each class.

    Of a class with two groups at least one is chosen, if this leaves no class without a group. Of every class at least
    one group is left.

    Args:
        rows: The images. A group may have images of several classes.
        fraction: Share of each class, from 0, below 1.
        seed: Seed of the choice.

    Returns:
        The drawn groups.
    """
    if not fraction:
        return set()
    sizes: dict[str, Counter[str]] = {}  # images of each class in a group
    for row in rows:
        sizes.setdefault(row.group, Counter())[row.class_name] += 1
    order = sorted(sizes, key=lambda group: hashlib.sha256(f"{seed}\0{group}".encode()).digest())
    images = Counter(row.class_name for row in rows)
    wanted = {name: max(1, int(fraction * count + 0.5)) for name, count in images.items()}
    left = Counter(name for own in sizes.values() for name in own)  # groups of each class
    taken, chosen = Counter[str](), set[str]()

    def take(group: str) -> None:
        chosen.add(group)
        taken.update(sizes[group])
        left.subtract(sizes[group].keys())

    for group in order:
        if all(taken[name] + count <= wanted[name] and left[name] > 1 for name, count in sizes[group].items()):
            take(group)
    for group in sorted(order, key=lambda group: sizes[group].total()):  # for classes of large groups only
        own = sizes[group]
        if group not in chosen and all(left[name] > 1 for name in own) and any(not taken[name] for name in own):
            take(group)
    return chosen


def split_data(
    data: DataSet,
    val_fraction: float = 0.1,
    test_fraction: float | None = None,
    *,
    group_by: str | None = None,
    table: Path | None = None,
    seed: int = 0,
) -> list[SplitRow]:
    """Divide the images of a data set into train, val and test, stratified by class.

    Args:
        data: A data set of image files. Its test split, if it has one, is not changed.
        val_fraction: Share of validation images; from 0, below 1.
        test_fraction: Share of test images. Default: 0.2, or 0 if there is a test split.
        group_by: ``"folder"``, or a column of the table: images of one folder, or with the same value, stay together.
            Default: every image for itself.
        table: The table that the data set was read from.
        seed: Seed of the choice.

    Returns:
        A row for each image.

    Raises:
        SettingError: A fraction is out of range, or there is a test split already.
        DataError: The images are not files, or cannot be grouped so.
    """
    if "test" in data.splits and test_fraction:
        raise SettingError(f"{data.name} has a test split, which is not changed; leave out `test_fraction`")
    if test_fraction is None:
        test_fraction = 0.0 if "test" in data.splits else 0.2
    if not (0 <= val_fraction < 1 and 0 <= test_fraction < 1 and val_fraction + test_fraction < 1):
        raise SettingError("`val_fraction` and `test_fraction` must be at least 0, and their sum below 1")
    if len({name.strip() for name in data.classes} - {""}) < len(data.classes):
        raise DataError(
            f"classes of {data.name} differ only in spaces around their names, which a table does not keep; rename them"
        )
    stored = read_groups(table, group_by) if table is not None and group_by not in (None, "folder") else {}
    if group_by not in (None, "folder") and table is None:
        raise DataError(f"{data.name} is not a table with a column {group_by}; `group_by` must be folder")
    rows: list[SplitRow] = []
    for split, samples in data.splits.items():
        if not isinstance(samples, ImageFiles):
            raise DataError(f"the images of {data.name} are inside of other files; a split needs image files")
        for i, (file, label) in enumerate(zip(samples.files, samples.labels, strict=True)):
            alone = samples.name(i).replace(os.sep, "/")
            group = alone if group_by is None else str(file.parent) if group_by == "folder" else stored[file] or alone
            rows.append(SplitRow(file, data.classes[label], split, group))
    free = [row for row in rows if row.split != "test"]
    places = {(row.class_name, row.group) for row in free}
    if group_by == "folder" and len(places) == len({row.class_name for row in free}):
        raise DataError(f"all images of a class of {data.name} are in one folder, so `group_by` folder divides nothing")
    shared = {row.group for row in rows if row.split == "test"} & {row.group for row in free}
    if shared:
        raise DataError(f"groups of the test split of {data.name} have other images too: {some(sorted(shared))}")
    tested = draw_groups(free, test_fraction, seed)
    rest = [row for row in free if row.group not in tested]
    validated = draw_groups(rest, val_fraction / (1 - test_fraction), seed)

    def new_split(row: SplitRow) -> str:
        if row.split == "test" or row.group in tested:
            return "test"
        return "val" if row.group in validated else "train"

    return [replace(row, split=new_split(row)) for row in rows]


def write_split_table(rows: Sequence[SplitRow], output: Path) -> None:
    """Write a split as a table with the columns path, label, split and group.

    Args:
        rows: The images.
        output: The file. One with other content is not replaced, as runs may depend on it.

    Raises:
        FileError: The file cannot be written, or exists with other content.
    """
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(("path", "label", "split", "group"))
    folder = os.path.abspath(output.parent)
    real = os.path.realpath(folder)  # where ".." in a path begins if the folder is a link
    for row in rows:
        file = os.path.abspath(row.file)
        path = Path(os.path.relpath(file, folder if Path(file).is_relative_to(folder) else real)).as_posix()
        table.writerow([*map(escape_formula, (path, row.class_name)), row.split, escape_formula(row.group)])
    content = text.getvalue().encode(errors="surrogateescape")
    size = output.stat().st_size if output.is_file() else 0
    if size and (size != len(content) or read_bytes(output, size) != content):
        raise FileError(f"{output} exists and is another table or file; move it, or choose another `output`")
    write_atomically(output, content)
