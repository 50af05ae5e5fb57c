"""Downloads and archives: resume and checksums, and hostile archives that must stay inside their folder."""

import hashlib
import http.server
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicas
from fuzzing import examples
from replicas import put
from semaug.data import downloads, readers
from semaug.data.downloads import Archive, download, extract
from semaug.data.readers import read_data
from semaug.util.errors import DataError, FileError

CONTENT = bytes(range(256)) * 2000
MAX_BYTES = 10_000_000


class Host(http.server.ThreadingHTTPServer):
    """Offers `content` and resumes transfers; tests set its faults."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.break_after: list[int] = []
        """How many bytes the next answers send before the connection breaks."""
        self.resumes = True
        self.tells_length = True
        self.status: int | None = None
        self.ranges: list[str | None] = []

    def archive(self, size: int = len(CONTENT), folder: str = "set") -> Archive:
        """What is offered, as an archive called "file"."""
        url = f"http://127.0.0.1:{self.server_address[1]}/file"
        return Archive(url, "file", hashlib.md5(self.content).hexdigest(), size, folder)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        host, asked = self.server, self.headers.get("Range")
        host.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and host.resumes else 0
        if host.status or start >= len(host.content):
            self.send_error(host.status or 416)
            return
        body = host.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(host.content) - 1}/{len(host.content)}")
        if host.tells_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: host.break_after.pop(0)] if host.break_after else body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0.001)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with Host() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_download(host, tmp_path):
    seen = []
    path = download(host.archive(), tmp_path / "new", lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["file"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    download(host.archive(), tmp_path / "new")
    assert host.ranges == [None]


def test_a_file_that_is_there_but_wrong_is_replaced(host, tmp_path):
    put(tmp_path / "file", "old")
    assert download(host.archive(), tmp_path).read_bytes() == CONTENT


def test_an_interrupted_transfer_is_resumed(host, tmp_path):
    host.break_after = [100_000, 50_000]
    assert download(host.archive(), tmp_path).read_bytes() == CONTENT
    assert host.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_transfer_is_resumed_by_another_call(host, tmp_path):
    host.break_after = [100_000] + [0] * 5
    with pytest.raises(DataError, match="was interrupted .* resume"):
        download(host.archive(), tmp_path)
    assert not (tmp_path / "file").exists()
    host.ranges.clear()
    assert download(host.archive(), tmp_path).read_bytes() == CONTENT
    assert host.ranges == ["bytes=100000-"]


def test_a_complete_part_is_not_requested_again(host, tmp_path):
    put(tmp_path / "file.part", CONTENT)
    assert download(host.archive(), tmp_path).read_bytes() == CONTENT
    assert host.ranges == []


def test_a_host_that_cannot_resume_sends_all_of_it(host, tmp_path):
    host.resumes = False
    host.break_after = [100_000]
    assert download(host.archive(), tmp_path).read_bytes() == CONTENT


def test_a_part_that_is_too_long_is_discarded(host, tmp_path):
    put(tmp_path / "file.part", CONTENT + b"more")
    assert download(host.archive(), tmp_path).read_bytes() == CONTENT


def test_a_part_after_which_the_host_has_nothing_is_discarded(host, tmp_path):
    put(tmp_path / "file.part", CONTENT)
    with pytest.raises(DataError, match="has 512000 bytes instead of 512009"):
        download(host.archive(len(CONTENT) + 9), tmp_path)
    assert host.ranges == [f"bytes={len(CONTENT)}-", None]


def test_a_wrong_checksum_is_refused_and_removed(host, tmp_path):
    archive = host.archive()
    host.content = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match="wrong checksum and was removed"):
        download(archive, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wrong_sizes_are_refused(host, tmp_path):
    with pytest.raises(DataError, match="has 512000 bytes instead of 9"):
        download(host.archive(9), tmp_path)
    host.tells_length = False
    with pytest.raises(DataError, match="more than 9 bytes"):
        download(host.archive(9), tmp_path)
    assert not (tmp_path / "file").exists()


def test_an_end_that_comes_too_early_is_noticed_without_a_length(host, tmp_path):
    host.tells_length = False
    host.break_after = [1000]
    assert download(host.archive(), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(("status", "expected"), [(404, "404"), (503, "was interrupted .*503")])
def test_errors_of_the_host(host, tmp_path, status, expected):
    host.status = status
    with pytest.raises(DataError, match=expected):
        download(host.archive(), tmp_path)
    assert len(host.ranges) == (1 if status == 404 else downloads.ATTEMPTS)


def test_a_place_that_is_no_folder(host, tmp_path):
    with pytest.raises(FileError, match="cannot save"):
        download(host.archive(), put(tmp_path / "no folder", ""))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="other systems have no disk that is always full")
def test_a_full_disk(host, tmp_path):
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(FileError, match="cannot save .*No space left"):
        download(host.archive(), tmp_path)
    assert host.ranges == [None]


def test_a_named_set_is_downloaded_and_unpacked(host, tmp_path, monkeypatch):
    replicas.cub(tmp_path / "made" / "CUB_200_2011")
    put(tmp_path / "made" / "attributes.txt", "1 has_bill_shape::curved_(up_or_down)")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ("CUB_200_2011", "attributes.txt"):
            tar.add(tmp_path / "made" / name, name)
    host.content = packed.getvalue()
    cub = replace(readers.KNOWN["cub"], archive=host.archive(len(host.content), "CUB_200_2011"))
    monkeypatch.setitem(readers.KNOWN, "cub", cub)
    with pytest.raises(DataError, match="download CUB_200_2011.tgz from"):
        read_data("cub", tmp_path / "root")
    data = read_data("cub", tmp_path / "root", download=True)
    assert data.classes == replicas.CUB_CLASSES
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["CUB_200_2011"]
    read_data("cub", tmp_path / "root", download=True)
    assert host.ranges == [None]
    with pytest.raises(DataError, match="https://dl.allaboutbirds.org"):
        read_data("nabirds", tmp_path / "root", download=True)


def test_an_archive_without_its_folder(host, tmp_path):
    host.content = tar_bytes(regular("other/1.txt"))
    archive = host.archive(len(host.content))
    with pytest.raises(DataError, match="does not hold the folder set"):
        downloads.fetch(archive, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    put(tmp_path / "other" / "mine.txt", "x")
    with pytest.raises(FileError, match="cannot unpack .*not empty"):
        downloads.fetch(replace(archive, folder="other"), tmp_path)


# -------------------------------------------------------------------------------------------------------- archives


def regular(name: str, content: bytes = b"content") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def tar_bytes(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def files_below(folder: Path) -> dict[str, bytes]:
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_tar_files(tmp_path, mode):
    folder, long = special("a/empty", tarfile.DIRTYPE), "b" * 200
    content = tar_bytes(folder, regular("a/1.txt"), regular("a/b/2.txt"), regular(long), mode=mode)
    extract(put(tmp_path / "archive", content), tmp_path / "out", MAX_BYTES)
    assert files_below(tmp_path / "out") == {name: b"content" for name in ("a/1.txt", "a/b/2.txt", long)}
    assert (tmp_path / "out" / "a" / "empty").is_dir()


OUTSIDE = str(Path(tempfile.gettempdir()) / "semaug-escaped.txt")


@pytest.mark.parametrize(
    "members",
    [
        [regular("../escaped.txt")],
        [regular("a/../../escaped.txt")],
        [regular(OUTSIDE)],
        [regular("C:\\escaped.txt")],
        [regular("..\\escaped.txt")],
        [regular("a/b"), special("link", tarfile.SYMTYPE, "a/b")],
        [regular("a/b"), special("link", tarfile.LNKTYPE, "a/b")],
        [special("link", tarfile.SYMTYPE, "..")],
        [special("link", tarfile.SYMTYPE, ".."), regular("link/escaped.txt")],
        [special("link", tarfile.SYMTYPE, "/etc/passwd")],
        [special("a/link", tarfile.SYMTYPE, "../../secret")],
        [special("link", tarfile.SYMTYPE, "not there")],
        [special("one", tarfile.SYMTYPE, "two"), special("two", tarfile.SYMTYPE, "one")],
        [special("link", tarfile.LNKTYPE, "../secret")],
        [special("link", tarfile.LNKTYPE, "/etc/passwd")],
        [special("device", tarfile.CHRTYPE)],
        [special("device", tarfile.BLKTYPE)],
        [special("pipe", tarfile.FIFOTYPE)],
        [regular("a"), regular("a/b")],
        [regular("a\0b"), regular(".")],
    ],
)
def test_malicious_tar_files_are_refused(tmp_path, members):
    secret = put(tmp_path / "secret", "secret")
    archive = put(tmp_path / "archive", tar_bytes(regular("harmless"), *members))
    with pytest.raises(DataError):
        extract(archive, tmp_path / "out", MAX_BYTES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out", "secret"]
    assert secret.read_text() == "secret"
    assert not Path(OUTSIDE).exists()
    assert set(files_below(tmp_path / "out").values()) <= {b"content"}


def test_a_link_in_the_folder_is_not_followed(tmp_path):
    secret = put(tmp_path / "secret", "secret")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(secret)
    with pytest.raises(DataError, match="cannot unpack"):
        extract(put(tmp_path / "archive", tar_bytes(regular("a"))), tmp_path / "out", MAX_BYTES)
    assert secret.read_text() == "secret"


def test_archives_that_grow_too_large_are_refused(tmp_path, monkeypatch):
    zeros = bytes(5_000_000)
    archive = put(tmp_path / "archive", tar_bytes(regular("zeros", zeros), mode="w:gz"))
    assert archive.stat().st_size < 10_000
    with pytest.raises(DataError, match="more bytes than are allowed"):
        extract(archive, tmp_path / "out", max_bytes=1_000_000)
    extract(archive, tmp_path / "out", max_bytes=len(zeros))
    assert (tmp_path / "out" / "zeros").stat().st_size == len(zeros)
    many = put(tmp_path / "many", tar_bytes(*(regular(f"{i}", b"") for i in range(20))))
    monkeypatch.setattr(downloads, "MAX_FILES", 19)
    with pytest.raises(DataError, match="more than 19 files"):
        extract(many, tmp_path / "out", MAX_BYTES)


def with_header_of(size: int, kind: bytes) -> bytes:
    """A compressed tar file whose first header announces a name of so many zeros."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = kind, size
    squeeze = zlib.compressobj(9, wbits=31)
    parts = [squeeze.compress(info.tobuf(tarfile.GNU_FORMAT))]
    parts += [squeeze.compress(bytes(2**20)) for _ in range(size // 2**20)]
    return b"".join(parts) + squeeze.compress(tar_bytes(regular("a"))) + squeeze.flush()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE])
def test_large_headers_do_not_fill_the_memory(tmp_path, kind):
    archive = put(tmp_path / "archive", with_header_of(60 * 2**20, kind))
    assert archive.stat().st_size < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            extract(archive, tmp_path / "out", MAX_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_a_header_of_digits_is_refused_at_once(tmp_path):
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 900_000
    content = header.tobuf(tarfile.USTAR_FORMAT) + b"1" * header.size + bytes(2048)
    with pytest.raises(DataError):
        extract(put(tmp_path / "archive.tar", content), tmp_path / "out", MAX_BYTES)


def test_sparse_files_count_at_their_full_size(tmp_path):
    (tmp_path / "sparse").write_bytes(b"")
    os.truncate(tmp_path / "sparse", 50_000_000)
    command = ["tar", "--sparse", "-cf", tmp_path / "archive", "-C", tmp_path, "sparse"]
    if shutil.which("tar") is None or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("there is no GNU tar here")
    assert (tmp_path / "archive").stat().st_size < 100_000
    with pytest.raises(DataError, match="more bytes than are allowed"):
        extract(tmp_path / "archive", tmp_path / "out", max_bytes=1_000_000)


def test_other_files_are_not_archives(tmp_path):
    for content in (b"", b"hello", CONTENT):
        with pytest.raises(DataError, match="is not a tar file"):
            extract(put(tmp_path / "archive", content), tmp_path / "out", MAX_BYTES)
    with pytest.raises(DataError, match="cannot unpack"):
        extract(tmp_path / "nowhere", tmp_path / "out", MAX_BYTES)


ARCHIVES = [
    tar_bytes(regular("a/1.txt"), special("b", tarfile.DIRTYPE)),
    tar_bytes(regular("a/1.txt"), regular("b" * 200), mode="w:gz"),
    tar_bytes(regular("a/1.txt"), mode="w:xz"),
]


@pytest.mark.parametrize("original", ARCHIVES, ids=["tar", "gz", "xz"])
@examples(150)
@given(data=st.data())
def test_damaged_archives_end_in_one_sentence_or_inside_their_folder(tmp_path, original, data):
    # most of a tar file is padding
    place = data.draw(st.integers(0, min(len(original), 1600)))
    piece = data.draw(st.binary(min_size=0, max_size=12))
    archive = put(tmp_path / "archive", original[:place] + piece + original[place + data.draw(st.integers(0, 12)) :])
    try:
        extract(archive, tmp_path / "out", max_bytes=100_000)
    except DataError as error:
        sentence = str(error)
    else:
        sentence = ""
    assert "\n" not in sentence
    assert {path.name for path in tmp_path.iterdir()} == {"archive", "out"}
