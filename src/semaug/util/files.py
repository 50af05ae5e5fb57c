"""Atomic writes."""

import errno
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from semaug.util.errors import FileError
from semaug.util.processes import is_other_process
from semaug.util.untrusted import open_regular, read_bytes

MAX_PAGE_BYTES = 2**30
_SEAL = b"<!-- written by semaug; SHA-256 of the rest: "
_PNG, _PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
_PNG_SEAL = b"tEXtwritten by semaug; SHA-256 of the rest\0"  # a chunk of text


@contextmanager
def open_atomically(path: Path, mode: str = "wb", *, keep: Path | None = None, **options: Any) -> Iterator[IO[Any]]:
    """Open a file that appears, complete and flushed to disk, when the block ends without an error.

    A reader, or a machine that fails, sees the old content or the new, never a part.

    Args:
        path: The file; missing folders are created.
        mode: "wb", "wb+" or "w".
        keep: Where to move the old file, once the new content is safe; None replaces it.
        **options: Passed to ``open``.

    Yields:
        The open file.

    Raises:
        FileError: The file cannot be written.
    """
    unfinished = path.parent / f".{path.name}.{os.getpid()}.part"  # with_name() fails for "." and "/"
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if path.exists() and not path.is_file():  # a device would be replaced
            raise OSError(errno.EINVAL, "it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            path.replace(keep)
        unfinished.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from error
    finally:  # after a signal too
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def expanded(path: Path) -> Path:
    """The path with ``~`` replaced by the user's home folder; raises FileError if there is none."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise FileError(f"the home folder of {path} is unknown: set HOME, or write the whole path") from None


def refuse_foreign(path: Path, *beginnings: bytes | re.Pattern[bytes], beside: Iterable[Path] = ()) -> None:
    """Refuse to replace files of another kind, such as one that was named as output by mistake.

    Args:
        path: The file to write.
        beginnings: How files of its kind begin: these bytes, or what a pattern matches in the first 64 kB.
        beside: Files that are written after it, and may exist only if it does.

    Raises:
        FileError: One of the files exists, is not empty, and `path` is missing or begins otherwise.
    """
    if path.is_file():
        with open_regular(path) as file:
            start = file.read(2**16)
            if any(re.match(re.escape(own) if isinstance(own, bytes) else own, start) for own in beginnings):
                return
    for each in (path, *beside):
        if each.is_file() and each.stat().st_size:
            raise FileError(
                f"{each} exists and is another kind of file, which would be lost; move it, or write elsewhere"
            )


def write_page(path: Path, text: str) -> None:
    """Write a page atomically, with a checksum at its end that later shows whether a user has edited it.

    Args:
        path: The file.
        text: Markdown, HTML or SVG.

    Raises:
        FileError: The file cannot be written, or is one that :func:`refuse_edited` refuses.
    """
    refuse_edited(path)
    write_atomically(path, _sealed(text.encode(errors="replace")))


def write_picture(path: Path, png: bytes) -> None:
    """Write a PNG file like :func:`write_page`, with the checksum in its metadata."""
    refuse_edited(path)
    write_atomically(path, _sealed(png))


def refuse_edited(*paths: Path) -> None:
    """Refuse to replace pages and pictures that were edited since they were written here, or were not written here.

    Raises:
        FileError: One of the files exists, is not empty, and is not as it was written.
    """
    for path in paths:
        if not path.is_file() or not path.stat().st_size:
            continue
        content = read_bytes(path, MAX_PAGE_BYTES)
        is_png = content.startswith(_PNG)
        own, mark, _ = content.rpartition(_PNG_SEAL if is_png else _SEAL)
        if not mark or content != _sealed(own[:-4] + _PNG_END if is_png else own):  # 4 bytes: length of the chunk
            what = "was edited, and the notes in it" if mark else "exists and is another kind of file, which"
            raise FileError(f"{path} {what} would be lost; move it, or write elsewhere")


def _sealed(content: bytes) -> bytes:
    """A page with its checksum in a comment at its end, or a PNG with it in its last chunk but one."""
    digest = hashlib.sha256(content).hexdigest().encode()
    if not content.startswith(_PNG):
        return content + _SEAL + digest + b" -->\n"
    chunk = _PNG_SEAL + digest  # its length, before it, counts neither itself nor the type, which begins the chunk
    length, checksum = (number.to_bytes(4, "big") for number in (len(chunk) - 4, zlib.crc32(chunk)))
    return content.removesuffix(_PNG_END) + length + chunk + checksum + _PNG_END


def write_atomically(path: Path, *content: bytes | memoryview, keep: Path | None = None) -> None:
    """Write pieces of content by :func:`open_atomically`, with the same `path`, `keep` and errors."""
    with open_atomically(path, keep=keep) as file:
        file.writelines(content)


def _sync_folder(folder: Path) -> None:
    """Write a folder's list of names to disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def leftovers(folder: Path) -> list[Path]:
    """The unfinished files in a folder whose writers were killed."""
    matches = [(file, re.fullmatch(r"\..+\.(\d+)\.part", file.name)) for file in folder.glob(".*.part")]
    return [file for file, match in matches if match is not None and not is_other_process(int(match[1]))]


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, atomically; raises FileError, also for names that no reader would accept."""
    text = json.dumps(content, indent=2)
    try:
        if "\\ud" in text:
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FileError(f"cannot write {path}: a name in it is not UTF-8; rename the file or folder") from None
    write_atomically(path, f"{text}\n".encode())
