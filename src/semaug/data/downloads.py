"""Archives from the web: downloads with resume and checksum, and extraction that stays inside its folder."""

import errno
import hashlib
import http.client
import os
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from semaug.data.annotations import leads_out
from semaug.util.errors import DataError, FileError, SettingError
from semaug.util.progress import ProgressCallback
from semaug.util.untrusted import open_regular

CHUNK_BYTES = 2**20
ATTEMPTS = 5  # in a row that receive nothing
TIMEOUT_SECONDS = 60
RETRY_SECONDS = 0.5
MAX_BYTES = 2**38
MAX_FILES = 5_000_000
"""Limits of what an archive may hold; ImageNet has a half and a quarter of them."""
MAX_HEADER_BYTES = 8192
"""Limit of a header with a long name, which is read whole; before Python 3.11.10, the time to read one of digits grows
with the square of its size (CVE-2024-6232)."""


@dataclass(frozen=True)
class Archive:
    """A tar or zip file that a host offers."""

    url: str
    name: str  # file name to save it under
    checksum: str  # sha256 or md5, hexadecimal
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
    file = download(archive.url, root / archive.name, archive.checksum, archive.size, progress)
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


def download(
    url: str, path: Path, checksum: str, size: int | None = None, progress: ProgressCallback | None = None
) -> Path:
    """Download a file unless it exists; an interrupted download (in PATH.part) is resumed.

    Args:
        url: Its address, http or https.
        path: Where to save it. It appears there only when it is complete and its checksum is right.
        checksum: Its sha256 or md5 in hexadecimal digits.
        size: Its size in bytes, if known; other sizes are refused.
        progress: Called with the number of bytes downloaded and their total (0 if unknown).

    Returns:
        `path`.

    Raises:
        DataError: The host does not offer the file, or sends something else.
        FileError: The disk is full or cannot be written.
        SettingError: The address or checksum is malformed.
    """
    if not url.startswith(("http://", "https://")):
        raise SettingError(f"only http and https addresses can be downloaded, not {url}")
    if len(checksum) not in (32, 64):
        raise SettingError(f"{checksum!r} is neither a sha256 nor an md5")
    try:
        if path.is_file() and _has_checksum(path, checksum):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.touch()
        if size is not None and part.stat().st_size > size:
            os.truncate(part, 0)
        _transfer_all(url, part, size, progress)
        if not _has_checksum(part, checksum):
            part.unlink()
            raise DataError(f"{url} has a wrong checksum and was removed; try again later")
        part.replace(path)
    except OSError as error:
        raise FileError(f"cannot save {path}: {error}") from error
    return path


def _has_checksum(path: Path, checksum: str) -> bool:
    with open_regular(path) as file:
        kind = "md5" if len(checksum) == 32 else "sha256"
        digest = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
    return digest.hexdigest() == checksum.lower()


def _transfer_all(url: str, part: Path, size: int | None, progress: ProgressCallback | None) -> None:
    """Transfer until complete, and resume until `ATTEMPTS` in a row have received nothing."""
    failures = 0
    while (before := part.stat().st_size) != size:
        try:
            return _transfer(url, part, before, size, progress)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 416:
                raise DataError(f"{url} cannot be downloaded: {error.code} {error.reason}") from error
            if error.code == 416:  # nothing follows what is here, so it is not a part of that file
                os.truncate(part, 0)
            reason = str(error)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = str(error) or type(error).__name__
        failures = 0 if part.stat().st_size > before else failures + 1
        if failures >= ATTEMPTS:
            raise DataError(f"the download of {url} was interrupted ({reason}); try again to resume it")
        time.sleep(min(2**failures, 10) * RETRY_SECONDS)


def _transfer(url: str, part: Path, start: int, size: int | None, progress: ProgressCallback | None) -> None:
    """Request what follows the first `start` bytes; raises ConnectionError if the answer ends too early."""
    request = urllib.request.Request(url, headers={"User-Agent": "semaug", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        done = start if resumed else 0
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isascii() and length.isdigit() and len(length) < 19 else size or 0
        if size is not None and total not in (0, size):
            raise DataError(f"{url} has {total} bytes instead of {size}")
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                done += len(chunk)
                if size is not None and done > size:
                    raise DataError(f"{url} sends more than {size} bytes")
                file.write(chunk)
                if progress is not None:
                    progress(done, total)
    if total and done < total:
        raise ConnectionError(f"received {done} of {total} bytes")


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


def extract(archive: Path, folder: Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Extract a tar (of any compression) or zip file that may come from a stranger.

    Args:
        archive: The file.
        folder: A new or empty folder. Names that lead out of it, links and devices are refused.
        max_bytes: Largest total size of the content.
        max_files: Largest number of members.

    Raises:
        DataError: The archive is damaged or refused.
    """
    files = total = 0

    def check(name: str, size: int, is_plain: bool) -> None:
        nonlocal files, total
        files, total = files + 1, total + size
        if files > max_files:
            raise DataError(f"{archive} holds more than {max_files} files")
        if size < 0 or total > max_bytes:
            raise DataError(f"{archive} holds more bytes than are allowed")
        if leads_out(name):
            raise DataError(f"{archive} was refused: {name!r} in it is outside of its folder")
        if not is_plain:
            raise DataError(f"{archive} was refused: {name!r} in it is a link or device")

    def tar_filter(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        check(member.name, member.size, member.isreg() or member.isdir())
        return tarfile.data_filter(member, path)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_regular(archive) as file:
            tar = _opened_tar(file)
            if tar is not None:
                with tar:
                    tar.extractall(folder, filter=tar_filter)
            elif zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as zipped:
                    for entry in zipped.infolist():
                        is_file = stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG)
                        check(entry.filename, entry.file_size, entry.is_dir() or is_file)
                    zipped.extractall(folder)
            else:
                raise DataError(f"{archive} is neither a tar nor a zip file")
    except DataError:
        raise
    except Exception as error:  # the parsers raise exceptions of many kinds on damaged files
        raise DataError(f"cannot unpack {archive}: {error}") from error


def _opened_tar(archive: BinaryIO) -> tarfile.TarFile | None:
    try:
        return tarfile.open(fileobj=archive, tarinfo=TarHeader)
    except tarfile.ReadError:
        return None
