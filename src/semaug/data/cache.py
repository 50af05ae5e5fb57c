"""The cache of decoded images: what it holds, and how to empty it."""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from semaug.util.errors import FileError
from semaug.util.files import write_json
from semaug.util.locks import locked
from semaug.util.untrusted import read_json


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
        file: The cache file, see :func:`semaug.data.images.cache_file`.
        data: The data set and the split.
    """
    with suppress(FileError):
        write_json(file.with_suffix(".json"), {"data": data})


def entries(folder: Path) -> list[Entry]:
    """List what a cache holds, the largest first."""
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
