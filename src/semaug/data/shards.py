"""Data sets in tar files of about a thousand images each, in the layout of WebDataset.

A folder holds `train-000000.tar` and so on, and `shards.json`: classes, and size and checksum of each tar file. Image
`000000012` of a split is the members `000000012.jpg` (the bytes of the original file), `000000012.cls` (the index of
its class) and `000000012.txt` (its name). Beside each tar file lies a table of where they are, so that any image can be
read at once: a data set in shards is read as every other one is. The table file holds the names, too, after the table:
choosing validation images by name reads no tar file. (Where it holds none, as in shards of earlier versions, names are
read from the tar file.) Images are shuffled when they are written, so that reading one shard after the other meets all
classes; training meets them so (`stream.py`).
"""

import hashlib
import io
import os
import random
import tarfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from semaug.data.samples import DataSet, ImageFiles, Samples, Subset, image_in, why_unreadable
from semaug.util.errors import SemaugError, printable
from semaug.util.files import read_json, write_atomically, write_json

MANIFEST, UNFINISHED = "shards.json", "shards.part.json"
VERSION = 1
LONGEST_NAME = 4096  # bytes
Table = npt.NDArray[np.int64]
"""A row for each image: offset and size of its bytes, its class, offset and size of its name."""

Progress = Callable[[int, int], None]


# ---------------------------------------------------------------------------------------------------------- writing


def write_shards(data: DataSet, folder: Path, per_shard: int = 1000, progress: Progress | None = None) -> int:
    """Write a data set as shards; returns their number. A call that was broken off goes on where it stopped."""
    if per_shard < 1:
        raise SemaugError(f"a shard must hold at least one image, not {per_shard}")
    plan = {
        "version": VERSION,
        "per_shard": per_shard,
        "data": {split: samples.fingerprint() for split, samples in data.splits.items()},
    }
    _claim(folder, plan)
    total, done = sum(map(len, data.splits.values())), 0
    manifest: dict[str, Any] = {"version": VERSION, "name": data.name, "classes": list(data.classes), "splits": {}}
    for split, samples in data.splits.items():
        order = list(range(len(samples)))
        random.Random(0).shuffle(order)
        entries = manifest["splits"].setdefault(split, [])
        for start in range(0, len(order), per_shard):
            part = order[start : start + per_shard]
            file = folder / f"{split}-{start // per_shard:06d}.tar"
            if not _table_file(file).is_file():  # which is written last
                _write_shard(file, samples, part, start)
            entries.append({"file": file.name, "images": len(part), **_size_and_digest(file)})
            done += len(part)
            if progress is not None:
                progress(done, total)
    write_json(folder / MANIFEST, manifest)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return sum(map(len, manifest["splits"].values()))


def _claim(folder: Path, plan: dict[str, Any]) -> None:
    """See that the folder is empty, or holds the beginning of the same shards."""
    if (folder / MANIFEST).exists():
        raise SemaugError(f"{folder} holds shards already")
    if (folder / UNFINISHED).is_file():
        if read_json(folder / UNFINISHED) != plan:
            raise SemaugError(f"{folder} holds the beginning of shards of other images; name another folder")
    elif folder.exists() and any(folder.iterdir()):
        raise SemaugError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / UNFINISHED, plan)


def _write_shard(file: Path, samples: Samples, indices: list[int], first: int) -> None:
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
            for place, i in enumerate(indices, start=first):
                content, suffix = _encoded(samples, i)
                name = samples.name(i).encode()[:LONGEST_NAME]
                for ending, data in ((suffix, content), ("cls", b"%d" % samples.labels[i]), ("txt", name)):
                    member = tarfile.TarInfo(f"{place:09d}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        with open(unfinished, "rb+") as written:
            os.fsync(written.fileno())
        table = _scanned(unfinished)
        names = b"".join(_read(unfinished, table[:, 3:]))
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    packed = io.BytesIO()
    np.save(packed, table, allow_pickle=False)
    np.save(packed, np.frombuffer(names, np.uint8), allow_pickle=False)
    write_atomically(_table_file(file), packed.getvalue())


def _encoded(samples: Samples, i: int) -> tuple[bytes, str]:
    """The bytes of an image as they are in its file, and the ending of its name; PNG of one that is in no file."""
    if isinstance(samples, Subset):
        return _encoded(samples.whole, samples.indices[i])
    if isinstance(samples, ImageFiles):
        file = samples.files[i]
        try:
            return file.read_bytes(), file.suffix.lower().removeprefix(".") or "img"
        except OSError as error:
            raise SemaugError(f"cannot read {printable(file)}: {error.strerror or error}") from error
    content = io.BytesIO()
    samples.load(i).save(content, "PNG")
    return content.getvalue(), "png"


def _scanned(file: Path) -> Table:
    """Where the members of a shard are that :func:`_write_shard` has written."""
    with tarfile.open(file) as archive:
        members = list(archive)
    images, labels, names = (
        np.array([(member.offset_data, member.size) for member in members[kind::3]], dtype=np.int64).reshape(-1, 2)
        for kind in range(3)
    )
    classes = np.array([[int(label)] for label in _read(file, labels)], dtype=np.int64).reshape(-1, 1)
    return np.hstack([images, classes, names])


def _read(file: Path, parts: Table) -> Iterator[bytes]:
    """Parts of a file, given by offset and size."""
    with open(file, "rb") as content:
        for offset, size in parts.tolist():
            content.seek(offset)
            yield content.read(size)


def _size_and_digest(file: Path) -> dict[str, Any]:
    with open(file, "rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _table_file(file: Path) -> Path:
    return file.with_suffix(".npy")


# ---------------------------------------------------------------------------------------------------------- reading


def holds_shards(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or (folder / UNFINISHED).is_file()


def read_shards(folder: Path) -> DataSet:
    """The data set in a folder of shards."""
    if not (folder / MANIFEST).is_file():
        raise SemaugError(f"the shards in {folder} are not complete; run the command that makes them again")
    manifest = _manifest(folder)
    classes = tuple(manifest["classes"])
    splits: dict[str, Samples] = {
        split: _read_split(folder, entries, len(classes)) for split, entries in manifest["splits"].items()
    }
    if "train" not in splits:
        raise SemaugError(f"the shards in {folder} have no split train")
    return DataSet(manifest["name"], classes, splits)


def damaged_shards(folder: Path) -> list[str]:
    """The names of tar files that are not what they were when they were written."""
    entries = [entry for split in _manifest(folder)["splits"].values() for entry in split]
    return [
        entry["file"]
        for entry in entries
        if not (folder / entry["file"]).is_file()
        or _size_and_digest(folder / entry["file"]) != {key: entry[key] for key in ("bytes", "sha256")}
    ]


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest, of which nothing is believed that was not looked at."""
    file = folder / MANIFEST
    manifest = read_json(file)
    try:
        if manifest["version"] != VERSION:
            raise SemaugError(f"{file} is of version {manifest['version']!r}, and this semaug reads version {VERSION}")
        names = [manifest["name"], *manifest["classes"], *manifest["splits"]]
        entries = [entry for split in manifest["splits"].values() for entry in split]
        names += [entry["file"] for entry in entries] + [entry["sha256"] for entry in entries]
        sound = isinstance(manifest["classes"], list) and all(isinstance(name, str) for name in names)
        sound &= all(type(entry[key]) is int and entry[key] > 0 for entry in entries for key in ("images", "bytes"))
        sound &= all(Path(entry["file"]).name == entry["file"] for entry in entries)  # inside of the folder
        sound &= len(set(manifest["classes"])) == len(manifest["classes"]) > 0
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise SemaugError(f"{file} is damaged")
    return dict(manifest)


def _read_split(folder: Path, entries: list[dict[str, Any]], classes: int) -> "ShardedImages":
    files = tuple(folder / entry["file"] for entry in entries)
    tables, names = [], []
    for file, entry in zip(files, entries, strict=True):
        table, named_in = _table(file, entry, classes)
        tables.append(table)
        names.append(named_in)
    shard = np.repeat(np.arange(len(entries)), [len(table) for table in tables])
    table = np.concatenate(tables) if tables else np.empty((0, 5), np.int64)
    digest = hashlib.sha256("\n".join(entry["sha256"] for entry in entries).encode()).hexdigest()
    return ShardedImages(files, tuple(names), shard, table, digest)


def _table(file: Path, entry: dict[str, Any], classes: int) -> tuple[Table, Path]:
    """The table of a shard, and the file that the places of names in it refer to. The tar file is not opened."""
    try:
        size = file.stat().st_size
        table, letters_at, names = _table_and_names(_table_file(file))
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise SemaugError(f"the shard {printable(file)} cannot be read: {error}") from error
    if size != entry["bytes"]:
        raise SemaugError(f"the shard {printable(file)} has {size} bytes and not {entry['bytes']}: it is damaged")
    sound = table.dtype == np.int64 and table.shape == (entry["images"], 5) and bool((table >= 0).all())
    if sound:
        offset, length, label, name, letters = table.T
        sound = bool((length <= size - offset).all() and (letters <= size - name).all())
        sound &= bool((label < classes).all() and (letters <= LONGEST_NAME).all())
        sound &= names is None or (names.dtype == np.uint8 and names.shape == (letters.sum(),))
    if not sound:
        raise SemaugError(f"the table of the shard {printable(file)} is damaged")
    if names is None:
        return table, file
    table[:, 3] = letters_at + table[:, 4].cumsum() - table[:, 4]
    return table, _table_file(file)


def _table_and_names(file: Path) -> tuple[npt.NDArray[Any], int, npt.NDArray[Any] | None]:
    """The table in a file, and offset and letters of the names behind it; None where there are no names."""
    with open(file, "rb") as content:
        table = np.lib.format.read_array(content, allow_pickle=False)
        if content.tell() == os.fstat(content.fileno()).st_size:
            return table, 0, None
        names = np.lib.format.read_array(content, allow_pickle=False)
        return table, content.tell() - names.nbytes, names


@dataclass(frozen=True, eq=False)
class ShardedImages:
    """The images of a split in shards."""

    files: tuple[Path, ...]
    names: tuple[Path, ...]  # the file in which the names of each shard's images are
    shard: npt.NDArray[np.int64]  # of each image
    table: Table
    digest: str
    labels: "array[int]" = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", array("q", self.table[:, 2].tobytes()))

    def __len__(self) -> int:
        return len(self.table)

    def load(self, i: int) -> Image.Image:
        content = self._bytes(self.files, i, 0)
        try:
            return image_in(content)
        except SemaugError as error:  # the name is looked up only now
            reason = f"cannot read the image {printable(self.name(i))}: {why_unreadable(error)}"
            raise SemaugError(reason) from error.__cause__

    def name(self, i: int) -> str:
        return self._bytes(self.names, i, 3).decode(errors="replace")

    def fingerprint(self) -> str:
        return self.digest

    def _bytes(self, files: tuple[Path, ...], i: int, column: int) -> bytes:
        offset, size = self.table[i, column : column + 2].tolist()
        file = _opened(files[self.shard[i]], os.getpid())  # held here, as another thread may put it out of the cache
        return os.pread(file.fileno(), size, offset)


@lru_cache(maxsize=128)
def _opened(file: Path, process: int) -> BinaryIO:
    """A shard, kept open; each process has its own."""
    try:
        return open(file, "rb")
    except OSError as error:
        raise SemaugError(f"the shard {printable(file)} cannot be read: {error.strerror or error}") from error
