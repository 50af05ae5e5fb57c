"""Archives from the web: downloads with resume and checksum, and extraction that stays inside its folder."""

import errno
import hashlib
import http.client
import os
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from semaug.data.annotations import leads_out
from semaug.util.errors import DataError, FileError
from semaug.util.progress import ProgressCallback
from semaug.util.untrusted import open_regular

CHUNK_BYTES = 2**20
ATTEMPTS = 5  # in a row that receive nothing
TIMEOUT_SECONDS = 60
RETRY_SECONDS = 0.5
MAX_BYTES = 2**38
MAX_FILES = 5_000_000
"""Limits of the contents of an archive; ImageNet has a half of the bytes and a quarter of the files."""
MAX_HEADER_BYTES = 8192
"""Limit of a header with a long name, which is read whole; before Python 3.11.10, the time to read one of digits grows
with the square of its size (CVE-2024-6232)."""


@dataclass(frozen=True)
class Archive:
    """A tar file that a host offers."""

    url: str
    name: str  # file name to save it under
    md5: str  # hexadecimal
    size: int  # in bytes
    folder: str  # the folder in it that holds the data set


def fetch(archive: Archive, root: Path, progress: ProgressCallback | None = None) -> Path:
    """Download an archive, extract its folder into `root`, and remove the archive.

    Args:
        archive: What to download.
        root: Where the folder goes.
        progress: Called with the number of bytes downloaded and their total.

    Returns:
        The folder.

    Raises:
        DataError: The download or the archive is damaged.
        FileError: The disk is full or cannot be written.
    """
    file = download(archive, root, progress)
    try:
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=root) as unpacked:
            # Compressed images grow far less than tenfold.
            extract(file, Path(unpacked), max_bytes=10 * archive.size)
            folder = Path(unpacked) / archive.folder
            if not folder.is_dir():
                raise DataError(f"{file} does not hold the folder {archive.folder}")
            # One rename, so that an interrupted extraction leaves nothing that looks complete.
            folder.replace(root / archive.folder)
        file.unlink()
    except OSError as error:
        raise FileError(f"cannot unpack {file}: {error}") from error
    return root / archive.folder


def download(archive: Archive, root: Path, progress: ProgressCallback | None = None) -> Path:
    """Download an archive unless it exists; an interrupted download (in NAME.part) is resumed.

    Args:
        archive: What to download.
        root: Where to save it. It appears there only when it is complete and its checksum is right.
        progress: Called with the number of bytes downloaded and their total.

    Returns:
        The file.

    Raises:
        DataError: The host does not offer the file, or sends something else.
        FileError: The disk is full or cannot be written.
    """
    path, part = root / archive.name, root / f"{archive.name}.part"
    try:
        if path.is_file() and _md5(path) == archive.md5:
            return path
        root.mkdir(parents=True, exist_ok=True)
        part.touch()
        if part.stat().st_size > archive.size:
            os.truncate(part, 0)
        _transfer_all(archive, part, progress)
        if _md5(part) != archive.md5:
            part.unlink()
            raise DataError(f"{archive.url} has a wrong checksum and was removed; try again later")
        part.replace(path)
    except OSError as error:
        raise FileError(f"cannot save {path}: {error}") from error
    return path


def _md5(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _transfer_all(archive: Archive, part: Path, progress: ProgressCallback | None) -> None:
    """Transfer until complete, and resume until `ATTEMPTS` in a row have received nothing."""
    failures = 0
    while (before := part.stat().st_size) != archive.size:
        try:
            return _transfer(archive, part, before, progress)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 416:
                raise DataError(f"{archive.url} cannot be downloaded: {error.code} {error.reason}") from error
            if error.code == 416:  # nothing follows what is here, so it is not a part of that file
                os.truncate(part, 0)
            reason = str(error)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = str(error) or type(error).__name__
        failures = 0 if part.stat().st_size > before else failures + 1
        if failures >= ATTEMPTS:
            raise DataError(f"the download of {archive.url} was interrupted ({reason}); try again to resume it")
        time.sleep(min(2**failures, 10) * RETRY_SECONDS)


def _transfer(archive: Archive, part: Path, start: int, progress: ProgressCallback | None) -> None:
    """Request the bytes after the first `start`; raises ConnectionError if the answer ends too early."""
    request = urllib.request.Request(archive.url, headers={"User-Agent": "semaug", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        done = start if resumed else 0
        length = response.headers.get("Content-Length", "")
        if length.isascii() and length.isdigit() and len(length) < 19 and done + int(length) != archive.size:
            raise DataError(f"{archive.url} has {done + int(length)} bytes instead of {archive.size}")
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                done += len(chunk)
                if done > archive.size:
                    raise DataError(f"{archive.url} sends more than {archive.size} bytes")
                file.write(chunk)
                if progress is not None:
                    progress(done, archive.size)
    if done < archive.size:
        raise ConnectionError(f"received {done} of {archive.size} bytes")


_READ_WHOLE = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE
)  # fmt: skip


class TarHeader(tarfile.TarInfo):
    """A tar header; sizes that would fill the memory or lead backwards are refused."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if not 0 <= header.size <= (MAX_HEADER_BYTES if header.type in _READ_WHOLE else MAX_BYTES):
            raise tarfile.ReadError("a header has a wrong size")
        return header


def extract(archive: Path, folder: Path, max_bytes: int) -> None:
    """Extract a tar file of unknown origin, with any compression.

    Args:
        archive: The file.
        folder: A new or empty folder. Names that lead out of it, links and devices are refused.
        max_bytes: Largest total size of the content.

    Raises:
        DataError: The archive is damaged or refused.
    """
    files = total = 0

    def check(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        nonlocal files, total
        files, total = files + 1, total + member.size
        if files > MAX_FILES:
            raise DataError(f"{archive} holds more than {MAX_FILES} files")
        if member.size < 0 or total > max_bytes:
            raise DataError(f"{archive} holds more bytes than are allowed")
        if leads_out(member.name):
            raise DataError(f"{archive} was refused: {member.name!r} in it is outside of its folder")
        if not (member.isreg() or member.isdir()):
            raise DataError(f"{archive} was refused: {member.name!r} in it is a link or device")
        return tarfile.data_filter(member, path)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_regular(archive) as file, tarfile.open(fileobj=file, tarinfo=TarHeader) as tar:
            tar.extractall(folder, filter=check)
    except DataError:
        raise
    except tarfile.ReadError as error:
        raise DataError(f"{archive} is not a tar file, or is damaged") from error
    except Exception as error:  # tarfile raises exceptions of many kinds on damaged files
        raise DataError(f"cannot unpack {archive}: {error}") from error
