"""`semaug cache`: list or delete the cached decoded images."""

import time
from dataclasses import dataclass
from pathlib import Path

from semaug.cli.common import Command, show
from semaug.util.ranges import NotNegative


@dataclass(frozen=True)
class Cache(Command):
    """List the decoded images in the cache, or delete them."""

    folder: Path = Path("~/.cache/semaug")
    """Folder of the cache."""
    clear: bool = False
    """Delete them; training decodes them again when it needs them."""
    unused_days: NotNegative = 0.0
    """Delete only images that were not used for this many days."""

    def run(self) -> None:
        from semaug.data.cache import delete, entries
        from semaug.util.files import expanded
        from semaug.util.names import counted

        folder = expanded(self.folder)
        listed = entries(folder)
        for entry in listed:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
            show(f"{_size(entry.bytes):>9}  last used {used}  {entry.data}")
        size = _size(sum(entry.bytes for entry in listed))
        total = f"{folder}: {counted(len(listed), 'split')} of data sets, {size}"
        if not self.clear:
            show(total)
            return
        limit = time.time() - 86400 * self.unused_days
        freed = delete(entry for entry in listed if entry.used <= limit)
        show(f"{total}, of which {_size(freed)} were deleted")


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
