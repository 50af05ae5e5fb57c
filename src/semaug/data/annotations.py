"""Fields of annotation files, and data sets of the images that they list.

Annotation files of downloaded data sets are untrusted: whatever they hold, the outcome is a value or a
:class:`DataError` of one sentence.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from semaug.data.samples import DataSet, ImageFiles, Samples, ignored_files
from semaug.util.errors import DataError, SemaugError
from semaug.util.names import folded, shown, some
from semaug.util.untrusted import read_bytes

SPLIT_NAMES = {
    name: split
    for split, names in {
        "train": ("train", "training"),
        "val": ("val", "valid", "validation", "dev"),
        "test": ("test", "testing", "eval", "evaluation"),
    }.items()
    for name in names
}
"""The splits by the words for them, which are those of Hugging Face's `datasets`."""
MAX_ANNOTATION_BYTES = 2**30
"""Larger annotation files are refused; the largest of the known data sets has a twentieth of it."""
MAX_CLASS_NAME = 1000
"""Longer names of classes are refused."""

Splits = dict[str, list[tuple[Path, int]]]
"""By split, the image files and their labels."""


class Field(NamedTuple):
    """A piece of text, and the file and line where it is."""

    text: str
    place: str

    def number(self) -> int:
        """The field as a whole number of at most nine digits."""
        if not (self.text.isascii() and self.text.isdigit() and len(self.text) < 10):
            raise DataError(f"{self.place}: {shown(self.text)} should be a number")
        return int(self.text)

    def below(self, folder: Path) -> Path:
        """The path that the field names below `folder`."""
        if leads_out(self.text):
            raise DataError(f"{self.place}: the image {shown(self.text)} is outside of the data set's folder")
        return folder / self.text


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a parser raises on a damaged file into a :class:`DataError` of one line."""
    try:
        yield
    except SemaugError:
        raise
    except Exception as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from error


def read_content(path: Path) -> bytes:
    """The content of an annotation file that exists and is not too large."""
    if not path.exists():
        raise DataError(f"the annotation file {path} is missing")
    return read_bytes(path, MAX_ANNOTATION_BYTES)


def lines(path: Path) -> Iterator[Field]:
    """The lines of a file that are not blank."""
    for number, line in enumerate(read_content(path).split(b"\n"), start=1):
        place = f"{path} line {number}"
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: this is not UTF-8 text") from error
        if text:
            yield Field(text, place)


def pairs(path: Path) -> dict[str, Field]:
    """The rest of each line by its first word."""
    values: dict[str, Field] = {}
    for line, place in lines(path):
        words = line.split(maxsplit=1)
        if len(words) != 2:
            raise DataError(f"{place}: {shown(line)} should be two fields")
        if words[0] in values:
            raise DataError(f"{place}: {shown(words[0])} occurs twice")
        values[words[0]] = Field(words[1], place)
    return values


def numbered(path: Path) -> dict[int, str]:
    """The names in a file of lines "number name", by number."""
    names: dict[int, str] = {}
    for key, (text, place) in pairs(path).items():
        if names.setdefault(Field(key, place).number(), text) is not text:
            raise DataError(f"{place}: the class {shown(key)} occurs twice")
    return names


def leads_out(name: str) -> bool:
    """Whether an untrusted path could, on any system, lead out of the folder that it is joined to."""
    path = PureWindowsPath(name)  # knows both kinds of slash, and drives
    return bool(path.anchor) or ".." in path.parts


def data_set(
    name: str,
    folder: Path,
    classes: Sequence[str],
    splits: Splits,
    *,
    listed: bool = True,
    ignored: Mapping[str, int] | None = None,
    source: Path | None = None,
) -> DataSet:
    """Make a data set of image files below a folder.

    Args:
        name: Its name.
        folder: The images' names are relative to it.
        classes: Class names, indexed by label.
        splits: Image files and labels.
        listed: Whether the files come from a list, so that some may be missing.
        ignored: Number of files of other types, by suffix.
        source: The file or folder that messages name. Default: the folder.

    Returns:
        The data set.

    Raises:
        DataError: Files are missing or listed twice, a split or class has no images, two classes share a name, or a
            name is too long.
    """
    source = source or folder
    files = [file for entries in splits.values() for file, _ in entries]
    absent = [file for file in files if not os.path.isfile(file)] if listed else []
    if absent:
        first = shown(str(absent[0]).removeprefix(f"{folder}{os.sep}"))
        raise DataError(f"{len(absent)} of the {len(files)} images listed in {source} are missing, first {first}")
    if listed and len(set(files)) < len(files):
        [(twice, _)] = Counter(files).most_common(1)
        raise DataError(f"{source} lists the image {shown(str(twice).removeprefix(f'{folder}{os.sep}'))} twice")
    by_split = {split: [label for _, label in entries] for split, entries in splits.items()}
    check_labels(source, classes, by_split, ignored)
    samples: dict[str, Samples] = {}
    for split in ("train", "val", "test"):
        if split in splits:
            images, labels = zip(*splits[split], strict=True)
            samples[split] = ImageFiles(folder, images, labels)
    return DataSet(name, tuple(classes), samples, ignored or {})


def class_order(labels: Collection[str]) -> list[str]:
    """Order labels as classes: by the alphabet, or by value if all are whole numbers ("9" before "10")."""
    are_numbers = all(label.isascii() and label.isdigit() for label in labels)
    return sorted(labels, key=lambda label: (len(label), label) if are_numbers else (0, label))


def split_called(text: str, place: str) -> str:
    """The split that a field of a list names; raises DataError if it is none."""
    if without_set(text) not in SPLIT_NAMES:
        raise DataError(f"{place}: the split {shown(text.strip())} is not one of {', '.join(SPLIT_NAMES)}")
    return SPLIT_NAMES[without_set(text)]


def without_set(text: str) -> str:
    """The word for a split, in lower case: "train" for "train", "Train set" and "train_set"."""
    return re.sub("[_ -]?set$", "", text.strip().lower())


def split_in(path: Path) -> str:
    """The split that a word of a path names, as in data/test-00000-of-00002.parquet; "" if none does."""
    words = re.findall("[a-z]+", path.as_posix().lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), "")


def splits_in(paths: Sequence[Path]) -> list[str]:
    """The split that a word of each path names; for other paths "train", or "" (none) if some path names "train"."""
    splits = [split_in(path) for path in paths]
    return [split or ("" if "train" in splits else "train") for split in splits]


def check_distinct(source: Path, classes: Sequence[str]) -> None:
    """Check that no two classes have the same name, by which they would become one; raises DataError."""
    repeated = [class_name for class_name, count in Counter(classes).items() if count > 1]
    if repeated:
        raise DataError(f"two classes of {source} have the same name: {some(repeated)}")


def check_labels(
    source: Path, classes: Sequence[str], splits: Mapping[str, Sequence[int]], ignored: Mapping[str, int] | None = None
) -> None:
    """Check that a data set can be trained on.

    Args:
        source: The file or folder that messages name.
        classes: Class names, indexed by label.
        splits: The labels of each split.
        ignored: Number of files of other types, by suffix.

    Raises:
        DataError: A split or class has no images, two classes share a name, or a name is too long.
    """
    check_distinct(source, classes)
    long = [class_name for class_name in classes if len(class_name) > MAX_CLASS_NAME]
    if long:
        raise DataError(f"names of classes in {source} have more than {MAX_CLASS_NAME} characters: {some(long)}")
    trained = set(splits["train"])
    for split, labels in splits.items():
        if not labels:
            raise DataError(f"{source} has no images in the split {split}")
        extra = sorted(set(labels) - trained)
        if extra and trained:
            names = [classes[label] for label in extra]
            similar = {folded(classes[label]): classes[label] for label in trained}
            alike = [(name[:99], similar[folded(name)][:99]) for name in names if folded(name) in similar]
            hint = "".join(f"; {name!a} is another name than {other!a}" for name, other in alike[:1])
            raise DataError(f"{source} has classes in {split} that are not in train: {some(names)}{hint}")
    without = [class_name for label, class_name in enumerate(classes) if label not in trained]
    if without:
        others = f"; {ignored_files(ignored)}" if ignored else ""
        raise DataError(f"{source} has classes without images: {some(without)}{others}")
