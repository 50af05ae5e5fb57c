"""Data sets listed in tables: .csv, .tsv and .parquet files."""

import csv
import importlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from semaug.data.annotations import (
    MAX_ANNOTATION_BYTES,
    SPLIT_NAMES,
    Splits,
    class_order,
    data_set,
    read_content,
    reading,
    split_called,
    without_set,
)
from semaug.data.samples import DataSet
from semaug.util.errors import DataError, MissingPackageError
from semaug.util.names import shown, some, unescape_formula
from semaug.util.untrusted import open_regular

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
_MAX_ROWS = 20_000_000
_MAX_RATIO = 100  # of the bytes of a Parquet file's columns, unpacked, to those of the file
_COLUMNS = {"path": ("path", "image", "file", "filename", "file_name"), "label": ("label", "class")}
SPLIT_COLUMNS = ("split", "set", "subset", "partition", "fold", "phase")
"""Columns of the split; those after the first only if one of their cells names a split, as a fold may be a number."""


def read_table(path: Path) -> DataSet:
    """Read a data set from a table with the columns path, label and, optionally, split (see :data:`SPLIT_COLUMNS`).

    Columns of text are separated by commas, semicolons or tabs. Files may be missing: they count as unreadable images.
    Classes are in alphabetical order, or by value if all are whole numbers. An apostrophe that keeps a spreadsheet from
    reading a name as a formula is not part of it (:mod:`semaug.util.names`).

    Args:
        path: The file; paths in it are relative to its folder, and may lead out of it.

    Raises:
        DataError: The table is damaged or incomplete, or none of the files that it lists exists.
        MissingPackageError: Parquet needs pyarrow.
    """
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else csv_rows(path)
    classes, splits = listed_splits(
        Listed(f"{path} {place}", image, _image(path.parent, image), label, split or "train")
        for place, image, label, split in rows
    )
    files = [file for entries in splits.values() for file, _ in entries]
    if files and not any(map(os.path.isfile, files)):
        raise DataError(f"none of the {len(files)} images listed in {path} exists, first {shown(str(files[0]))}")
    return data_set(path.stem, path.parent, classes, splits, listed=False, source=path)


class Listed(NamedTuple):
    """An image of a list: place in the list, name as written there, file, label and split."""

    place: str
    name: str
    file: Path
    label: str
    split: str


def listed_splits(images: Iterable[Listed]) -> tuple[list[str], Splits]:
    """The classes and splits of listed images. One that is listed twice counts once.

    Otherwise it could be among the training images and among the validation images that are drawn from them.

    Raises:
        DataError: An image is listed twice with other labels or splits.
    """
    images = list(images)
    classes = class_order({image.label for image in images})
    index = {label: i for i, label in enumerate(classes)}
    splits: Splits = {"train": []}
    first: dict[tuple[str, str], Listed] = {}
    folder = cache(os.path.realpath)  # a path may be relative, absolute, and lead through a link
    for image in images:
        if "\0" in image.name:
            raise DataError(f"{image.place}: no file can be called {shown(image.name)}")
        other = first.setdefault((folder(image.file.parent), image.file.name), image)
        if other is image:
            splits.setdefault(image.split, []).append((image.file, index[image.label]))
        elif (other.label, other.split) != (image.label, image.split):
            how = f"in {other.split} and in {image.split}"
            if other.label != image.label:
                how = f"with the labels {shown(other.label)} and {shown(image.label)}"
            raise DataError(f"{image.place}: {shown(image.name)} is listed twice, {how}")
    return classes, splits


def _image(folder: Path, cell: str) -> Path:
    """The file that a cell names: as written or, if there is none, without outer spaces or the apostrophe."""
    names = dict.fromkeys((cell.strip(), cell, unescape_formula(cell), unescape_formula(cell).strip()))
    if len(names) > 1:
        for name in names:
            if name.strip() and os.path.isfile(folder / name):
                return folder / name
    return folder / cell.strip()


Row = tuple[str, str, str, str | None]
"""Place in the file, image, label and, if there is such a column, split."""


def csv_rows(path: Path) -> Iterator[Row]:
    """The rows of a .csv or .tsv table of images."""
    lines = _csv_lines(path)
    _, header = next(lines, ("", []))
    columns = _columns(path, header)
    places = [header.index(column) for column in columns]
    cells = [(place, [line[k] for k in places]) for place, line in lines]
    for place, own in cells:
        if any(cell.startswith(" ") and cell.lstrip().startswith('"') for cell in own):  # it would be part of the text
            raise DataError(f"{path} {place}: there is a space before a quotation mark; remove it")
    return _rows(path, columns, cells)


def read_groups(path: Path, column: str) -> dict[Path, str]:
    """The cells of a further column of a .csv or .tsv table, by image file; raises DataError if there is none."""
    if path.suffix.lower() == ".parquet":
        raise DataError(f"{path} is a Parquet file; save it as .csv to group images by a column")
    lines = _csv_lines(path)
    _, header = next(lines, ("", []))
    if column not in header:
        raise DataError(f"{path} has no column {shown(column)}; its columns are: {some(header) or 'none'}")
    image, group = header.index(_columns(path, header)[0]), header.index(column)
    groups: dict[Path, str] = {}
    for place, line in lines:
        own = unescape_formula(line[group].strip())
        other = groups.setdefault(_image(path.parent, line[image]), own)
        if other != own:
            groups_shown = f"{shown(other)} and {shown(own)}"
            raise DataError(
                f"{path} {place}: {shown(line[image])} is listed twice, in the groups {groups_shown}; correct one"
            )
    return groups


def _csv_lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The lines of a table of text, each with its place, the header first; all have as many fields."""
    content = read_content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line}: this is not UTF-8 text") from error
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(path, text), strict=True)
    width = 0
    try:
        for fields in filter(None, reader):
            width = width or len(fields)
            if len(fields) != width:
                raise DataError(f"{path} line {reader.line_num} has {len(fields)} fields, and the header has {width}")
            yield f"line {reader.line_num}", fields
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num}: {error}") from error


def _delimiter(path: Path, text: str) -> str:
    """The character that separates the columns: the one that splits the first line into the columns that we need."""
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    fitting = (delimiter for delimiter in (usual, ";", "\t", ",") if _lists_images(text, delimiter))
    return next(fitting, usual)


def holds_list(path: Path) -> bool:
    """Whether the first line of a .csv table names columns of images and labels; the rest may be damaged."""
    text = read_content(path).decode("utf-8-sig", errors="replace")
    return _lists_images(text, _delimiter(path, text))


def _lists_images(text: str, delimiter: str) -> bool:
    first = text.lstrip().split("\n", 1)[0]
    names = {name.strip(' "\r').lower() for name in first.split(delimiter)}
    return all(names & set(_COLUMNS[role]) for role in ("path", "label"))


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingPackageError(f"reading {path} needs pyarrow: pip install pyarrow") from error
    with reading(path), open_regular(path, MAX_ANNOTATION_BYTES) as file:
        columns = _columns(path, [str(name) for name in parquet.read_schema(file).names])
        fault = parquet_fault(parquet.read_metadata(file), os.fstat(file.fileno()).st_size)
        if fault is not None:
            raise DataError(f"{path} {fault}")
        table = parquet.read_table(file, columns=columns, read_dictionary=columns)
        values = [cells(table.column(column)) for column in columns]
    lines = []
    for number, row in enumerate(zip(*values, strict=True), start=1):
        if not all(isinstance(value, str | int) for value in row[:2]):
            raise DataError(f"{path} row {number}: image and label must be text or whole numbers")
        lines.append((f"row {number}", ["" if value is None else str(value) for value in row]))
    return _rows(path, columns, lines)


def parquet_fault(metadata: Any, size: int) -> str | None:
    """Why a Parquet file of `size` bytes is refused, or None. A few bytes can stand for any number of rows."""
    rows = metadata.num_rows
    if rows > min(_MAX_ROWS, size):
        return f"has {rows} rows in {size} bytes, more than are allowed"
    unpacked = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return f"unpacks to more than {_MAX_RATIO} times its size" if unpacked > _MAX_RATIO * size else None


def cells(column: Any) -> list[Any]:
    """The values of a column of an Arrow table; those that a dictionary holds once are one object."""
    values: list[Any] = []
    for chunk in column.chunks:
        if hasattr(chunk, "dictionary"):
            distinct = chunk.dictionary.to_pylist()
            values += [None if i is None else distinct[i] for i in chunk.indices.to_pylist()]
        else:
            values += chunk.to_pylist()
    return values


def _rows(path: Path, columns: Sequence[str], lines: Sequence[tuple[str, list[str]]]) -> Iterator[Row]:
    """The rows of a table, from the place and the cells of each in these columns: image, label, and perhaps splits."""
    split = split_column({column: [cells[k] for _, cells in lines] for k, column in enumerate(columns[2:], start=2)})
    for place, cells in lines:
        image, label = cells[:2]
        if not image.strip() or not label.strip():
            raise DataError(f"{path} {place}: the image or its label is empty")
        if "\n" in label.strip():
            raise DataError(f"{path} {place}: the label has a line break; perhaps a quotation mark is not closed")
        own = None if split is None else split_called(cells[columns.index(split, 2)], f"{path} {place}")
        yield place, image, unescape_formula(label.strip()), own


def split_column(columns: Mapping[str, Sequence[str]]) -> str | None:
    """The name of the column that holds the split, of :data:`SPLIT_COLUMNS` with their cells; None if there is none."""
    for name, own in columns.items():
        if name.strip().lower() == SPLIT_COLUMNS[0] or any(without_set(cell) in SPLIT_NAMES for cell in own):
            return name
    return None


def _columns(path: Path, header: list[str]) -> list[str]:
    """The header's names for the columns of image and label, and for those that may hold the split."""
    by_name = {column.strip().lower(): column for column in reversed(header)}
    columns = []
    for names in _COLUMNS.values():
        present = [by_name[name] for name in names if name in by_name]
        if not present:
            raise DataError(f"{path} needs a column {' or '.join(names)}; its columns are: {some(header) or 'none'}")
        columns += present[:1]
    columns += [by_name[name] for name in SPLIT_COLUMNS if name in by_name]
    counts = Counter(column.strip().lower() for column in header)
    twice = next((column for column in columns if counts[column.strip().lower()] > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {shown(twice)}")
    return columns
