"""Folders of tar files in the layout of WebDataset, as other programs write them: KEY.jpg beside KEY.cls or KEY.json.

The headers of all tar files are read once; images are then read directly from where they are. (Our own shards have an
index and checksums: :mod:`semaug.data.shards`.)
"""

import os
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from semaug.data.annotations import check_distinct, lines, reading, splits_in
from semaug.data.downloads import TarHeader
from semaug.data.packed import PackedRow, class_of, files_in, packed_data
from semaug.data.samples import IMAGE_SUFFIXES, MAX_IMAGE_BYTES, DataSet
from semaug.util.errors import DataError
from semaug.util.names import shown, some
from semaug.util.untrusted import CHUNK_BYTES, open_regular, parse_json

_MAX_LABEL_BYTES = 2**20
_JSON_LABELS = ("label", "cls", "class", "class_name", "category")


def holds_tars(folder: Path) -> bool:
    """Whether a folder holds tar files, itself or in folders of splits."""
    return bool(files_in(folder, "*.tar"))


def read_webdataset(folder: Path) -> DataSet:
    """Read tar files of images and labels.

    The split is a word of a tar file's path, such as ``birds-train-0001.tar`` or ``val/0001.tar``. If no path has the
    word train, those without a word for a split are "train"; otherwise they are ignored and counted. KEY.cls holds the
    label as text; KEY.json an object with "label" (or "cls", "class", "class_name", "category"). The first line of a
    classnames.txt in the folder names label 0, the next one label 1, and so on.

    Args:
        folder: The folder.

    Raises:
        DataError: A tar file is damaged, or an image has no label.
    """
    files = files_in(folder, "*.tar")
    names = _class_names(folder / "classnames.txt") if (folder / "classnames.txt").is_file() else None
    ignored = Counter(file.suffix for kind in ("*.tar.gz", "*.tgz") for file in files_in(folder, kind))
    rows, keys = list[PackedRow](), set[str]()
    for number, (file, split) in enumerate(zip(files, splits_in([f.relative_to(folder) for f in files]), strict=True)):
        for offset, size, label, name in _images(file, f"{file.relative_to(folder).as_posix()}/", ignored, keys):
            rows.append(PackedRow(split, number, offset, size, class_of(label, names, name), name))
    if len(keys) > 1:  # the others may be something else, such as coarser classes
        raise DataError(f"the labels of {folder} are in several places: {some(sorted(keys))}; use one for all images")
    return packed_data(folder, files, rows, names or (), ignored=ignored)


def _class_names(file: Path) -> list[str]:
    names = list(lines(file))
    for number, name in enumerate(names, start=1):
        if name.place != f"{file} line {number}":
            raise DataError(f"{name.place} follows a blank line, so its label is unclear")
    check_distinct(file, [name.text for name in names])
    return [name.text for name in names]


class _Part(NamedTuple):
    """A file of a sample: its offset, size and name."""

    offset: int
    size: int
    name: str


def _images(file: Path, prefix: str, ignored: Counter[str], keys: set[str]) -> list[tuple[int, int, str, str]]:
    """Offset and size of each image of a tar file, its label and its name.

    A key may have dots in it. An image such as KEY.mask.png without a label of its own is another part of the sample
    KEY. `ignored` is increased by the labelled samples that have no image of a known type, and `keys` by where labels
    are: ".cls", or their name in JSON.
    """
    samples: dict[str, dict[str, _Part]] = {}
    images: list[tuple[int, int, str, str]] = []
    without: list[str] = []
    with (
        reading(file),
        open_regular(file) as opened,
        tarfile.open(fileobj=opened, mode="r:", tarinfo=TarHeader) as archive,
    ):
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # which would grow with the archive
            key, kind = os.path.splitext(member.name)
            is_hidden = os.path.basename(key).startswith(".")
            if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None or is_hidden:
                continue
            parts, part = samples.setdefault(key, {}), _Part(member.offset_data, member.size, member.name)
            if parts.setdefault(kind.lower(), part) is not part:
                raise DataError(f"{file} has two members {shown(member.name)}")
        if any(os.pread(opened.fileno(), CHUNK_BYTES, archive.offset) or b"cut off"):  # empty blocks mark its end
            raise DataError(f"{file} is damaged or cut off, or another archive follows in it")
        for key, parts in samples.items():
            pictures = [parts[kind] for kind in parts if kind in IMAGE_SUFFIXES and parts[kind].size <= MAX_IMAGE_BYTES]
            if len(pictures) > 1:
                raise DataError(f"{file} has two images with one key: {some(part.name for part in pictures)}")
            described = parts.get(".cls") or parts.get(".json")
            label = _label(opened, described, file, keys) if pictures and described else ""
            if label:
                images.append((*pictures[0][:2], label, prefix + pictures[0].name))
            elif pictures:
                above, slash, base = key.rpartition("/")
                first = f"{above}{slash}{base.partition('.')[0]}"
                if first == key or not IMAGE_SUFFIXES & samples.get(first, {}).keys():
                    without.append(pictures[0].name)
            else:
                others = [kind for kind in parts if kind not in (".cls", ".json")]
                if ".cls" in parts or (".json" in parts and others):
                    ignored[next(iter(others), ".cls")] += 1
    if without:
        raise DataError(f"{len(without)} images of {file} have no .cls or label in .json, first {shown(without[0])}")
    return images


def _label(opened: BinaryIO, part: _Part, file: Path, keys: set[str]) -> str:
    place = f"{file}: {shown(part.name)}"
    if part.size > _MAX_LABEL_BYTES:
        raise DataError(f"{place} has more than {_MAX_LABEL_BYTES} bytes")
    content = os.pread(opened.fileno(), part.size, part.offset)
    if not part.name.lower().endswith(".json"):
        try:
            label = content.decode().strip()
            keys.update([".cls"] if label else [])
            return label
        except UnicodeDecodeError as error:  # two labels could become the same
            raise DataError(f"{place} is not UTF-8 text") from error
    values: dict[str, Any] = parse_json(content, place, dict[str, Any])
    key = next((name for name in _JSON_LABELS if type(values.get(name)) in (str, int)), None)
    if key is None:
        return ""
    keys.add(key)
    return str(values[key]).strip()
