"""Images inside of larger files of other programs, read directly by their offset and size."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from semaug.data.annotations import SPLIT_NAMES, check_labels, class_order
from semaug.data.samples import DataSet, Samples
from semaug.data.shards import ShardedImages
from semaug.util.errors import DataError
from semaug.util.names import shown

_PLACES = ("", "data", *SPLIT_NAMES, *(f"{above}/{split}" for above in ("data", "default") for split in SPLIT_NAMES))


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern in a folder, its "data" folder, and folders of splits, sorted."""
    return sorted(file for place in _PLACES for file in (folder / place).glob(pattern) if file.is_file())


class PackedRow(NamedTuple):
    """An image: the number of its file, where it is in there, its label as text, and its name."""

    file: int
    offset: int
    size: int
    label: str
    name: str


@dataclass(frozen=True, eq=False)
class PackedImages(ShardedImages):
    """A split of images inside of files; the names are in memory."""

    names: tuple[str, ...]

    def name(self, i: int) -> str:
        return self.names[i]

    def fingerprint(self, *, dates: bool = True) -> str:
        states = [(file.stat().st_size, file.stat().st_mtime_ns if dates else 0) for file in self.files]
        return hashlib.sha256(repr((self.digest, states)).encode()).hexdigest()


def packed_data(
    folder: Path,
    files: Sequence[Path],
    rows: Sequence[tuple[str, PackedRow]],
    names: Sequence[str] | None,
    kind: type[PackedImages] = PackedImages,
) -> DataSet:
    """Make a data set of images inside of files.

    Args:
        folder: The folder of the data set.
        files: The files that rows refer to.
        rows: Split and place of each image.
        names: Names of the labels 0, 1, …; None if labels are names. Names without images are left out.
        kind: How images are read from the files.

    Raises:
        DataError: A label has no name, or a split or class is unusable.
    """
    named = [(split, row, _named(row, names)) for split, row in rows]
    present = {label for _, _, label in named}
    classes = class_order(present) if names is None else [name for name in dict.fromkeys(names) if name in present]
    index = {label: i for i, label in enumerate(classes)}
    by_split: dict[str, list[tuple[PackedRow, int]]] = {"train": []}
    for split, row, label in named:
        by_split.setdefault(split, []).append((row, index[label]))
    check_labels(folder, classes, {split: [label for _, label in own] for split, own in by_split.items()})
    splits: dict[str, Samples] = {}
    for split in [split for split in ("train", "val", "test") if split in by_split]:
        own = by_split[split]
        table = np.array([(row.offset, row.size, label, 0, 0) for row, label in own], np.int64)
        # names in tar files, and of the files themselves, need not be text
        paths = tuple(row.name.encode(errors="replace").decode() for row, _ in own)
        digest = hashlib.sha256("\0".join(paths).encode() + table.tobytes()).hexdigest()
        splits[split] = kind(tuple(files), np.array([row.file for row, _ in own]), table, digest, paths)
    return DataSet(folder.resolve().name, tuple(classes), splits)


def _named(row: PackedRow, names: Sequence[str] | None) -> str:
    if names is None:
        return row.label
    if not (row.label.isascii() and row.label.isdigit() and len(row.label) < 10 and int(row.label) < len(names)):
        raise DataError(
            f"the label {shown(row.label)} of {shown(row.name)} is not one of the {len(names)} named classes"
        )
    return names[int(row.label)]
