"""Annotation files, and data sets of the images that they list.

Annotation files of downloaded sets are untrusted: whatever they hold, the outcome is a value or a :class:`SemaugError`
of one sentence.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from semaug.data.downloads import leads_out
from semaug.data.samples import DataSet, ImageFiles, Samples
from semaug.util.errors import SemaugError

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
MAX_ANNOTATION_BYTES = 2**30
"""A larger annotation file is refused before it fills the memory; the largest known set's is a twentieth of it."""

Splits = dict[str, list[tuple[Path, int]]]


class Value(NamedTuple):
    """The second field of a line in an annotation file."""

    text: str
    line: int


def read_content(path: Path) -> bytes:
    """The content of an annotation file that is there and not too large."""
    if not path.is_file():
        raise SemaugError(f"the annotation file {path} is missing")
    if path.stat().st_size > MAX_ANNOTATION_BYTES:
        raise SemaugError(f"{path} is too large for an annotation file ({path.stat().st_size} bytes)")
    return path.read_bytes()


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    for number, line in enumerate(read_content(path).split(b"\n"), start=1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise SemaugError(f"{path} line {number}: this is not UTF-8 text") from error
        if text:
            yield number, text


def pairs(path: Path) -> dict[str, Value]:
    """What follows the first word of each line, by that word."""
    values: dict[str, Value] = {}
    for number, line in lines(path):
        fields = line.split(maxsplit=1)
        if len(fields) != 2:
            raise SemaugError(f"{path} line {number}: {shown(line)} should be two fields")
        if fields[0] in values:
            raise SemaugError(f"{path} line {number}: {shown(fields[0])} is there twice")
        values[fields[0]] = Value(fields[1], number)
    return values


def whole_number(path: Path, line: int, text: str) -> int:
    """The number that a field is, given where the field is."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise SemaugError(f"{path} line {line}: {shown(text)} should be a number")
    return int(text)


def numbered(path: Path) -> dict[int, str]:
    """The names in a file of lines "number name", by number."""
    names: dict[int, str] = {}
    for key, (text, line) in pairs(path).items():
        if names.setdefault(whole_number(path, line, key), text) is not text:
            raise SemaugError(f"{path} line {line}: the class {shown(key)} is there twice")
    return names


def inside(folder: Path, name: str, place: str) -> Path:
    """The path of `name` below `folder`; refused if it could lead out of it."""
    if leads_out(name):
        raise SemaugError(f"{place}: the image {shown(name)} would lie outside of the data set's folder")
    return folder / name


def listed_data_set(name: str, folder: Path, classes: Sequence[str], splits: Splits) -> DataSet:
    """A data set whose images are known from a list, so that they may be absent."""
    files = [file for entries in splits.values() for file, _ in entries]
    absent = [file for file in files if not os.path.isfile(file)]
    if absent:
        first = str(absent[0]).removeprefix(f"{folder}{os.sep}")
        raise SemaugError(
            f"{len(absent)} of the {len(files)} images listed in {folder} are absent, first {shown(first)}"
        )
    return data_set(name, folder, classes, splits)


def data_set(name: str, folder: Path, classes: Sequence[str], splits: Splits) -> DataSet:
    """A data set of these images; refused if a split or a class has none, or two classes share a name."""
    repeated = [class_name for class_name, count in Counter(classes).items() if count > 1]
    if repeated:
        raise SemaugError(f"two classes of {folder} have the same name: {some(repeated)}")
    for split, entries in splits.items():
        if not entries:
            raise SemaugError(f"{folder} has no images in the split {split}")
    present = {split: {label for _, label in entries} for split, entries in splits.items()}
    for split, labels in present.items():
        extra = sorted(labels - present["train"])
        if extra:
            names = some([classes[label] for label in extra])
            raise SemaugError(f"{folder} has classes in {split} that are not in train: {names}")
    without = [class_name for label, class_name in enumerate(classes) if label not in present["train"]]
    if without:
        raise SemaugError(f"{folder} has classes without images: {some(without)}")
    samples: dict[str, Samples] = {
        split: ImageFiles(folder, tuple(file for file, _ in splits[split]), tuple(label for _, label in splits[split]))
        for split in ("train", "val", "test")
        if split in splits
    }
    return DataSet(name, tuple(classes), samples)


def shown(text: str) -> str:
    """Foreign text in a sentence: on one line, and not too long."""
    return repr(text if len(text) <= 100 else f"{text[:99]}…")


def some(names: Iterable[str]) -> str:
    """Foreign names in a sentence: the first five, and how many more there are."""
    texts = [shown(name) for name in names]
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")
