"""One writer per folder."""

import errno
import math
import os
import platform
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from semaug.util.errors import FileError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0  # the threads of a killed process end one after the other, and the last one releases its lock
_OWNER = b"process "  # how the content of a lock begins
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of file systems without locks


@contextmanager
def locked(folder: Path, name: str = LOCK, *, wait: bool = False) -> Iterator[None]:
    """Be the only process that writes to a folder, which is created.

    The kernel releases the lock when the process ends, however it ends. It is a POSIX lock: child processes do not
    inherit it, and it works on NFS with a lock service, but threads of one process do not exclude each other. On a file
    system without locks nothing is locked.

    Args:
        folder: The folder.
        name: A file in it, which exists meanwhile.
        wait: Whether to wait for a process that has the lock.

    Raises:
        FileError: Another process has the lock, the folder cannot be written, or the file is one of the user's.
    """
    file = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        deadline = math.inf if wait else time.monotonic() + GRACE_SECONDS
        while (descriptor := _acquire(file, deadline)) is None:
            time.sleep(POLL_SECONDS)
    except OSError as error:
        raise FileError(f"cannot write to {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()
        os.close(descriptor)


def _acquire(file: Path, deadline: float) -> int | None:
    """The descriptor of the locked file; None to try again."""
    foreign = FileError(f"{file} exists and is not a lock file of semaug; move it, or choose another folder")
    with suppress(FileNotFoundError):  # in one call, since the owner of a lock may remove it at any time
        if not stat.S_ISREG(os.lstat(file).st_mode):  # what a link leads to would be written
            raise foreign
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    with ExitStack() as otherwise:
        otherwise.callback(os.close, descriptor)
        try:
            if os.pread(descriptor, len(_OWNER), 0) not in (b"", _OWNER):
                raise foreign
            if fcntl is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):  # else its last owner has just removed it
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
                otherwise.pop_all()
                return descriptor
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                otherwise.pop_all()
                return descriptor
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() >= deadline:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                message = f"{owner} is writing to {file.parent}; wait until it has ended, or choose another folder"
                raise FileError(message) from None
    return None
