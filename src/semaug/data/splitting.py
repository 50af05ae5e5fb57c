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
from dataclasses import dataclass
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


def choose_groups(labels: Sequence[int], groups: Sequence[str], fraction: float, seed: int) -> set[str]:
    """Choose groups that hold about a fraction of the images of each class.

    Of a class with two groups at least one is chosen, if this leaves no class without a group. Of every class at least
    one group is left.

    Args:
        labels: Class of each image.
        groups: Group of each image. A group may have images of several classes.
        fraction: Share of each class, above 0 and below 1.
        seed: Seed of the choice.

    Returns:
        The chosen groups.
    """
    sizes: dict[str, Counter[int]] = {}
    for label, group in zip(labels, groups, strict=True):
        sizes.setdefault(group, Counter())[label] += 1
    order = sorted(sizes, key=lambda group: hashlib.sha256(f"{seed}\0{group}".encode()).digest())
    wanted = {label: max(1, int(fraction * count + 0.5)) for label, count in Counter(labels).items()}
    left = Counter(label for own in sizes.values() for label in own)  # groups of each class
    taken, chosen = Counter[int](), set[str]()

    def take(group: str) -> None:
        chosen.add(group)
        taken.update(sizes[group])
        left.subtract(sizes[group].keys())

    for group in order:
        if all(taken[label] + count <= wanted[label] and left[label] > 1 for label, count in sizes[group].items()):
            take(group)
    for group in sorted(order, key=lambda group: sizes[group].total()):  # for classes of large groups only
        own = sizes[group]
        if group not in chosen and all(left[label] > 1 for label in own) and any(not taken[label] for label in own):
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
        data: A data set of image files. Its test split, if it has one, stays as it is.
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
        raise SettingError(f"{data.name} has a test split, which stays as it is; leave out `test_fraction`")
    if test_fraction is None:
        test_fraction = 0.0 if "test" in data.splits else 0.2
    if not (0 <= val_fraction < 1 and 0 <= test_fraction < 1 and val_fraction + test_fraction < 1):
        raise SettingError("`val_fraction` and `test_fraction` must be at least 0, and their sum below 1")
    stored = read_groups(table, group_by) if table is not None and group_by not in (None, "folder") else {}
    if group_by not in (None, "folder") and table is None:
        raise DataError(f"{data.name} is no table with a column {group_by}; `group_by` must be folder")
    rows: list[tuple[Path, int, str, str]] = []
    for split, samples in data.splits.items():
        if not isinstance(samples, ImageFiles):
            raise DataError(f"the images of {data.name} are inside of other files; a split needs image files")
        for i, (file, label) in enumerate(zip(samples.files, samples.labels, strict=True)):
            alone = samples.name(i).replace(os.sep, "/")
            group = alone if group_by is None else str(file.parent) if group_by == "folder" else stored[file] or alone
            rows.append((file, label, split, group))
    free = [row for row in rows if row[2] != "test"]
    if group_by == "folder" and len({(row[1], row[3]) for row in free}) == len({row[1] for row in free}):
        raise DataError(f"all images of a class of {data.name} are in one folder, so `group_by` folder divides nothing")
    tested = choose_groups([r[1] for r in free], [r[3] for r in free], test_fraction, seed) if test_fraction else set()
    rest = [row for row in free if row[3] not in tested]
    share = val_fraction / (1 - test_fraction)
    validated = choose_groups([r[1] for r in rest], [r[3] for r in rest], share, seed) if val_fraction else set()

    def place(split: str, group: str) -> str:
        return "test" if split == "test" or group in tested else "val" if group in validated else "train"

    shared = {group for *_, split, group in rows if split == "test"} & {group for *_, group in free}
    if shared:
        raise DataError(f"groups of the test split of {data.name} have other images too: {some(sorted(shared))}")
    return [SplitRow(file, data.classes[label], place(split, group), group) for file, label, split, group in rows]


def write_split(rows: Sequence[SplitRow], output: Path) -> None:
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
    for row in rows:
        path = Path(os.path.relpath(row.file, output.parent)).as_posix()
        table.writerow([*map(escape_formula, (path, row.class_name)), row.split, escape_formula(row.group)])
    content = text.getvalue().encode(errors="surrogateescape")
    size = output.stat().st_size if output.is_file() else 0
    if size and (size != len(content) or read_bytes(output, size) != content):
        raise FileError(f"{output} exists and is another table or file; move it, or choose another `output`")
    write_atomically(output, content)
