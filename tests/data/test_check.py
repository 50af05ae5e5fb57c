"""Checks of data: the report on a data set, and what downloads and archives have to stand."""

import hashlib
import http.server
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import threading
import tracemalloc
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from data import layouts
from data.layouts import picture, put, put_image
from semaug.data import downloads, readers
from semaug.data.check import Spread, check_data
from semaug.data.downloads import download, extract
from semaug.data.readers import read_data
from semaug.data.samples import DataSet, embedded_birds
from semaug.util.errors import SemaugError

# --------------------------------------------------------------------------------------------------------- reports


def test_a_sound_data_set_has_no_problems(tmp_path):
    data = read_data(str(layouts.image_folder(tmp_path, ("train", "test"), count=6)))
    seen = []
    report = check_data(data, progress=lambda done, total: seen.append((done, total)))
    assert report.problems == []
    assert (report.name, report.classes) == (tmp_path.name, 2)
    assert report.splits["train"].images == 12
    assert report.splits["test"].per_class == Spread(6, 6, 6)
    assert report.splits["train"].widths == Spread(10, 10, 10)
    assert report.splits["train"].heights == Spread(8, 9, 10)
    assert seen == [(i, 24) for i in range(1, 25)]


def faulty(folder: Path) -> DataSet:
    layouts.image_folder(folder, ("train",), ("crow", "jay", "rook"), count=6)
    layouts.image_folder(folder, ("test",), ("crow",), count=0)
    put_image(folder / "train" / "tiny" / "1.jpg", 100)
    put_image(folder / "test" / "crow" / "copy.jpg", 1)
    put_image(folder / "test" / "crow" / "other.jpg", 101)
    put_image(folder / "train" / "jay" / "again.jpg", 8)
    put_image(folder / "train" / "rook" / "really a jay.jpg", 9)
    put(folder / "train" / "rook" / "broken.jpg", picture(102)[:200])
    put(folder / "train" / "rook" / "text.jpg", "hello")
    put(folder / "train" / "rook" / "empty.jpg", "")
    return read_data(str(folder))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_problem_is_reported(tmp_path, workers):
    report = check_data(faulty(tmp_path), workers)
    assert [[image.name for image in group] for group in report.duplicates_across] == [
        ["train/crow/0.jpg", "test/crow/copy.jpg"]
    ]
    assert [[image.name for image in group] for group in report.duplicates_within] == [
        ["train/jay/1.jpg", "train/jay/again.jpg"],
        ["train/jay/2.jpg", "train/rook/really a jay.jpg"],
    ]
    unreadable = {item.image.name: item.reason for item in report.unreadable}
    assert set(unreadable) == {f"train/rook/{name}.jpg" for name in ("broken", "text", "empty")}
    assert all(unreadable.values())
    assert report.missing_classes == {"test": ("jay", "rook", "tiny")}
    assert report.tiny_classes == {"tiny": 1}
    problems = report.problems
    assert len(problems) == 6
    assert problems[0].startswith("1 image is in more than one split")
    assert problems[1].startswith("3 images are unreadable: train: train/rook/")
    assert "train: train/jay/2.jpg (jay) = train: train/rook/really a jay.jpg (rook)" in problems[2]
    assert problems[3] == "3 classes are without images in test: jay, rook, tiny."
    assert problems[4].startswith("2 images are more than once in a split")
    assert problems[5] == "1 class is with fewer than 5 training images: tiny (1)."


def test_sentences_stay_short(tmp_path):
    for i in range(50):
        put_image(tmp_path / "crow" / f"{i}.jpg", 1)
    (problem,) = check_data(read_data(str(tmp_path))).problems
    assert problem.endswith("train: crow/0.jpg = train: crow/1.jpg = train: crow/10.jpg and 47 more.")


def test_a_report_as_json(tmp_path):
    report = check_data(faulty(tmp_path))
    content = json.loads(report.to_json())
    assert content["problems"] == report.problems
    assert content["splits"]["test"]["images"] == 2
    assert content["duplicates_across"][0][1] == {"split": "test", "name": "test/crow/copy.jpg", "class_name": "crow"}


def test_the_same_pixels_in_another_file_format_are_the_same_image(tmp_path):
    layouts.image_folder(tmp_path, ("",), count=5)
    Image.open(tmp_path / "jay" / "0.jpg").save(tmp_path / "jay" / "same.png")
    assert len(check_data(read_data(str(tmp_path))).duplicates_within) == 1


def test_images_of_other_shape_with_the_same_bytes_differ(tmp_path):
    for name, size in (("wide", (4, 2)), ("high", (2, 4))):
        (tmp_path / "grey").mkdir(exist_ok=True)
        Image.new("RGB", size, (9, 9, 9)).save(tmp_path / "grey" / f"{name}.png")
    assert check_data(read_data(str(tmp_path))).duplicates_within == ()


def test_an_image_that_breaks_its_decoder_does_not_end_the_check(tmp_path, monkeypatch):
    data = read_data(str(layouts.image_folder(tmp_path, ("",))))

    def fails(samples, i):
        raise ZeroDivisionError("in the decoder\nof a library")

    monkeypatch.setattr(type(data.splits["train"]), "load", fails)
    report = check_data(data)
    assert {item.reason for item in report.unreadable} == {"in the decoder of a library"}
    assert report.splits["train"].widths is None


def test_the_embedded_birds_are_sound():
    assert check_data(embedded_birds(2, 6, 3, size=32)).problems == []


# ------------------------------------------------------------------------------------------------------- downloads

CONTENT = bytes(range(256)) * 2000
MD5, SHA256 = hashlib.md5(CONTENT).hexdigest(), hashlib.sha256(CONTENT).hexdigest()


class Host(http.server.ThreadingHTTPServer):
    """Offers `content` with resumption; what it does wrong is set by a test."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.break_after: list[int] = []
        """How many bytes the next answers send before they break off."""
        self.resumes = True
        self.tells_length = True
        self.status: int | None = None
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file"


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
    monkeypatch.setattr(downloads, "RETRY_WAIT_S", 0.001)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with Host() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("checksum", [MD5, SHA256, SHA256.upper()])
def test_download(host, tmp_path, checksum):
    seen = []
    path = download(host.url, tmp_path / "new" / "file", checksum, len(CONTENT), lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["file"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    download(host.url, path, checksum)
    assert host.ranges == [None]


def test_a_file_that_is_there_but_wrong_is_replaced(host, tmp_path):
    put(tmp_path / "file", "old")
    assert download(host.url, tmp_path / "file", MD5).read_bytes() == CONTENT


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_broken_transfer_is_resumed(host, tmp_path, size):
    host.break_after = [100_000, 50_000]
    assert download(host.url, tmp_path / "file", MD5, size).read_bytes() == CONTENT
    assert host.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_transfer_is_resumed_by_another_call(host, tmp_path):
    host.break_after = [100_000] + [0] * 5
    with pytest.raises(SemaugError, match="broke off .* resume"):
        download(host.url, tmp_path / "file", MD5, len(CONTENT))
    assert not (tmp_path / "file").exists()
    host.ranges.clear()
    assert download(host.url, tmp_path / "file", MD5, len(CONTENT)).read_bytes() == CONTENT
    assert host.ranges == ["bytes=100000-"]


def test_a_complete_part_is_not_asked_for_again(host, tmp_path):
    put(tmp_path / "file.part", CONTENT)
    assert download(host.url, tmp_path / "file", MD5, len(CONTENT)).read_bytes() == CONTENT
    assert host.ranges == []


def test_a_host_that_cannot_resume_sends_all_of_it(host, tmp_path):
    host.resumes = False
    host.break_after = [100_000]
    assert download(host.url, tmp_path / "file", MD5, len(CONTENT)).read_bytes() == CONTENT


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_part_that_is_too_long_is_begun_anew(host, tmp_path, size):
    put(tmp_path / "file.part", CONTENT + b"more")
    assert download(host.url, tmp_path / "file", MD5, size).read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_removed(host, tmp_path):
    host.content = CONTENT[:-1] + b"x"
    with pytest.raises(SemaugError, match="wrong checksum and was removed"):
        download(host.url, tmp_path / "file", SHA256, len(CONTENT))
    assert list(tmp_path.iterdir()) == []


def test_wrong_sizes_are_refused(host, tmp_path):
    with pytest.raises(SemaugError, match="512000 bytes where 9 are expected"):
        download(host.url, tmp_path / "file", MD5, 9)
    host.tells_length = False
    with pytest.raises(SemaugError, match="more than the 9 bytes expected"):
        download(host.url, tmp_path / "file", MD5, 9)
    assert not (tmp_path / "file").exists()


def test_an_end_that_comes_too_early_is_noticed_without_a_length(host, tmp_path):
    host.tells_length = False
    host.break_after = [1000]
    assert download(host.url, tmp_path / "file", MD5, len(CONTENT)).read_bytes() == CONTENT


@pytest.mark.parametrize(("status", "expected"), [(404, "404"), (503, "broke off .*503")])
def test_errors_of_the_host(host, tmp_path, status, expected):
    host.status = status
    with pytest.raises(SemaugError, match=expected):
        download(host.url, tmp_path / "file", MD5)
    assert len(host.ranges) == (1 if status == 404 else downloads.ATTEMPTS)


def test_other_addresses_checksums_and_places(host, tmp_path):
    with pytest.raises(SemaugError, match="only http and https"):
        download(f"file://{put(tmp_path / 'secret', 'x')}", tmp_path / "file", MD5)
    with pytest.raises(SemaugError, match="neither a sha256 nor an md5"):
        download(host.url, tmp_path / "file", "abc")
    with pytest.raises(SemaugError, match="cannot save"):
        download(host.url, put(tmp_path / "no folder", "") / "file", MD5)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="other systems have no disk that is always full")
def test_a_full_disk(host, tmp_path):
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(SemaugError, match="cannot save .*No space left"):
        download(host.url, tmp_path / "file", MD5)
    assert host.ranges == [None]


def test_a_named_set_is_downloaded_and_unpacked(host, tmp_path, monkeypatch):
    layouts.cub(tmp_path / "made" / "CUB_200_2011")
    put(tmp_path / "made" / "attributes.txt", "1 has_bill_shape::curved_(up_or_down)")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ("CUB_200_2011", "attributes.txt"):
            tar.add(tmp_path / "made" / name, name)
    host.content = packed.getvalue()
    checksum = hashlib.md5(host.content).hexdigest()
    archive = downloads.Archive(host.url, "CUB_200_2011.tgz", checksum, len(host.content), "CUB_200_2011")
    monkeypatch.setitem(readers.KNOWN, "cub", replace(readers.KNOWN["cub"], archive=archive))
    with pytest.raises(SemaugError, match="download CUB_200_2011.tgz from"):
        read_data("cub", tmp_path / "root")
    data = read_data("cub", tmp_path / "root", download=True)
    assert data.classes == layouts.CUB_CLASSES
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["CUB_200_2011"]
    read_data("cub", tmp_path / "root", download=True)
    assert host.ranges == [None]
    with pytest.raises(SemaugError, match="https://dl.allaboutbirds.org"):
        read_data("nabirds", tmp_path / "root", download=True)


def test_an_archive_without_its_folder(host, tmp_path):
    host.content = tar_bytes(regular("other/1.txt"))
    checksum = hashlib.md5(host.content).hexdigest()
    archive = downloads.Archive(host.url, "a.tar", checksum, len(host.content), "set")
    with pytest.raises(SemaugError, match="does not hold the folder set"):
        downloads.fetch(archive, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    put(tmp_path / "other" / "mine.txt", "x")
    with pytest.raises(SemaugError, match="cannot unpack .*not empty"):
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


def zip_bytes(*members: tuple[str, bytes, int]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content, mode in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            zipped.writestr(info, content, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def files_below(folder: Path) -> dict[str, bytes]:
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_tar_files(tmp_path, mode):
    folder, link = special("a/empty", tarfile.DIRTYPE), special("a/b/link", tarfile.SYMTYPE, "../1.txt")
    content = tar_bytes(folder, regular("a/1.txt"), link, special("hard", tarfile.LNKTYPE, "a/1.txt"), mode=mode)
    extract(put(tmp_path / "archive", content), tmp_path / "out")
    assert files_below(tmp_path / "out") == {name: b"content" for name in ("a/1.txt", "a/b/link", "hard")}
    assert (tmp_path / "out" / "a" / "empty").is_dir()


OUTSIDE = str(Path(tempfile.gettempdir()) / "semaug-escaped.txt")


def test_zip_files(tmp_path):
    content = zip_bytes(("a/", b"", 0), ("a/1.txt", b"one", 0), ("2.txt", b"two", stat.S_IFREG | 0o777))
    extract(put(tmp_path / "archive", content), tmp_path / "out")
    assert files_below(tmp_path / "out") == {"a/1.txt": b"one", "2.txt": b"two"}


@pytest.mark.parametrize(
    "members",
    [
        [regular("../escaped.txt")],
        [regular("a/../../escaped.txt")],
        [regular(OUTSIDE)],
        [regular("C:\\escaped.txt")],
        [regular("..\\escaped.txt")],
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
    with pytest.raises(SemaugError):
        extract(archive, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out", "secret"]
    assert secret.read_text() == "secret"
    assert not Path(OUTSIDE).exists()
    assert set(files_below(tmp_path / "out").values()) <= {b"content"}


@pytest.mark.parametrize(
    "member", [("../escaped", b"", 0), ("/escaped", b"", 0), ("a\\..\\..\\b", b"", 0), ("link", b"/etc", stat.S_IFLNK)]
)
def test_malicious_zip_files_are_refused(tmp_path, member):
    with pytest.raises(SemaugError, match="outside of its folder|holds a link"):
        extract(put(tmp_path / "archive", zip_bytes(member)), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out"]


def test_a_link_that_is_in_the_folder_already_is_replaced_not_followed(tmp_path):
    secret = put(tmp_path / "secret", "secret")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(secret)
    extract(put(tmp_path / "archive", tar_bytes(regular("a"))), tmp_path / "out")
    assert (secret.read_text(), (tmp_path / "out" / "a").read_text()) == ("secret", "content")


def test_bombs_are_refused(tmp_path):
    zeros = bytes(5_000_000)
    for content in (tar_bytes(regular("zeros", zeros), mode="w:gz"), zip_bytes(("zeros", zeros, 0))):
        archive = put(tmp_path / "archive", content)
        assert len(content) < 10_000
        with pytest.raises(SemaugError, match="more bytes than are allowed"):
            extract(archive, tmp_path / "out", max_bytes=1_000_000)
        extract(archive, tmp_path / "out", max_bytes=len(zeros))
    many = [regular(f"{i}", b"") for i in range(20)]
    with pytest.raises(SemaugError, match="more than 19 files"):
        extract(put(tmp_path / "archive", tar_bytes(*many)), tmp_path / "out", max_files=19)
    copies = [special(f"link{i}", tarfile.LNKTYPE, "file") for i in range(20)]
    with pytest.raises(SemaugError, match="more bytes than are allowed"):
        extract(put(tmp_path / "archive", tar_bytes(regular("file"), *copies)), tmp_path / "out", max_bytes=50)


def with_header_of(size: int, kind: bytes) -> bytes:
    """A compressed tar file whose first header says that so many zeros with the name of the next file follow."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = kind, size
    squeeze = zlib.compressobj(9, wbits=31)
    parts = [squeeze.compress(info.tobuf(tarfile.GNU_FORMAT))]
    parts += [squeeze.compress(bytes(2**20)) for _ in range(size // 2**20)]
    return b"".join(parts) + squeeze.compress(tar_bytes(regular("a"))) + squeeze.flush()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE])
def test_headers_do_not_fill_the_memory(tmp_path, kind):
    archive = put(tmp_path / "archive", with_header_of(200 * 2**20, kind))
    assert archive.stat().st_size < 400_000
    tracemalloc.start()
    try:
        with pytest.raises(SemaugError):
            extract(archive, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_sparse_files_count_with_all_their_zeros(tmp_path):
    (tmp_path / "sparse").write_bytes(b"")
    os.truncate(tmp_path / "sparse", 50_000_000)
    command = ["tar", "--sparse", "-cf", tmp_path / "archive", "-C", tmp_path, "sparse"]
    if shutil.which("tar") is None or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("there is no GNU tar here")
    assert (tmp_path / "archive").stat().st_size < 100_000
    with pytest.raises(SemaugError, match="more bytes than are allowed"):
        extract(tmp_path / "archive", tmp_path / "out", max_bytes=1_000_000)


def test_other_files_are_no_archives(tmp_path):
    for content in (b"", b"hello", CONTENT):
        with pytest.raises(SemaugError, match="neither a tar nor a zip file"):
            extract(put(tmp_path / "archive", content), tmp_path / "out")
    with pytest.raises(SemaugError, match="cannot unpack"):
        extract(tmp_path / "nowhere", tmp_path / "out")


ARCHIVES = [
    tar_bytes(regular("a/1.txt"), special("b", tarfile.SYMTYPE, "a/1.txt")),
    tar_bytes(regular("a/1.txt"), regular("b" * 200), mode="w:gz"),
    tar_bytes(regular("a/1.txt"), mode="w:xz"),
    zip_bytes(("a/1.txt", b"one" * 20, 0), ("b/", b"", 0)),
]


@pytest.mark.parametrize("original", ARCHIVES, ids=["tar", "gz", "xz", "zip"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_archives_end_in_a_sentence_or_inside(tmp_path, original, data):
    # most of a tar file is padding
    place = data.draw(st.integers(0, min(len(original), 1600)))
    piece = data.draw(st.binary(min_size=0, max_size=12))
    archive = put(tmp_path / "archive", original[:place] + piece + original[place + data.draw(st.integers(0, 12)) :])
    try:
        extract(archive, tmp_path / "out", max_bytes=100_000)
    except SemaugError as error:
        sentence = str(error)
    else:
        sentence = ""
    assert "\n" not in sentence
    assert {path.name for path in tmp_path.iterdir()} == {"archive", "out"}
