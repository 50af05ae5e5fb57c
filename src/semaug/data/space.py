"""Whether decoded images fit where they are to be kept: told before the first of them is decoded."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from semaug.data.images import Preprocessing, cache_file
from semaug.data.samples import Samples
from semaug.util.errors import SemaugError

ADVICE = "--images-on stream decodes them when they are needed"


def check_free_space(splits: Mapping[str, Samples], preprocessing: Preprocessing, cache: Path | None) -> str | None:
    """See that the pixels that training keeps fit into memory or the cache; returns a hint where they are many."""
    kept = {split: samples for split, samples in splits.items() if split in ("train", "val")}
    needed = sum(_bytes(samples, preprocessing) for samples in kept.values())
    memory = _memory()
    if cache is None and needed > memory:
        raise SemaugError(
            f"the decoded images take {_gigabytes(needed)}, and memory has {_gigabytes(memory)}; {ADVICE}"
        )
    if cache is not None and needed > (free := _free(cache)):
        needed = sum(
            _bytes(samples, preprocessing)
            for samples in kept.values()
            if not cache_file(samples, preprocessing, cache).exists()
        )
        if needed > free:
            raise SemaugError(
                f"the decoded images take {_gigabytes(needed)}, and {cache} has {_gigabytes(free)} left; {ADVICE}, "
                "and --cache names another folder"
            )
    if needed > memory:
        return f"the decoded images take {_gigabytes(needed)}, and memory has {_gigabytes(memory)}; {ADVICE}"
    return None


def _bytes(samples: Samples, preprocessing: Preprocessing) -> int:
    return len(samples) * preprocessing.resize**2 * 3


def _memory() -> int:
    """All of this machine's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free(folder: Path) -> int:
    """What is left on the disk on which a folder is, or will be."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
