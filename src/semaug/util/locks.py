"""One writer per folder."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from semaug.util.errors import FileError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only process that writes to a folder, which is created.

    The kernel releases the lock when the process ends, however it ends. It is a POSIX lock: child processes do not
    inherit it, and it works on NFS with a lock service, but threads of one process do not exclude each other.

    Args:
        folder: The folder; it has the file ``.lock`` meanwhile.

    Raises:
        FileError: Another process writes to the folder, or it cannot be written.
    """
    file = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(file)
    except OSError as error:
        raise FileError(f"cannot write to {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()
        os.close(descriptor)


def _acquire(file: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is None:
                return descriptor
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                message = f"{owner} is writing to {file.parent}; wait until it has ended, or choose another `output`"
                raise FileError(message) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):  # else the owner has just removed it
                    os.truncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
                    return descriptor
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
