"""The cache of decoded images: a folder of memory-mapped files, which runs share."""

import errno
import hashlib
import os
import platform
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from semaug.data.images import Preprocessing, Unreadable, decode, unreadable_images
from semaug.data.samples import Samples
from semaug.util import distributed
from semaug.util.errors import DataError, FileError, SettingError
from semaug.util.files import write_json
from semaug.util.locks import locked
from semaug.util.processes import is_other_process
from semaug.util.progress import ProgressCallback
from semaug.util.untrusted import add_checksum, is_intact, map_array, read_json

_DECODER = 4  # raised when the same file gives other pixels, or cache files change, so that old ones are not used

_ELSEWHERE = "choose another `cache` folder, or None"
_STREAM = "set `images_on` to stream to decode them in every epoch"


def decoded(
    samples: Samples,
    preprocessing: Preprocessing,
    cache: Path | None,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Tensor:
    """Decode all images of a split, or map them from the cache; a damaged cache file is decoded again.

    Args:
        samples: The images.
        preprocessing: How to resize them.
        cache: Folder of memory-mapped files, which runs share; None decodes into memory.
        workers: Number of processes that decode; 0 decodes in this one.
        progress: Called with the number of images done and their total.

    Returns:
        Uint8 (N, resize, resize, 3).

    Raises:
        DataError: Images cannot be read; nothing is then cached.
        FileError: The cache cannot be read or written.
    """
    shape = (len(samples), preprocessing.resize, preprocessing.resize, 3)
    if cache is None:
        pixels = np.empty(shape, dtype=np.uint8)
        unreadable = decode(samples, preprocessing, workers, progress, pixels)
    else:
        remove_damaged(cache_file(samples, preprocessing, cache), shape, np.uint8, progress)
        unreadable = decode_into_cache(samples, preprocessing, cache, workers, progress)
    if unreadable:
        names = [(samples.name(i), why) for i, why in unreadable.items()]
        raise DataError(f"{unreadable_images(names, len(samples))}; repair or remove them")
    if cache is not None:
        pixels = map_array(cache_file(samples, preprocessing, cache), shape, np.uint8)
    return torch.from_numpy(pixels)


def cache_file(samples: Samples, preprocessing: Preprocessing, cache: Path) -> Path:
    """The file in the cache for a split; another one if any image, its size or date, or the resizing changes."""
    key = f"{_DECODER}{samples.fingerprint()}{preprocessing.resize}{preprocessing.shape}"
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"


def remove_damaged(file: Path, shape: tuple[int, ...], dtype: Any, progress: ProgressCallback | None = None) -> None:
    """Remove a cache file that is damaged, with a warning, so that it is written again.

    Under torchrun only the first process of each machine reads the file; the others wait for it
    (:func:`semaug.util.distributed.raise_on_all_ranks`).

    Args:
        file: The file, which need not exist.
        shape: Shape of the array in it.
        dtype: Type of the array.
        progress: Called with the number of rows checked and their total.

    Raises:
        FileError: The file cannot be read or removed.
    """

    def is_damaged() -> bool:
        return file.exists() and not is_intact(file, shape, dtype, progress)

    if distributed.is_running() and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if not is_damaged():
        return
    with locked(file.parent, f"{file.stem}.lock", wait=True):
        if not is_damaged():  # another process has written it again meanwhile
            return
        try:
            file.unlink()
        except OSError as error:
            raise FileError(f"{file} is damaged, and cannot be removed: {error.strerror or error}") from error
    warnings.warn(f"semaug: {file} was damaged; writing it again", stacklevel=2)


def decode_into_cache(
    samples: Samples,
    preprocessing: Preprocessing,
    cache: Path,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Unreadable:
    """Write the cache file of a split, unless it exists; of processes with the same images, one decodes them.

    Args:
        samples: The split.
        preprocessing: How images are resized.
        cache: Folder of the cache.
        workers: Number of processes; 0 decodes in this one.
        progress: Called with the number of images done and their total.

    Returns:
        The images that cannot be read; if there are any, no file is written.

    Raises:
        FileError: The cache cannot be written.
    """
    file = cache_file(samples, preprocessing, cache)
    if file.exists():
        return {}
    try:
        with locked(cache, f"{file.stem}.lock", wait=True):
            # Another process may have decoded the same images meanwhile.
            return {} if file.exists() else _fill_cache(file, samples, preprocessing, workers, progress)
    except FileError as error:
        raise FileError(f"{error}; {_ELSEWHERE}") from error


def _fill_cache(
    file: Path, samples: Samples, preprocessing: Preprocessing, workers: int, progress: ProgressCallback | None
) -> Unreadable:
    # The folder may be shared between machines.
    machine = re.sub(r"[^A-Za-z0-9]", "-", platform.node())
    unfinished = file.with_suffix(f".{machine}.{os.getpid()}.part")
    try:
        for leftover in file.parent.glob(f"{file.stem}.{machine}.*.part"):
            if not is_other_process(int(leftover.suffixes[-2][1:])):
                leftover.unlink(missing_ok=True)
        pixels = _allocated(unfinished, (len(samples), preprocessing.resize, preprocessing.resize, 3))
        unreadable = decode(samples, preprocessing, workers, progress, pixels)
        pixels.flush()
        del pixels
        if not unreadable:
            with open(unfinished, "rb+") as written:
                add_checksum(written)
            unfinished.replace(file)
    except OSError as error:
        raise FileError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return unreadable


def _allocated(file: Path, shape: tuple[int, ...]) -> "np.memmap[Any, np.dtype[np.uint8]]":
    """A new memory-mapped array with its disk space reserved: writing to a full disk would crash the process."""
    pixels: np.memmap[Any, np.dtype[np.uint8]]
    pixels = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with open(file, "rb+") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return pixels


def check_free_space(splits: Mapping[str, Samples], preprocessing: Preprocessing, cache: Path | None) -> str | None:
    """Check that the decoded training and validation images fit into memory or the cache.

    Args:
        splits: The splits of a run.
        preprocessing: Gives the size of a decoded image.
        cache: Folder of the cache, which is created; None keeps decoded images in memory.

    Returns:
        A warning if they fit on the disk but not into memory, else None.

    Raises:
        SettingError: They do not fit.
        FileError: The cache cannot be written.
    """
    stored = [samples for split, samples in splits.items() if split != "test"]
    bytes_each = preprocessing.resize**2 * 3
    needed = sum(map(len, stored)) * bytes_each
    if cache is not None and needed > (free := _free(cache)):
        missing = [samples for samples in stored if not cache_file(samples, preprocessing, cache).exists()]
        to_write = sum(map(len, missing)) * bytes_each
        if to_write > free:
            raise SettingError(
                f"the decoded images take {_gigabytes(to_write)}, and {cache} has {_gigabytes(free)} left; {_STREAM}, "
                "or choose another `cache` folder"
            )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed <= memory:
        return None
    message = f"the decoded images take {_gigabytes(needed)}, and memory has {_gigabytes(memory)}; {_STREAM}"
    if cache is None:
        raise SettingError(message)
    return message


def _free(folder: Path) -> int:
    """Free bytes on the disk of a folder, which is created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise FileError(f"cannot write to {folder}: {error.strerror or error}; {_ELSEWHERE}") from error


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


# ------------------------------------------------------------------------------------------------- what it holds


class _Note(TypedDict):
    data: str


@dataclass(frozen=True)
class Entry:
    """The files of one split of a data set in the cache."""

    key: str  # the beginning of their names
    files: tuple[Path, ...]
    data: str  # the data set and the split
    bytes: int
    used: float  # when it was last used, in seconds since 1970


def note_use(file: Path, data: str) -> None:
    """Write beside a cache file which data it holds; the date of the note says when they were last used.

    Args:
        file: The cache file, see :func:`cache_file`.
        data: The data set and the split.
    """
    with suppress(FileError):
        write_json(file.with_suffix(".json"), {"data": data})


def entries(folder: Path) -> list[Entry]:
    """List the entries of a cache, the largest first."""
    files: dict[str, list[Path]] = {}
    for file in folder.iterdir() if folder.is_dir() else ():
        if match := re.fullmatch(r"([0-9a-f]{32})\..*(?<!\.lock)", file.name):
            files.setdefault(match[1], []).append(file)
    return sorted((_entry(folder, key, members) for key, members in files.items()), key=lambda entry: -entry.bytes)


def _entry(folder: Path, key: str, files: list[Path]) -> Entry:
    suffixes = {suffix for file in files for suffix in file.suffixes}
    data = "unknown" if ".npy" in suffixes else "unfinished" if ".part" in suffixes else "unreadable images, a list"
    with suppress(FileError):
        data = read_json(folder / f"{key}.json", _Note)["data"]
    states = [file.stat() for file in files]
    sizes, dates = [state.st_size for state in states], [state.st_mtime for state in states]
    return Entry(key, tuple(files), data, sum(sizes), max(dates))


def delete(unwanted: Iterable[Entry]) -> int:
    """Delete entries of a cache, except those that another process is writing; returns the bytes freed."""
    freed = 0
    for entry in unwanted:
        with suppress(FileError), locked(entry.files[0].parent, f"{entry.key}.lock"):
            for file in entry.files:
                file.unlink(missing_ok=True)
            freed += entry.bytes
    return freed
