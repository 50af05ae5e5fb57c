"""The server under attack: uploads, paths, names and origins; the command line; the page in real Chromium."""

import http.client
import io
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from browser import CHROMIUM, Browser
from fuzzing import examples, mutated
from photos import photo_folder
from semaug.cli.main import main
from semaug.data.samples import load_image
from semaug.report.serve import app
from semaug.report.serve.answers import open_guide
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import SettingError

CLASS = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos; the name of one class is a script."""
    folder = photo_folder(tmp_path_factory.mktemp("photos"))
    for split in ("train", "test"):
        next((folder / split).iterdir()).rename(folder / split / CLASS)
    return folder


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"resize": 40, "crop": 32, "batch_size": 4, "val_per_class": 2, "epochs": 2}
    options = {"model": "small", "pretrained": False, "method": "learnable", "workers": 0, "cache": None, "lr": 0.01}
    output, augmentation = tmp_path_factory.mktemp("runs") / "run", Augmentation(10.0)
    return train(TrainConfig(data=str(photos), output=output, augmentation=augmentation, **sizes, **options))


@pytest.fixture(scope="module")
def port(run: Path) -> Iterator[int]:
    """A server in a thread of this process."""
    listening = app.listen("127.0.0.1", 0)
    server = app._server(app.application(open_guide(run), "run"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@contextmanager
def server(run: Path, *options: str, program: tuple[str, ...] = ("-m", "semaug")) -> Iterator[int]:
    """A server, started by the command line and ended by Ctrl-C."""
    with process(run, *options, program=program) as (port, _):
        yield port


@contextmanager
def process(
    run: Path, *options: str, program: tuple[str, ...] = ("-m", "semaug"), end: signal.Signals = signal.SIGINT
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The port and the process of such a server, which the signal `end` ends."""
    process = subprocess.Popen(
        [sys.executable, *program, "serve", str(run), "--port", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 240)
    line = process.stdout.readline() if ready else ""
    match = re.match(r"http://127\.0\.0\.1:(\d+)/ shows the (page|API)", line)
    if match is None:
        process.kill()
        raise AssertionError(process.communicate())
    yield int(match[1]), process
    process.send_signal(end)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + end
    assert errors.strip().splitlines() == [f"semaug: stopped by {end.name}"]


def upload(port: int, content: bytes, stated: int | None = None, path: str = "/answer") -> socket.socket:
    """Begin an upload, and do not wait for the answer."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    size = len(content) if stated is None else stated
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {size}\r\n\r\n".encode())
    connection.sendall(content)
    return connection


def test_neither_unfinished_uploads_nor_images_under_way_keep_the_server_from_ending(run: Path) -> None:
    with ExitStack() as open_connections, server(run) as port:  # the server ends first
        for _ in range(3):
            open_connections.enter_context(upload(port, b"GIF", stated=9))
            open_connections.enter_context(upload(port, scan_bomb()))
            open_connections.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(b"GET / HTT")
        assert ask(port, "GET", "/")[0] == 200


SLOW = """
import sys, time
from pathlib import Path
from semaug.cli.main import main
from semaug.report.serve import api
def ranked(*arguments):
    Path({begun!r}).touch()
    time.sleep(3600)
api.ranked = ranked
sys.exit(main())
"""


def test_an_answer_that_takes_an_hour_does_not_keep_the_server_from_ending(run: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    program = ("-c", SLOW.format(begun=str(begun)))
    with ExitStack() as connections, server(run, "--images", "0", program=program) as port:
        connections.enter_context(upload(port, in_format("PNG"), path="/predict"))
        while not begun.exists():
            assert ask(port, "GET", "/health")[0] == 200
            time.sleep(0.05)


IGNORING = """
import signal, sys
from semaug.cli.main import main
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(main())
"""


def test_a_signal_that_the_server_was_started_to_ignore_does_not_end_it(run: Path) -> None:
    with process(run, "--images", "0", program=("-c", IGNORING), end=signal.SIGTERM) as (port, background):
        background.send_signal(signal.SIGINT)
        assert ask(port, "GET", "/health")[0] == 200
        with pytest.raises(subprocess.TimeoutExpired):
            background.wait(0.5)
        assert ask(port, "GET", "/health")[0] == 200


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"host": f"127.0.0.1:{port}", "content-length": str(len(body)), **headers}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    result = response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    connection.close()
    return result


def png(width: int, height: int) -> bytes:
    """The beginning of an image that claims to be of this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))


def in_format(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (50, 30), "green").save(buffer, kind)
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------------- uploads


def test_a_client_that_closes_its_sending_side_is_answered(port: int) -> None:
    large = in_format("BMP") + bytes(300_000)  # more than is read at a time
    for content, stated, answer in [(in_format("PNG"), None, b"200 OK"), (large, None, b"200 OK"), (b"GIF", 9, b"")]:
        with upload(port, content, stated, path="/predict") as connection:
            connection.shutdown(socket.SHUT_WR)
            response = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))
        assert answer in response.partition(b"\r\n")[0]
        assert bool(response) == bool(answer)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_images_are_answered(port: int, kind: str) -> None:
    status, headers, content = ask(port, "POST", "/answer", in_format(kind))
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert len(json.loads(content)["top"]) == 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the file is empty"),
        (b"no image at all" * 100, "it is not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is not an image"),
        (b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>', "it is not an image"),
        (in_format("PNG")[:60], "cannot read the image"),
        (in_format("ICO"), "it is not an image"),
        (png(60_000, 60_000), f"more than {app.MAX_PIXELS} pixels"),
        (png(10_000, 6_000), f"more than {app.MAX_PIXELS} pixels"),
    ],
    ids=["empty", "text", "PostScript", "SVG", "cut", "another format", "bomb", "large"],
)
def test_files_that_are_not_images_are_refused_with_a_sentence(port: int, content: bytes, sentence: str) -> None:
    status, headers, answer = ask(port, "POST", "/answer", content)
    assert status == 415
    assert sentence in json.loads(answer)["error"]
    assert headers["x-content-type-options"] == "nosniff"


def test_large_files_are_refused_by_their_stated_and_their_real_size(port: int) -> None:
    status, _, answer = ask(port, "POST", "/answer", b"x", **{"content-length": str(app.MAX_BYTES + 1)})
    assert (status, json.loads(answer)["error"]) == (413, "the file has more than 25 MB")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:  # of no stated size
        connection.sendall(f"POST /answer HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode())
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        part, sent = b"100000\r\n" + bytes(0x100000) + b"\r\n", 0
        try:
            while sent <= 40:
                connection.sendall(part)
                sent += 1
        except OSError:
            pass  # the server has hung up
        try:
            answer = connection.recv(1 << 16)
        except OSError:
            answer = b""
    assert sent <= 40 or answer.startswith(b"HTTP/1.1 413")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")
    assert ask(port, "GET", "/")[0] == 200


def scan_bomb() -> bytes:
    """A JPEG that takes many seconds to decode: 49 million pixels in 180 passes, a few below the limit."""
    buffer = io.BytesIO()
    Image.new("L", (7000, 7000), 128).save(buffer, "JPEG", progressive=True, quality=50)
    content = buffer.getvalue()
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * 180 + b"\xff\xd9"


def test_an_image_that_takes_too_long_is_refused_and_the_next_one_answered(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(port, "POST", "/answer", in_format("PNG"))[0] == 200  # starts the process that decodes
    with monkeypatch.context() as patch:
        patch.setattr(app, "DECODING_SECONDS", 2)
        status, _, answer = ask(port, "POST", "/answer", scan_bomb())
    assert (status, json.loads(answer)["error"]) == (415, "the image cannot be decoded within 2 seconds")
    assert ask(port, "POST", "/answer", in_format("PNG"))[0] == 200


def test_a_decoder_that_crashes_is_one_sentence(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(app.anyio.to_process, "run_sync", crash)
        status, _, answer = ask(port, "POST", "/answer", in_format("PNG"))
    assert (status, json.loads(answer)["error"]) == (415, "the image cannot be decoded: its decoder has crashed")


async def crash(*arguments: object, **options: object) -> None:
    raise app.anyio.BrokenWorkerProcess


FEW = """
import sys
from semaug.cli.main import main
from semaug.report.serve import app
app.CONNECTIONS, app.SILENCE_SECONDS = 5, 60
sys.exit(main())
"""


def test_of_too_many_connections_only_the_last_ones_are_refused(run: Path) -> None:
    picture = in_format("PNG")
    with ExitStack() as connections, server(run, program=("-c", FEW)) as port:
        kept = [connections.enter_context(upload(port, b"", stated=len(picture))) for _ in range(5)]
        for _ in range(3):
            refused = connections.enter_context(upload(port, picture))
            assert refused.recv(1 << 16).startswith(b"HTTP/1.1 503")
        for connection in kept:
            connection.sendall(picture)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_many_uploads_at_once_wait_for_their_turn(port: int) -> None:
    waiting = [upload(port, in_format("PNG")) for _ in range(200)]
    for connection in waiting:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.close()


def test_clients_that_send_nothing_are_disconnected_and_others_answered(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SILENCE_SECONDS", 0.5)
    header = f"GET / HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(40)]
    for i, connection in enumerate(silent):
        connection.sendall(b"" if i % 2 else header[:-2])
    bodies = [upload(port, b"GIF89a", stated=1000) for _ in range(40)]
    assert ask(port, "GET", "/")[0] == 200
    assert ask(port, "POST", "/answer", in_format("PNG"))[0] == 200
    for connection in silent:
        assert connection.recv(100) == b""  # the server has closed the connection
        connection.close()
    for connection in bodies:
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        connection.close()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:  # the second request is not finished
        connection.sendall(header + header[:20])
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200")
    with upload(port, b"", stated=1000, path="/nothing") as connection:  # answered before the end of its body
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        connection.settimeout(0.2)
        with suppress(ConnectionError):  # also if it never pauses
            while True:
                connection.sendall(b"1")
                with suppress(TimeoutError):
                    if not connection.recv(1 << 16):
                        break


def test_clients_that_do_not_read_are_disconnected(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, end = threading.Event(), app._Protocol.connection_lost
    monkeypatch.setattr(app._Protocol, "connection_lost", lambda *arguments: (end(*arguments), ended.set()))
    monkeypatch.setattr(app, "SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode() * 1000)  # 16 MB of answers
        assert ended.wait(60)


REQUEST = b"POST /answer HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 3\r\n\r\nGIF"


@examples(60)
@given(data=st.data())
def test_requests_with_anything_in_them(port: int, data: st.DataObject) -> None:
    content = data.draw(mutated(REQUEST))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "SILENCE_SECONDS", 0.1)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(content)
            answer = b""
            with suppress(ConnectionError):
                while part := connection.recv(1 << 16):
                    answer += part
    assert answer == b"" or re.match(rb"HTTP/1\.1 [24]\d\d ", answer)


# ------------------------------------------------------------------------------------------- paths, names and origins


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/training-image/../../../etc/passwd",
        "/training-image/..%2f..%2fetc%2fpasswd", "/training-image/-1", "/training-image/999999", "/training-image/1.5",
        "/training-image/" + "9" * 400, "/training-image/" + "9" * 5000, "/training-image/%D9%A3", "/config.json",
        "/model.safetensors", "/static/", "//etc/passwd", "/answer/..",
    ],
)  # fmt: skip
def test_no_file_is_served(port: int, path: str) -> None:
    status, headers, content = ask(port, "GET", path)
    assert status in (404, 400)
    assert b"root:" not in content
    assert "default-src 'none'" in headers.get("content-security-policy", "") or status == 400


def test_training_images_are_thumbnails_without_metadata(port: int) -> None:
    status, headers, content = ask(port, "GET", "/training-image/0")
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (128, 128)
        assert not image.getexif()


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "127.0.0.1.evil.example", "evil.example:8000", "192.0.2.7", "", "[", "evil@127.0.0.1",
        "127.0.0.1@evil.example", "127.0.0.1/evil", "127.0.0.1:8000:9", "127.0.0.1:x", "[::1", "::1",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("POST", "/answer"), ("GET", "/training-image/0")])
def test_other_host_names_are_refused(port: int, host: str, method: str, path: str) -> None:
    status, _, content = ask(port, method, path, b"", host=host)
    assert status in (421, 400)
    assert b"<html" not in content


def test_names_of_this_machine_are_accepted(port: int) -> None:
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "localhost", "[::1]:9000", "127.0.0.2"):
        assert ask(port, "GET", "/", host=host)[0] == 200


def test_names_of_a_server_for_other_machines() -> None:
    assert app._is_own("192.0.2.7", "0.0.0.0")
    assert app._is_own("birds.example", "birds.example")
    assert not app._is_own("evil.example", "0.0.0.0")
    assert not app._is_own("192.0.2.7", "localhost")
    assert app.is_loopback("::1")
    assert not app.is_loopback("0.0.0.0")


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://[", "evil.com//127.0.0.1:{port}", ""]
)
def test_requests_from_other_pages_are_refused(port: int, origin: str) -> None:
    assert ask(port, "POST", "/answer", in_format("PNG"), origin=origin.format(port=port))[0] == 403
    assert ask(port, "POST", "/answer", in_format("PNG"), origin=f"http://127.0.0.1:{port}")[0] == 200


@pytest.mark.parametrize(
    ("lines", "rest", "status"),
    [
        (["Origin: http://127.0.0.1:{port}", "Origin: https://evil.example", "Connection: close"], "", 403),
        (
            ["Content-Length: 4", "Transfer-Encoding: chunked"],
            "0\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            400,
        ),
    ],
)
def test_ambiguous_headers_are_refused(port: int, lines: list[str], rest: str, status: int) -> None:
    head = "\r\n".join(["POST /answer HTTP/1.1", "Host: 127.0.0.1:{port}", *lines]).format(port=port)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"{head}\r\n\r\n{rest}".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1") == 1


def test_other_methods_are_refused(port: int) -> None:
    assert ask(port, "GET", "/answer")[0] == 405
    assert ask(port, "POST", "/")[0] == 405
    assert ask(port, "DELETE", "/training-image/0")[0] == 405


def test_the_policy_of_the_page_allows_only_its_own_content(port: int) -> None:
    _, headers, content = ask(port, "GET", "/")
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["img-src"] == "data: 'self' blob:"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/=]+'", policy[kind])
    assert b"http://" not in content
    assert b"https://" not in content
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-frame-options"] == "DENY"
    assert "camera=()" in headers["permissions-policy"]
    assert "server" not in headers


def test_a_port_in_use_is_one_sentence(port: int, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(run), "--port", str(port)]) == 2
    errors = capsys.readouterr().err
    pattern = rf"semaug: cannot listen on 127\.0\.0\.1, port {port}: .*in use.*; choose another \S+\n"
    assert re.fullmatch(pattern, errors)


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("", "`host` is empty"),
        ("192.0.2.1", r"cannot listen on 192.0.2.1, port 0: [^()]*; choose another `host`"),
        ("a" * 300, "choose another `host`"),
    ],
)
def test_an_address_that_is_not_local_is_one_sentence(host: str, sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        app.listen(host, 0)


def test_a_missing_package_is_one_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "semaug.report.serve.app")
    monkeypatch.delattr("semaug.report.serve.app")
    assert main(["serve", str(run)]) == 2
    assert capsys.readouterr().err == "semaug: the page needs uvicorn: pip install '.[serve]' in the clone\n"


# ----------------------------------------------------------------------------------------------------------- browser


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_works_in_a_browser(port: int, photos: Path, tmp_path: Path) -> None:
    photo = next((photos / "test" / CLASS).glob("*.png"))
    load_image(photo).resize((300, 200)).save(tmp_path / "photo.jpg")
    (tmp_path / "text.png").write_text("no image")
    shares = "[...document.querySelectorAll('#top b')].map(b => parseFloat(b.textContent))"
    shown = "[...document.querySelectorAll('#along img')].map(image => image.src)"
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"http://127.0.0.1:{port}/")
        browser.choose("#file", photo)
        browser.wait("!document.getElementById('result').hidden")
        assert sum(browser.value(shares)) == pytest.approx(100, abs=0.5)
        assert browser.value("document.getElementById('state').textContent") == photo.name
        browser.wait("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
        assert browser.value("document.querySelectorAll('#nearest img').length") == 6
        assert browser.value("document.getElementById('map').naturalWidth") == 32  # what speaks for the class
        names = browser.value("[...document.querySelectorAll('#top span')].map(span => span.textContent)")
        assert CLASS in names  # as text
        before = browser.value(shown)
        browser.value("document.getElementById('strength').focus()")
        browser.press("ArrowRight", 10)
        assert browser.value("document.getElementById('amount').textContent") == "1.0"
        after = browser.value(shown)
        browser.press("End")
        assert browser.value("document.getElementById('amount').textContent") == "3.0"
        assert before != after or before != browser.value(shown)
        browser.value("document.getElementById('back').click()")
        assert browser.value(shown) == before
        assert "times the distance" in browser.value("document.getElementById('note').textContent")

        browser.drop("#drop", tmp_path / "photo.jpg")
        browser.wait("document.getElementById('state').textContent === 'photo.jpg'")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert browser.complaints == []

        browser.choose("#file", tmp_path / "text.png")
        browser.wait("document.getElementById('state').className === 'wrong'")
        assert "it is not an image" in browser.value("document.getElementById('state').textContent")
        assert browser.value("document.getElementById('result').hidden")
        assert all("415" in complaint for complaint in browser.complaints)  # Chromium reports every refusal
        addresses = {re.sub(r"^(blob:)?(http://127\.0\.0\.1:\d+).*|^data:.*$", r"\2", url) for url in browser.requests}
        assert addresses <= {f"http://127.0.0.1:{port}", "", "about:blank"}


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_has_a_dark_mode_and_fits_a_phone(port: int, photos: Path, tmp_path: Path) -> None:
    photo = next((photos / "test").rglob("*.png"))
    brightness = {}
    for dark in (False, True):
        with Browser(tmp_path / f"profile-{dark}", width=500, height=1600, dark=dark) as browser:
            browser.open(f"http://127.0.0.1:{port}/")
            browser.choose("#file", photo)
            browser.wait("!document.getElementById('result').hidden")
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
            browser.screenshot(tmp_path / "shot.png")
            assert browser.complaints == []
        with Image.open(tmp_path / "shot.png") as shot:
            brightness[dark] = shot.convert("L").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    assert brightness[False] > 180
    assert brightness[True] < 110
