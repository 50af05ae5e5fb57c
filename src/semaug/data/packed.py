"""Images inside of larger files of other programs, read directly by their offset and size."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from semaug.data.annotations import SPLIT_NAMES, check_labels, class_order
from semaug.data.samples import DataSet, Samples, file_dates
from semaug.data.shards import ShardedImages
from semaug.util.errors import DataError
from semaug.util.names import shown

_PLACES = ("", "data", *SPLIT_NAMES, *(f"{above}/{split}" for above in ("data", "default") for split in SPLIT_NAMES))


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern in a folder, its "data" folder, and folders of splits, sorted."""
    return sorted(file for place in _PLACES for file in (folder / place).glob(pattern) if file.is_file())


class PackedRow(NamedTuple):
    """An image: its split ("" if none), the number of its file, where it is in there, its class ("" if unknown) and
    its name.
    """

    split: str
    file: int
    offset: int
    size: int
    class_name: str
    name: str


@dataclass(frozen=True, eq=False)
class PackedImages(ShardedImages):
    """A split of images inside of files; the names are in memory."""

    names: tuple[str, ...]

    def name(self, i: int) -> str:
        return self.names[i]

    def fingerprint(self, *, dates: bool = True) -> str:
        status = [file.stat() for file in self.files]
        states = [(state.st_size, file_dates(state) if dates else 0) for state in status]
        return hashlib.sha256(repr((self.digest, states)).encode()).hexdigest()


def packed_data(
    folder: Path,
    files: Sequence[Path],
    rows: Sequence[PackedRow],
    order: Sequence[str] = (),
    kind: type[PackedImages] = PackedImages,
    ignored: Mapping[str, int] | None = None,
) -> DataSet:
    """Make a data set of images inside of files.

    Args:
        folder: The folder of the data set.
        files: The files that rows refer to.
        rows: The images.
        order: Classes in the order of their labels; others follow, as by :func:`class_order`. Those without images are
            left out.
        kind: How images are read from the files.
        ignored: Number of files that are not used, by suffix.

    Raises:
        DataError: A split or class is unusable.
    """
    outside = Counter(f"{files[row.file].relative_to(folder)}/" for row in rows if not row.split)
    rows = [row for row in rows if row.split]
    present = {row.class_name for row in rows}
    classes = [*(name for name in dict.fromkeys(order) if name in present), *class_order(present - set(order))]
    index = {class_name: label for label, class_name in enumerate(classes)}
    by_split: dict[str, list[PackedRow]] = {"train": []}
    for row in rows:
        by_split.setdefault(row.split, []).append(row)
    check_labels(folder, classes, {split: [index[row.class_name] for row in own] for split, own in by_split.items()})
    splits: dict[str, Samples] = {}
    for split in [split for split in ("train", "val", "test") if split in by_split]:
        own = by_split[split]
        table = np.array([(row.offset, row.size, index[row.class_name], 0, 0, -1) for row in own], np.int64)
        # names in tar files, and of the files themselves, need not be text
        paths = tuple(row.name.encode(errors="replace").decode() for row in own)
        digest = hashlib.sha256("\0".join(paths).encode() + table.tobytes()).hexdigest()
        splits[split] = kind(tuple(files), np.array([row.file for row in own]), table, digest, paths)
    return DataSet(folder.resolve().name, tuple(classes), splits, {**(ignored or {}), **outside})


def class_of(label: str, names: Sequence[str] | None, image: str) -> str:
    """The class of an image by its label, a number if classes have `names`; raises DataError if it has no name."""
    if names is None:
        return label
    if not (label.isascii() and label.isdigit() and len(label) < 10 and int(label) < len(names)):
        raise DataError(f"the label {shown(label)} of {shown(image)} is not one of the {len(names)} named classes")
    return names[int(label)]
