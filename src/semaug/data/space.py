"""Check free memory and cache space before decoding."""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from semaug.data.images import Preprocessing, cache_file
from semaug.data.samples import Samples
from semaug.util.errors import FileError, SettingError

_ADVICE = "set `images_on` to stream to decode them in every epoch"


def check_free_space(splits: Mapping[str, Samples], preprocessing: Preprocessing, cache: Path | None) -> str | None:
    """Check that the decoded training and validation images fit into memory or the cache.

    Args:
        splits: The splits of a run.
        preprocessing: Gives the size of a decoded image.
        cache: Folder of the cache; None keeps decoded images in memory.

    Returns:
        A warning if they fit on the disk but not into memory, else None.

    Raises:
        SettingError: They do not fit.
        FileError: The cache cannot be written.
    """
    stored = {split: samples for split, samples in splits.items() if split != "test"}
    needed, memory = sum(_bytes(samples, preprocessing) for samples in stored.values()), _memory()
    if cache is not None and needed > (free := _free(cache)):
        for samples in stored.values():
            needed -= _bytes(samples, preprocessing) if cache_file(samples, preprocessing, cache).exists() else 0
        if needed > free:
            raise SettingError(
                f"the decoded images take {_gigabytes(needed)}, and {cache} has {_gigabytes(free)} left; {_ADVICE}, "
                "or choose another `cache` folder"
            )
    if needed <= memory:
        return None
    message = f"the decoded images take {_gigabytes(needed)}, and memory has {_gigabytes(memory)}; {_ADVICE}"
    if cache is None:
        raise SettingError(message)
    return message


def _bytes(samples: Samples, preprocessing: Preprocessing) -> int:
    return len(samples) * preprocessing.resize**2 * 3


def _memory() -> int:
    """All memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free(folder: Path) -> int:
    """Free bytes on the disk of a folder, which is created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return shutil.disk_usage(folder).free
    except OSError as error:
        reason = error.strerror or error
        raise FileError(f"cannot write to {folder}: {reason}; choose another `cache` folder, or None") from error


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
