"""Archives from the net: downloaded with resumption and checksum, unpacked without leaving their folder."""

import bz2
import errno
import gzip
import hashlib
import http.client
import lzma
import os
import posixpath
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import IO, Any

from semaug.util.errors import SemaugError

CHUNK_BYTES = 2**20
ATTEMPTS = 5
TIMEOUT_S = 60
RETRY_WAIT_S = 0.5
DECOMPRESSORS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
MAX_BYTES = 2**38
MAX_FILES = 5_000_000
"""Limits on what an archive may unpack to; ImageNet is a half and a quarter of them."""


@dataclass(frozen=True)
class Archive:
    """A file that a host offers, and the folder that is in it."""

    url: str
    name: str
    checksum: str
    size: int
    folder: str


def fetch(archive: Archive, root: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Download an archive and unpack its folder into `root`; the archive itself is then removed."""
    file = download(archive.url, root / archive.name, archive.checksum, archive.size, progress)
    try:
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=root) as unpacked:
            # ten times is far more than compressed images can grow
            extract(file, Path(unpacked), max_bytes=10 * archive.size)
            folder = Path(unpacked) / archive.folder
            if not folder.is_dir():
                raise SemaugError(f"{file} does not hold the folder {archive.folder}")
            # all of it at once, so that an unpacking that is broken off leaves nothing that looks complete
            folder.replace(root / archive.folder)
        file.unlink()
    except OSError as error:
        raise SemaugError(f"cannot unpack {file}: {error}") from error
    return root / archive.folder


# -------------------------------------------------------------------------------------------------------- download


def download(
    url: str,
    path: Path,
    checksum: str,
    size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Download `url` to `path`, unless it is there already; `checksum` is a sha256 or md5 in hexadecimal digits.

    What a transfer that broke off left behind (in PATH.part) is resumed. `path` appears only when it is complete and
    its checksum is right; a wrong one is removed. `progress` is called with bytes done and their total (0: unknown).
    """
    if not url.startswith(("http://", "https://")):
        raise SemaugError(f"only http and https addresses can be downloaded, not {url}")
    if _digest_name(checksum) is None:
        raise SemaugError(f"{checksum!r} is neither a sha256 nor an md5")
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
            raise SemaugError(f"what {url} sent has a wrong checksum and was removed; try again later")
        part.replace(path)
    except OSError as error:
        raise SemaugError(f"cannot save {path}: {error}") from error
    return path


def _digest_name(checksum: str) -> str | None:
    return {32: "md5", 64: "sha256"}.get(len(checksum))


def _has_checksum(path: Path, checksum: str) -> bool:
    digest = hashlib.new(_digest_name(checksum) or "sha256", usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == checksum.lower()


def _transfer_all(url: str, part: Path, size: int | None, progress: Callable[[int, int], None] | None) -> None:
    """Transfer until complete, resuming as long as no ATTEMPTS in a row fail to gain a byte."""
    fruitless = 0
    while True:
        before = part.stat().st_size
        if size is not None and before == size:
            return
        try:
            _transfer(url, part, before, size, progress)
            return
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 416:
                raise SemaugError(f"{url} cannot be downloaded: {error.code} {error.reason}") from error
            if error.code == 416:  # nothing is beyond what is here, so what is here is no part of that file
                os.truncate(part, 0)
            reason = str(error)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # a full disk is no reason to ask the host again
            reason = str(error) or type(error).__name__
        fruitless = 0 if part.stat().st_size > before else fruitless + 1
        if fruitless >= ATTEMPTS:
            raise SemaugError(f"the download of {url} broke off ({reason}); start it again to resume it")
        time.sleep(min(2**fruitless, 10) * RETRY_WAIT_S)


def _transfer(url: str, part: Path, start: int, size: int | None, progress: Callable[[int, int], None] | None) -> None:
    """One request for what is beyond `start`; an exception where the answer ends too early."""
    request = urllib.request.Request(url, headers={"User-Agent": "semaug", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        done = start if resumed else 0
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isascii() and length.isdigit() and len(length) < 19 else size or 0
        if size is not None and total not in (0, size):
            raise SemaugError(f"{url} is {total} bytes where {size} are expected")
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                done += len(chunk)
                if size is not None and done > size:
                    raise SemaugError(f"{url} sends more than the {size} bytes expected")
                file.write(chunk)
                if progress is not None:
                    progress(done, total)
    if total and done < total:
        raise ConnectionError(f"{done} of {total} bytes came")


# ---------------------------------------------------------------------------------------------------------- unpack


@dataclass(frozen=True)
class Member:
    """A file (with `content`), a link to another member, or else a folder."""

    name: str
    content: IO[bytes] | None = None
    link: str | None = None


def extract(archive: Path, folder: Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Unpack a tar (of any compression) or zip file into `folder`.

    Refused: names that lead out of the folder, devices, links to anything but a file of the archive (which are unpacked
    as copies, so that no link is ever written), and more than `max_bytes` or `max_files`.
    """
    left = max_bytes
    files: set[Path] = set()
    links: list[tuple[Path, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for count, member in enumerate(_members(archive), start=1):
            if count > max_files:
                raise SemaugError(f"{archive} holds more than {max_files} files")
            target = folder / _inside(member.name, archive)
            if member.link is not None:
                links.append((target, folder / _inside(member.link, archive)))
            elif member.content is not None:
                left -= _write(member.content, target, left, archive)
                files.add(target)
            else:
                target.mkdir(parents=True, exist_ok=True)
        for target, source in links:
            if source not in files:
                raise SemaugError(f"{archive} holds a link ({target.name!r}) to something that is no file of it")
            with source.open("rb") as content:
                left -= _write(content, target, left, archive)
    except SemaugError:
        raise
    except Exception as error:  # the parsers meet garbage with many kinds of exception
        raise SemaugError(f"cannot unpack {archive}: {error}") from error


def _members(archive: Path) -> Iterator[Member]:
    if _is_tar(archive):
        with _decompressed(archive) as content, tarfile.open(fileobj=content, mode="r:") as tar:
            for info in tar:
                if info.isreg():
                    yield Member(info.name, content=tar.extractfile(info))
                elif info.islnk():
                    yield Member(info.name, link=info.linkname)
                elif info.issym():
                    target = posixpath.join(posixpath.dirname(info.name), info.linkname)
                    yield Member(info.name, link=posixpath.normpath(target))
                elif info.isdir():
                    yield Member(info.name)
                else:
                    raise SemaugError(f"{archive} holds a device or the like: {info.name!r}")
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                if entry.is_dir():
                    yield Member(entry.filename)
                elif stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG):
                    with zipped.open(entry) as content:
                        yield Member(entry.filename, content=content)
                else:
                    raise SemaugError(f"{archive} holds a link, a device or the like: {entry.filename!r}")
    else:
        raise SemaugError(f"{archive} is neither a tar nor a zip file")


class _Limited:
    """A file of which no more than a chunk can be read at once: the headers of a tar file may ask for any size."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.seek, self.tell, self.close = file, file.seek, file.tell, file.close

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= CHUNK_BYTES:
            raise SemaugError("it has a header that is too large")
        return self.file.read(size)


@contextmanager
def _decompressed(archive: Path) -> Iterator[Any]:
    with archive.open("rb") as file:
        start = file.read(6)
    opened = next((opened for magic, opened in DECOMPRESSORS.items() if start.startswith(magic)), open)
    with opened(archive, "rb") as content:
        yield _Limited(content)


def _is_tar(archive: Path) -> bool:
    try:
        with _decompressed(archive) as content, tarfile.open(fileobj=content, mode="r:"):
            return True
    except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return False
    except OSError:
        if not archive.is_file():
            raise
        return False  # what gzip and bz2 say of other content


def leads_out(name: str) -> bool:
    """Whether a path that someone else wrote could, on any system, lead out of the folder that it is put into."""
    path = PureWindowsPath(name)  # knows both kinds of slash, and drives
    return bool(path.anchor) or ".." in path.parts


def _inside(name: str, archive: Path) -> str:
    if leads_out(name):
        raise SemaugError(f"{archive} was refused: {name!r} in it would lie outside of its folder")
    return name


def _write(content: IO[bytes], target: Path, limit: int, archive: Path) -> int:
    """Copy at most `limit` bytes into a new file, and say how many."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # were it a link, writing would follow it
    size = 0
    with target.open("wb") as file:
        while chunk := content.read(CHUNK_BYTES):
            size += len(chunk)
            if size > limit:
                raise SemaugError(f"{archive} unpacks to more bytes than are allowed")
            file.write(chunk)
    return size
