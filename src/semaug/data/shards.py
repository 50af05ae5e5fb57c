"""Data sets in tar files of about a thousand images each, in the layout of WebDataset.

A folder holds `train-000000.tar` and so on, and `shards.json`: the classes, size and checksum of each tar file, and the
checksum of its table. Image `000000012` of a split is the members `000000012.jpg` (the bytes of the original file),
`000000012.cls` (the index of its class) and `000000012.txt` (its name). Beside each tar file is a table (.npy) of where
they are, with a checksum of each, followed by the names, so that any image can be read directly, and names without the
tar file. Images are shuffled when they are written, so that reading one shard after the other sees all classes
(:mod:`semaug.data.stream`).
"""

import hashlib
import io
import os
import random
import tarfile
import zlib
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import numpy as np
import numpy.typing as npt
from PIL import Image

from semaug.data.annotations import MAX_CLASS_NAME, SPLIT_NAMES
from semaug.data.samples import MAX_IMAGE_BYTES, DataSet, ImageFiles, Samples, Subset, image_in, why_unreadable
from semaug.util.errors import DataError, FileError, SettingError
from semaug.util.files import open_atomically, write_atomically, write_json
from semaug.util.names import printable
from semaug.util.progress import ProgressCallback
from semaug.util.untrusted import open_regular, read_array, read_bytes, read_json

MANIFEST, UNFINISHED = "shards.json", "shards.part.json"
_VERSION = 2
_MAX_NAME_BYTES = 4096
Table = npt.NDArray[np.int64]
"""A row for each image: offset and size of its bytes, its class, offset and size of its name, and the CRC-32 of its
bytes (-1 if it is unknown).
"""


class _Shard(TypedDict):
    file: str
    images: int
    bytes: int
    sha256: str
    table: str  # checksum of the table, which has the labels


class _Version(TypedDict):
    version: int


class _Manifest(_Version):
    """The content of shards.json."""

    name: str
    classes: list[str]
    splits: dict[str, list[_Shard]]


def write_shards(data: DataSet, folder: Path, per_shard: int = 1000, progress: ProgressCallback | None = None) -> int:
    """Write a data set as shards; the same call again resumes an interrupted one.

    Args:
        data: The data set.
        folder: A new or empty folder, or one that the same call has begun.
        per_shard: Images in each tar file, at least 1.
        progress: Called with the number of images written and their total.

    Returns:
        The number of shards.

    Raises:
        SettingError: `per_shard` is out of range, or the folder holds something else.
        DataError: An image cannot be read.
    """
    if per_shard < 1:
        raise SettingError(f"a shard must hold at least one image, not {per_shard}")
    fingerprints = {split: samples.fingerprint() for split, samples in data.splits.items()}
    _claim(folder, {"version": _VERSION, "per_shard": per_shard, "data": fingerprints})
    total, done = sum(map(len, data.splits.values())), 0
    manifest: dict[str, Any] = {"version": _VERSION, "name": data.name, "classes": list(data.classes), "splits": {}}
    for split, samples in data.splits.items():
        order = list(range(len(samples)))
        random.Random(0).shuffle(order)
        entries = manifest["splits"].setdefault(split, [])
        for start in range(0, len(order), per_shard):
            part = order[start : start + per_shard]
            file = folder / f"{split}-{start // per_shard:06d}.tar"
            if not _table_file(file).is_file():  # which is written last
                _write_shard(file, samples, part, start)
            table = _size_and_digest(_table_file(file))["sha256"]
            entries.append({"file": file.name, "images": len(part), **_size_and_digest(file), "table": table})
            done += len(part)
            if progress is not None:
                progress(done, total)
    write_json(folder / MANIFEST, manifest)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return sum(map(len, manifest["splits"].values()))


def _claim(folder: Path, plan: dict[str, Any]) -> None:
    """Check that the folder is empty, or holds unfinished shards of the same images."""
    if (folder / MANIFEST).exists():
        raise SettingError(f"{folder} already holds shards")
    if (folder / UNFINISHED).is_file():
        if read_json(folder / UNFINISHED) != plan:
            raise SettingError(f"{folder} holds unfinished shards of other images; choose another `folder`")
    elif folder.exists() and any(folder.iterdir()):
        raise SettingError(f"{folder} is not empty; choose another `folder`")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / UNFINISHED, plan)


def _write_shard(file: Path, samples: Samples, indices: list[int], first: int) -> None:
    table, names = [], []
    with (
        open_atomically(file) as opened,
        tarfile.open(fileobj=opened, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for number, i in enumerate(indices, start=first):
            content, suffix = _encoded(samples, i)
            label, name = samples.labels[i], samples.name(i).encode()[:_MAX_NAME_BYTES]
            offsets = []
            for ending, data in ((suffix, content), ("cls", b"%d" % label), ("txt", name)):
                member = tarfile.TarInfo(f"{number:09d}.{ending}")
                member.size = len(data)
                offsets.append(archive.offset + tarfile.BLOCKSIZE)  # after the header
                archive.addfile(member, io.BytesIO(data))
            table.append((offsets[0], len(content), label, offsets[2], len(name), zlib.crc32(content)))
            names.append(name)
    packed = io.BytesIO()
    np.save(packed, np.array(table, dtype=np.int64), allow_pickle=False)
    np.save(packed, np.frombuffer(b"".join(names), np.uint8), allow_pickle=False)
    write_atomically(_table_file(file), packed.getvalue())


def _encoded(samples: Samples, i: int) -> tuple[bytes, str]:
    """The bytes of an image's file and the ending of its name; PNG for an image without a file."""
    if isinstance(samples, Subset):
        return _encoded(samples.whole, samples.indices[i])
    if isinstance(samples, ImageFiles):
        file = samples.files[i]
        return read_bytes(file, MAX_IMAGE_BYTES), file.suffix.lower().removeprefix(".") or "img"
    if isinstance(samples, ShardedImages):
        return samples.content(i), Path(samples.name(i)).suffix.lower().removeprefix(".") or "img"
    content = io.BytesIO()
    samples.load(i).save(content, "PNG")
    return content.getvalue(), "png"


def _size_and_digest(file: Path) -> dict[str, Any]:
    with open_regular(file) as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _table_file(file: Path) -> Path:
    return file.with_suffix(".npy")


def holds_shards(folder: Path) -> bool:
    """Whether a folder holds shards, complete or not."""
    return (folder / MANIFEST).is_file() or (folder / UNFINISHED).is_file()


def read_shards(folder: Path) -> DataSet:
    """The data set in a folder of shards; no tar file is opened. Raises DataError if they are incomplete or damaged."""
    if not (folder / MANIFEST).is_file():
        raise DataError(f"the shards in {folder} are incomplete; write them again to resume")
    manifest = _manifest(folder)
    classes = tuple(manifest["classes"])
    splits: dict[str, Samples] = {}
    for split, entries in manifest["splits"].items():
        files = tuple(folder / entry["file"] for entry in entries)
        tables = [_table(file, entry, len(classes)) for file, entry in zip(files, entries, strict=True)]
        shard = np.repeat(np.arange(len(entries)), [len(table) for table in tables])
        table = np.concatenate(tables)
        digest = hashlib.sha256("\n".join(entry["sha256"] for entry in entries).encode()).hexdigest()
        splits[split] = ShardedImages(files, shard, table, digest)
    return DataSet(manifest["name"], classes, splits)


def damaged_shards(folder: Path) -> list[str]:
    """The names of the tar files that have changed since they were written; reads all of them."""
    entries = [entry for split in _manifest(folder)["splits"].values() for entry in split]
    return [
        entry["file"]
        for entry in entries
        if not (folder / entry["file"]).is_file()
        or _size_and_digest(folder / entry["file"]) != {"bytes": entry["bytes"], "sha256": entry["sha256"]}
    ]


def _manifest(folder: Path) -> _Manifest:
    """The manifest, all of it checked."""
    file = folder / MANIFEST
    version = read_json(file, _Version)["version"]
    if version != _VERSION:
        raise DataError(f"{file} has version {version}, and this semaug reads version {_VERSION}")
    manifest: _Manifest = read_json(file, _Manifest)
    classes, splits = manifest["classes"], manifest["splits"]
    entries = [entry for split in splits.values() for entry in split]
    is_sound = (
        len(set(classes)) == len(classes) > 0
        and max(map(len, [manifest["name"], *classes, *(entry["file"] for entry in entries)])) <= MAX_CLASS_NAME
        and splits.keys() <= set(SPLIT_NAMES.values())
        and all(min(entry["images"], entry["bytes"]) > 0 for entry in entries)
        and all(Path(entry["file"]).name == entry["file"] for entry in entries)  # inside of the folder
    )
    if not is_sound:
        raise DataError(f"{file} is damaged")
    empty = [split for split in ("train", *splits) if not splits.get(split)]
    if empty:
        raise DataError(f"the shards in {folder} have no images in the split {empty[0]}")
    return manifest


def _table(file: Path, entry: _Shard, classes: int) -> Table:
    """The table of a shard, with the offsets of names in the table's own file."""
    try:
        with open_regular(file) as archive:
            size = os.fstat(archive.fileno()).st_size
        with open_regular(_table_file(file)) as content:
            table = read_array(content, 48 * entry["images"])
            names = read_array(content, _MAX_NAME_BYTES * entry["images"])
            names_at = content.tell() - names.nbytes
    except FileError as error:
        raise DataError(f"the shard {file} cannot be read: {error}") from error
    if size != entry["bytes"]:
        raise DataError(f"the shard {file} is damaged: it has {size} bytes instead of {entry['bytes']}")
    is_sound = table.dtype == np.int64 and table.shape == (entry["images"], 6) and bool((table >= 0).all())
    if is_sound:
        offset, length, label, _, name_length, _ = table.T
        is_sound = bool((length <= np.minimum(size - offset, MAX_IMAGE_BYTES)).all() and (label < classes).all())
        is_sound &= bool((name_length <= _MAX_NAME_BYTES).all())
        is_sound &= names.dtype == np.uint8 and names.shape == (name_length.sum(),)
    if not is_sound or _size_and_digest(_table_file(file))["sha256"] != entry["table"]:
        raise DataError(f"the table of the shard {file} is damaged")
    table[:, 3] = names_at + table[:, 4].cumsum() - table[:, 4]
    return table


@dataclass(frozen=True, eq=False)
class ShardedImages:
    """A split in shards."""

    files: tuple[Path, ...]
    shard: npt.NDArray[np.int64]  # the number of each image's file
    table: Table  # offsets of names are in the tables' files
    digest: str  # the fingerprint
    labels: "array[int]" = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", array("q", self.table[:, 2].tobytes()))

    def __len__(self) -> int:
        return len(self.table)

    def content(self, i: int) -> bytes:
        """The bytes of the file of image `i`; raises DataError if they have changed since the shard was written."""
        content, expected = _read_part(self.files[self.shard[i]], self.table[i, :2]), int(self.table[i, 5])
        if expected not in (-1, zlib.crc32(content)):
            raise DataError(f"the shard {self.files[self.shard[i]].name} is damaged, or another one of the same size")
        return content

    def load(self, i: int) -> Image.Image:
        try:
            return image_in(self.content(i))
        except DataError as error:  # the name is read only now
            reason = f"cannot read the image {printable(self.name(i))}: {why_unreadable(error)}"
            raise DataError(reason) from error.__cause__

    def name(self, i: int) -> str:
        return _read_part(_table_file(self.files[self.shard[i]]), self.table[i, 3:5]).decode(errors="replace")

    def fingerprint(self, *, dates: bool = True) -> str:
        return self.digest


def _read_part(file: Path, part: npt.NDArray[np.int64]) -> bytes:
    offset, size = part.tolist()
    opened = _opened(file, os.getpid())  # keeps it open even if another thread removes it from the cache
    return os.pread(opened.fileno(), size, offset)


@lru_cache(maxsize=128)
def _opened(file: Path, process: int) -> BinaryIO:
    """An open file; each process has its own."""
    return open_regular(file)
