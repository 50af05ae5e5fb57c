"""Folders of tar files in the layout of WebDataset, as other programs write them: KEY.jpg beside KEY.cls or KEY.json.

The headers of all tar files are read once; images are then read directly from where they are. (Our own shards have an
index and checksums: :mod:`semaug.data.shards`.)
"""

import os
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

from semaug.data.annotations import lines, reading, split_in
from semaug.data.downloads import TarHeader
from semaug.data.packed import PackedRow, class_of, files_in, packed_data
from semaug.data.samples import IMAGE_SUFFIXES, MAX_IMAGE_BYTES, DataSet
from semaug.util.errors import DataError
from semaug.util.names import shown
from semaug.util.untrusted import open_regular, parse_json

_MAX_LABEL_BYTES = 2**20
_JSON_LABELS = ("label", "cls", "class", "class_name", "category")


def holds_tars(folder: Path) -> bool:
    """Whether a folder holds tar files, itself or in folders of splits."""
    return bool(files_in(folder, "*.tar"))


def read_webdataset(folder: Path) -> DataSet:
    """Read tar files of images and labels.

    The split is a word of a tar file's path, such as ``birds-train-0001.tar`` or ``val/0001.tar``, and "train" if there
    is none. KEY.cls holds the label as text; KEY.json an object with "label" (or "cls", "class", "class_name",
    "category"). Line N of a classnames.txt in the folder names label N.

    Args:
        folder: The folder.

    Raises:
        DataError: A tar file is damaged, or an image has no label.
    """
    files = files_in(folder, "*.tar")
    names = [line.text for line in lines(folder / "classnames.txt")] if (folder / "classnames.txt").is_file() else None
    rows = []
    for number, file in enumerate(files):
        split = split_in(file.relative_to(folder))
        for offset, size, label, name in _images(file, f"{file.relative_to(folder).as_posix()}/"):
            rows.append(PackedRow(split, number, offset, size, class_of(label, names, name), name))
    return packed_data(folder, files, rows, names or ())


def _images(file: Path, prefix: str) -> list[tuple[int, int, str, str]]:
    """Offset and size of each image of a tar file, its label and its name."""
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, str] = {}
    with (
        reading(file),
        open_regular(file) as opened,
        tarfile.open(fileobj=opened, mode="r:", tarinfo=TarHeader) as archive,
    ):
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # which would grow with the archive
            folder, _, base = member.name.rpartition("/")
            key, _, kind = base.partition(".")
            key, kind = f"{folder}/{key}", kind.lower()
            if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
                continue
            if f".{kind}" in IMAGE_SUFFIXES and member.size <= MAX_IMAGE_BYTES:
                images[key] = member.offset_data, member.size, prefix + member.name
            elif kind in ("cls", "json") and (kind == "cls" or key not in labels):
                labels[key] = _label(opened, member, f"{file}: {shown(member.name)}")
        if any(os.pread(opened.fileno(), tarfile.BLOCKSIZE, archive.offset) or b"cut off"):
            raise DataError(f"{file} is damaged or cut off")  # its end is marked by empty blocks
    without = [name for key, (_, _, name) in images.items() if not labels.get(key)]
    if without:
        raise DataError(f"{len(without)} images of {file} have no .cls or label in .json, first {shown(without[0])}")
    return [(offset, size, labels[key], name) for key, (offset, size, name) in images.items()]


def _label(file: BinaryIO, member: tarfile.TarInfo, place: str) -> str:
    if member.size > _MAX_LABEL_BYTES:
        raise DataError(f"{place} has more than {_MAX_LABEL_BYTES} bytes")
    content = os.pread(file.fileno(), member.size, member.offset_data)
    if not member.name.lower().endswith(".json"):
        return content.decode(errors="replace").strip()
    values: dict[str, Any] = parse_json(content, place, dict[str, Any])
    label = next((values[name] for name in _JSON_LABELS if type(values.get(name)) in (str, int)), "")
    return str(label).strip()
