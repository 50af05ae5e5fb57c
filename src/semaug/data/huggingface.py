"""Data sets of Hugging Face's `datasets`, read as they are, without that library.

| form                                   | recognised by                                          |
|----------------------------------------|--------------------------------------------------------|
| `Dataset.save_to_disk`, `DatasetDict`  | state.json, dataset_dict.json; Arrow files             |
| Parquet files as on the hub            | a column of structs {bytes, path}                      |
| `imagefolder` with metadata            | metadata.csv or metadata.jsonl with file_name and label |

Images in Arrow files are read by their offset, those of Parquet files by row group. Nothing is unpickled.
"""

import importlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from semaug.data.annotations import (
    Field,
    check_distinct,
    data_set,
    read_content,
    reading,
    split_called,
    split_in,
    splits_in,
)
from semaug.data.packed import PackedImages, PackedRow, class_of, files_in, packed_data
from semaug.data.samples import MAX_IMAGE_BYTES, DataSet
from semaug.data.tables import (
    SPLIT_COLUMNS,
    Listed,
    Row,
    cells,
    csv_rows,
    holds_list,
    listed_splits,
    parquet_fault,
    split_column,
)
from semaug.util.errors import DataError, MissingPackageError
from semaug.util.names import shown
from semaug.util.untrusted import open_regular, parse_json, read_json, read_json_lines

MAX_ROWS = 20_000_000
MAX_GROUP_BYTES = 2**31
"""Larger row groups of a Parquet file are refused; one is decompressed at a time."""
_LABELS = ("label", "labels", "class", "fine_label", "category")
_METADATA = ("metadata.csv", "metadata.jsonl")


class _DataFile(TypedDict):
    filename: str
    skip: NotRequired[int | None]  # rows of the file that are left out, in old versions of datasets
    take: NotRequired[int | None]


class _State(TypedDict):
    _data_files: list[_DataFile]
    _indices_data_files: NotRequired[list[object] | None]  # likewise: files that list the rows which count
    _indices_files: NotRequired[list[object] | None]


class _Splits(TypedDict):
    splits: list[str]


def _arrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError("reading Arrow and Parquet files needs pyarrow: pip install pyarrow") from error


# --------------------------------------------------------------------------------------------------------- save_to_disk


def holds_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def read_saved(folder: Path) -> DataSet:
    """Read a folder of `save_to_disk`; raises DataError if it is damaged, MissingPackageError without pyarrow."""
    parts = [("train", folder)]
    if (folder / "dataset_dict.json").is_file():
        named: _Splits = read_json(folder / "dataset_dict.json", _Splits)
        below = [_present(Field(name, str(folder / "dataset_dict.json")), folder) for name in named["splits"]]
        parts = list(zip(splits_in(list(map(Path, named["splits"]))), below, strict=True))
    files: list[Path] = []
    rows: list[PackedRow] = []
    order: list[str] = []
    for split, part in parts:
        state: _State = read_json(part / "state.json", _State)
        features = _features(read_json(part / "dataset_info.json", dict[str, Any]))
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise DataError(f"{part} selects rows by a list of indices; save it again with a new version of datasets")
        for entry in state["_data_files"]:
            if entry.get("skip") or entry.get("take") is not None:
                raise DataError(f"{part} holds a part of a file; save it again with a new version of datasets")
            file = _present(Field(entry["filename"], str(part / "state.json")), part)
            prefix = file.relative_to(folder).as_posix()
            if file in files:
                raise DataError(f"{folder} lists {shown(prefix)} twice")
            with reading(file):
                own, names = _arrow_rows(file, len(files), split, prefix, features)
            rows += own
            order += names or ()
            files.append(file)
    return packed_data(folder, files, _labelled(rows, folder), order)


def _present(name: Field, folder: Path) -> Path:
    path = name.below(folder)
    if not os.path.exists(path):  # as for a name that is too long for a message
        raise DataError(f"{name.place}: {shown(name.text)} is missing")
    return path


def _arrow_rows(
    file: Path, number: int, split: str, prefix: str, features: Mapping[str, Any]
) -> tuple[list[PackedRow], Sequence[str] | None]:
    """The rows of an Arrow file, with the offsets of their images in it, and the names of its labels."""
    arrow = _arrow("pyarrow")
    rows: list[PackedRow] = []
    open_regular(file).close()
    with arrow.memory_map(str(file)) as source:
        whole = source.read_buffer(source.size())
        if _is_compressed(arrow.ipc.MessageReader.open_stream(arrow.BufferReader(whole))):
            raise DataError(f"{file} is compressed; save it with datasets' save_to_disk")
        reader = arrow.ipc.open_stream(arrow.BufferReader(whole))
        image, label, names = _columns(file, reader.schema, features)
        for batch in reader:
            batch.validate(full=True)
            pictures = batch.column(image)
            content, paths = pictures.field("bytes"), pictures.field("path").to_pylist()
            wide = np.int64 if arrow.types.is_large_binary(content.type) else np.int32
            _, offsets, data = content.buffers()
            at = np.frombuffer(offsets, wide)[content.offset : content.offset + len(content) + 1].astype(np.int64)
            start = data.address - whole.address if data is not None else 0
            if not 0 <= start + at[0] <= start + at[-1] <= whole.size:
                raise DataError(f"{file} is compressed; save it with datasets' save_to_disk")
            if content.null_count or pictures.null_count:
                raise DataError(f"{file} has rows without an image in them")
            labels = batch.column(label).to_pylist()
            for k, (value, path) in enumerate(zip(labels, paths, strict=True)):
                name = f"{prefix}/{len(rows)}{f' {path}' if path else ''}"
                place = (number, start + int(at[k]), int(at[k + 1] - at[k]))
                rows.append(PackedRow(split, *place, _class_of(value, names, name), name))
            if len(rows) > MAX_ROWS or (len(rows) and max(np.diff(at), default=0) > MAX_IMAGE_BYTES):
                raise DataError(f"{file} has too many rows, or too large images")
    return rows, names


def _is_compressed(messages: Iterable[Any]) -> bool:
    """Whether messages of an Arrow stream state a compression; pyarrow unpacks them without a limit.

    Their heads are FlatBuffers (Message.fbs in Arrow): field 2 of a message is a record batch, in whose field 3 it is,
    or a dictionary, whose field 1 is a record batch.
    """

    def field(content: bytes, table: int, index: int) -> int:
        """Where a field of a table is; 0 if it is absent."""
        names = table - struct.unpack_from("<i", content, table)[0]
        size = struct.unpack_from("<H", content, names)[0]
        offset = struct.unpack_from("<H", content, names + 4 + 2 * index)[0] if 4 + 2 * index < size else 0
        return table + offset if offset else 0

    def inside(content: bytes, place: int) -> int:
        return place + int(struct.unpack_from("<I", content, place)[0])

    for message in messages:
        content, path = message.metadata.to_pybytes(), {"record batch": (2,), "dictionary": (2, 1)}.get(message.type)
        if path is not None:
            table = inside(content, 0)
            for index in path:
                table = inside(content, field(content, table, index))
            if field(content, table, 3):
                return True
    return False


# -------------------------------------------------------------------------------------------------------------- Parquet


@dataclass(frozen=True, eq=False)
class ParquetImages(PackedImages):
    """A split in Parquet files: the table has the row group of each image, and its row in there."""

    def content(self, i: int) -> bytes:
        file, (group, row) = self.files[self.shard[i]], self.table[i, :2].tolist()
        with reading(file):
            return bytes(_row_group(file, group)[row].as_py()["bytes"])


@lru_cache(maxsize=2)
def _row_group(file: Path, group: int) -> Any:
    parquet = _arrow("pyarrow.parquet")
    with open_regular(file) as opened:
        reader = parquet.ParquetFile(opened)
        image = _image_column(file, reader.schema_arrow)
        return reader.read_row_group(group, columns=[f"{image}.bytes"]).column(image)


def holds_parquet(path: Path) -> bool:
    """Whether a path is, or holds, Parquet files with images inside."""
    files = _parquet_files(path)
    try:
        if not files:
            return False
        with open_regular(files[0]) as opened:
            _image_column(files[0], _arrow("pyarrow.parquet").read_schema(opened))
        return True
    except DataError:  # a table of image files
        return False
    except Exception:  # damaged, or pyarrow is missing
        return path.is_dir()


def _parquet_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix.lower() == ".parquet" else []
    return files_in(path, "*.parquet")


def read_parquet_images(path: Path) -> DataSet:
    """Read Parquet files with images inside, as on the hub; the split is a word of a file's path.

    Args:
        path: A file or folder.

    Raises:
        DataError: A file is damaged, or has no column of images or labels.
        MissingPackageError: pyarrow is missing.
    """
    files, rows, order = _parquet_files(path), list[PackedRow](), list[str]()
    parquet = _arrow("pyarrow.parquet")
    folder = path.parent if path.is_file() else path
    for number, (file, split) in enumerate(zip(files, splits_in([f.relative_to(folder) for f in files]), strict=True)):
        prefix = file.relative_to(folder).as_posix()
        with reading(file), open_regular(file) as opened:
            reader = parquet.ParquetFile(opened)
            stored = (reader.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
            features = _features(parse_json(stored, file, dict[str, Any]).get("info"))
            image, label, names = _columns(file, reader.schema_arrow, features)
            sizes = [reader.metadata.row_group(g) for g in range(reader.metadata.num_row_groups)]
            fault = parquet_fault(reader.metadata, os.fstat(opened.fileno()).st_size)
            if fault is not None:
                raise DataError(f"{file} {fault}")
            if any(group.total_byte_size > MAX_GROUP_BYTES for group in sizes):
                raise DataError(f"{file} has too large row groups")
            read = reader.read(columns=[label, f"{image}.path"])
            labels, pictures = cells(read.column(label)), read.column(image).to_pylist()
            places = [(g, row) for g, size in enumerate(sizes) for row in range(size.num_rows)]
            for k, ((g, row), value, picture) in enumerate(zip(places, labels, pictures, strict=True)):
                name = f"{prefix}/{k}{' ' + picture['path'] if picture and picture.get('path') else ''}"
                rows.append(PackedRow(split, number, g, row, _class_of(value, names, name), name))
            order += names or ()
    return packed_data(path, files, _labelled(rows, path), order, ParquetImages)


# ------------------------------------------------------------------------------------------------- columns and features


def _features(info: Any) -> Mapping[str, Any]:
    features = info.get("features") if isinstance(info, dict) else None
    own = features if isinstance(features, dict) else {}
    return {key: value for key, value in own.items() if isinstance(value, dict)}


def _columns(file: Path, schema: Any, features: Mapping[str, Any]) -> tuple[str, str, Sequence[str] | None]:
    """The columns of images and labels, and the names of the labels if they are numbers with names."""
    image = _image_column(file, schema)
    named = [key for key in schema.names if features.get(key, {}).get("_type") == "ClassLabel"]
    usual = [key for key in ("label", "labels") if key in named]  # a coarser class may come first
    label = next((key for key in (*usual, *named, *_LABELS) if key in schema.names), None)
    if label is None:
        raise DataError(f"{file} has no column of labels ({', '.join(_LABELS)})")
    names = features.get(label, {}).get("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = None
    check_distinct(file, names or ())
    return image, label, names


def _image_column(file: Path, schema: Any) -> str:
    images = []
    for column in schema:
        inside = {column.type.field(k).name for k in range(column.type.num_fields)}
        if {"bytes", "path"} <= inside and column.type.num_fields == 2:
            images.append(str(column.name))
    if not images:
        raise DataError(f"{file} has no column of images")
    return "image" if "image" in images else images[0]  # a mask may come first


def _class_of(label: Any, names: Sequence[str] | None, image: str) -> str:
    """The class of an image; "" if it has no label."""
    if label is None or label == -1 or label != label:  # NaN is what a table of pandas has for none
        return ""
    if not isinstance(label, str | int | float | Decimal):
        raise DataError(f"the label {shown(str(label))} of {shown(image)} is neither text nor a number")
    text = str(label).strip()
    return class_of(text, names, image) if text else ""


def _labelled(rows: list[PackedRow], folder: Path) -> list[PackedRow]:
    """The rows without splits that have no labels, as some test splits on the hub."""
    known = {row.split for row in rows if row.class_name}
    labelled = [row for row in rows if row.split in known]
    without = next((row.name for row in labelled if not row.class_name), None)
    if without is not None:
        raise DataError(f"{folder}: {shown(without)} has no label")
    return labelled


# -------------------------------------------------------------------------------------------- imagefolder with metadata


def _metadata_files(folder: Path) -> list[Path]:
    return [file for name in _METADATA for file in files_in(folder, name)]


def holds_metadata(folder: Path) -> bool:
    """Whether a folder has metadata that lists images with labels; raises FileError if it cannot be read."""
    return any(_lists_labels(file) for file in _metadata_files(folder))


def _lists_labels(file: Path) -> bool:
    """Whether a file of metadata begins as a list of images with labels; errors are reported when it is read."""
    if file.suffix == ".csv":
        return holds_list(file)
    first = read_content(file).lstrip().split(b"\n", 1)[0]
    return all(any(f'"{key}"'.encode() in first for key in keys) for keys in (("file_name",), _LABELS))


def read_metadata(folder: Path) -> DataSet:
    """Read images listed in metadata.csv or metadata.jsonl.

    The split of an image is that of its row or, if there is none, a word of its path.

    Args:
        folder: The folder.

    Raises:
        DataError: The list is damaged, lists an image twice with other labels or splits, or files are missing.
    """
    classes, splits = listed_splits(
        image for file in _metadata_files(folder) if _lists_labels(file) for image in _listed(file, folder)
    )
    return data_set(folder.resolve().name, folder, classes, splits)


def _listed(file: Path, folder: Path) -> Iterator[Listed]:
    for place, name, label, split in csv_rows(file) if file.suffix == ".csv" else _json_rows(file):
        path = Field(name, f"{file} {place}").below(file.parent)
        yield Listed(f"{file} {place}", name, path, label, split or split_in(path.relative_to(folder)) or "train")


def _json_rows(file: Path) -> Iterator[Row]:
    rows: list[dict[str, Any]] = read_json_lines(file, dict[str, Any])
    columns = {name: [str(row[name]) for row in rows if row.get(name) is not None] for name in SPLIT_COLUMNS}
    column = split_column({name: own for name, own in columns.items() if own})
    # The same column for all rows: where it is null, another one may hold something else, such as a coarser class.
    key = next((key for key in _LABELS if any(type(row.get(key)) in (str, int) for row in rows)), _LABELS[0])
    for number, row in enumerate(rows, start=1):
        place, label = f"line {number}", row.get(key)
        if not isinstance(row.get("file_name"), str) or type(label) not in (str, int) or not str(label).strip():
            raise DataError(f"{file} {place} has no file_name or no label")
        if column is not None and row.get(column) is None:
            raise DataError(f"{file} {place} has no {column}, and other lines have one")
        own = None if column is None else split_called(str(row[column]), f"{file} {place}")
        yield place, row["file_name"], str(label).strip(), own
