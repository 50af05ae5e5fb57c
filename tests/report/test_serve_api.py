"""The API of the server over real sockets: images, forms, and everything that a client can do wrong."""

import http.client
import io
import json
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fuzzing import examples, mutated
from semaug.data.images import Preprocessing
from semaug.inference.classifier import Classifier
from semaug.network.models import SmallNet
from semaug.report.serve import api, app
from semaug.util.errors import DataError

CLASSES = ("blackbird", "=cmd", "<b>")


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    torch.manual_seed(1)
    return Classifier(SmallNet(3).eval(), CLASSES, Preprocessing(40, 32), "small", {})


@pytest.fixture(scope="module")
def port(classifier: Classifier) -> Iterator[int]:
    listening = app.listen("127.0.0.1", 0)
    server = app._server(app.application(classifier, "birds"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    answer = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    connection.close()
    return answer


def photo(seed: int = 0, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (50, 30, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def form(files: Mapping[str, bytes], boundary: str = "x-17") -> tuple[bytes, str]:
    """A form as curl writes it, and its content type."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n".encode()
        + content
        + b"\r\n"
        for name, content in files.items()
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def expected(classifier: Classifier, content: bytes) -> list[tuple[str, float]]:
    with Image.open(io.BytesIO(content)) as image:
        pixels = torch.tensor(classifier.preprocessing.pixels(image.convert("RGB")))[None]
    values, order = classifier.probabilities(pixels)[0].sort(descending=True)
    return [(CLASSES[i], value) for i, value in zip(order.tolist(), values.tolist(), strict=True)]


def test_a_body_that_is_an_image_is_classified(port: int, classifier: Classifier) -> None:
    for kind in ("PNG", "BMP"):
        status, headers, content = ask(port, "POST", "/predict", photo(kind=kind), content_type="image/x")
        [result] = json.loads(content)["results"]
        assert (status, headers["content-type"]) == (200, "application/json")
        assert (result["file"], result["error"]) == (None, None)
        for row, (label, value) in zip(result["predictions"], expected(classifier, photo()), strict=True):
            assert row == {"label": label, "probability": pytest.approx(value, abs=1e-5)}


def test_one_bad_image_among_several_has_an_error_of_its_own(port: int, classifier: Classifier) -> None:
    files = {"a.png": photo(1), "b.txt": b"no image\r\n--x-1 is no boundary\r\n\r\n", "c d.jpg": photo(2)}
    body, content_type = form(files)
    status, _, content = ask(port, "POST", "/predict?top=2", body, content_type=content_type)
    first, bad, last = json.loads(content)["results"]
    assert status == 200
    assert [first["file"], bad["file"], last["file"]] == list(files)
    assert (bad["predictions"], "it is not an image" in bad["error"]) == ([], True)
    for result, name in ((first, "a.png"), (last, "c d.jpg")):
        assert result["error"] is None
        assert [row["label"] for row in result["predictions"]] == [n for n, _ in expected(classifier, files[name])[:2]]


def test_no_readable_image_is_415_with_results(port: int) -> None:
    for body, content_type in ((b"text", "image/png"), form({"a.png": b"", "b.png": photo()[:40]})):
        status, _, content = ask(port, "POST", "/predict", body, content_type=content_type)
        assert status == 415
        assert all(result["error"] for result in json.loads(content)["results"])


@pytest.mark.parametrize(
    ("body", "content_type", "sentence"),
    [
        (b"", "multipart/form-data", "has no boundary"),
        (b"", "multipart/form-data; boundary=" + 71 * "x", "has no boundary"),
        (b"", "multipart/form-data; boundary=x", "incomplete"),
        (form({"a": photo()})[0][:-10], form({})[1], "incomplete"),
        (b"--x\r\nno blank line\r\n--x--", "multipart/form-data; boundary=x", "damaged"),
        (b"--x\r\n" + 9000 * b"y" + b"\r\n\r\n\r\n--x--", "multipart/form-data; boundary=x", "damaged"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--", "multipart/form-data; boundary=x", "no file"),
        (b'--x\r\nContent-Disposition: x; filename="a\r\n\r\n1\r\n--x--', "multipart/form-data; boundary=x", "damaged"),
        (*form({str(i): b"" for i in range(33)}), "more than 32 files"),
    ],
)  # fmt: skip
def test_damaged_forms_are_one_sentence(port: int, body: bytes, content_type: str, sentence: str) -> None:
    status, _, content = ask(port, "POST", "/predict", body, content_type=content_type)
    assert status == 400
    assert sentence in json.loads(content)["error"]


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ('name="f"; filename="Bébé 🐦.png"', "Bébé 🐦.png"),
        ('name="f; filename=x"; filename=y.png', "y.png"),
        (r'filename="a\"b\\c;d.png"; name="f"', r'a"b\c;d.png'),
        ("filename*=utf-8''%F0%9F%90%A6.png", "🐦.png"),
        (f"filename*=idna''xn--{100 * 'a'}", f"xn--{100 * 'a'}"),
        ("filename*=unicode_escape''%5cud800", r"\ud800"),
        ("filename*=utf-7''%2b2AA-%ff", "+2AA-\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_names_of_files_in_forms(header: str, name: str) -> None:
    body = f"--x\r\nContent-Disposition: form-data; {header}\r\n\r\nimage\r\n--x--".encode()
    assert api.images_in(body, "multipart/form-data; boundary=x") == [(name, b"image")]


@examples(200)
@given(data=st.data())
def test_forms_with_anything_in_them(data: st.DataObject) -> None:
    body, content_type = form({"a.png": b"\x89PNG", "b": b"\r\n"})
    try:
        images = api.images_in(data.draw(mutated(body)), data.draw(mutated(content_type.encode())).decode("latin-1"))
    except DataError:
        return
    assert all(isinstance(content, bytes) for _, content in images)


def test_all_images_of_a_request_share_the_time_for_decoding(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    async def wait(function: object, *arguments: object, **options: object) -> None:
        if function is app._start:
            return
        waits.append(app.anyio.current_effective_deadline() - app.anyio.current_time())
        await app.anyio.sleep(1000)

    body, content_type = form({str(i): photo() for i in range(5)})
    with monkeypatch.context() as patch:
        patch.setattr(app, "DECODING_SECONDS", 0.2)
        patch.setattr(app.anyio.to_process, "run_sync", wait)
        status, _, content = ask(port, "POST", "/predict", body, content_type=content_type)
    assert status == 415
    assert [result["error"] for result in json.loads(content)["results"]] == [
        "the image cannot be decoded within 0.2 seconds"
    ] * 5
    assert all(seconds <= 0 for seconds in waits[1:])


@pytest.mark.parametrize("top", ["0", "-1", "x", "", "1e3", "9" * 400])
def test_another_number_of_classes_is_one_sentence(port: int, top: str) -> None:
    assert ask(port, "POST", f"/predict?top={top}", photo())[0] == 400


def test_the_protections_of_the_page_hold_for_the_api(port: int) -> None:
    for method, path in (("POST", "/predict"), ("GET", "/health"), ("GET", "/openapi.json"), ("GET", "/api")):
        body = photo() if method == "POST" else b""
        status, headers, _ = ask(port, method, path, body)
        assert status == 200
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
        assert ask(port, method, path, body, host="evil.example")[0] == 421
        assert ask(port, method, path, body, origin="https://evil.example")[0] == 403
        assert ask(port, method, path, body, origin=f"http://127.0.0.1:{port}")[0] == 200
    assert ask(port, "GET", "/predict")[0] == 405
    large = {"content_length": str(app.MAX_BYTES + 1)}
    assert ask(port, "POST", "/predict", b"x", **large)[0] == 413


def test_health_and_description(port: int) -> None:
    about = json.loads(ask(port, "GET", "/health")[2])
    assert (about["status"], about["model"], about["network"], about["classes"]) == ("ok", "birds", "small", 3)
    description = json.loads(ask(port, "GET", "/openapi.json")[2])
    assert description["openapi"] == "3.1.0"
    assert list(description["paths"]) == ["/predict", "/health"]
    schema = description["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    answer = json.loads(ask(port, "POST", "/predict", photo())[2])
    assert_fits(answer, schema)
    assert_fits(
        about, description["paths"]["/health"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    )


def assert_fits(value: object, schema: Mapping[str, object]) -> None:
    """Whether a value has the properties of its schema and no others."""
    if schema.get("type") == "object":
        assert isinstance(value, dict)
        assert set(value) == set(schema["properties"]) == set(schema["required"])
        for name, part in schema["properties"].items():
            assert_fits(value[name], part)
    elif schema.get("type") == "array":
        assert isinstance(value, list)
        for item in value:
            assert_fits(item, schema["items"])
    else:
        kinds = {"string": str, "integer": int, "number": float, "null": type(None)}
        allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert isinstance(value, tuple(kinds[kind] for kind in allowed))


def test_without_training_images_the_first_page_is_that_of_the_api(port: int) -> None:
    status, headers, content = ask(port, "GET", "/")
    assert (status, content) == (200, ask(port, "GET", "/api")[2])
    assert b"POST /predict" in content
    assert b"openapi.json" in content
    assert b"http" not in content.replace(b"http-equiv", b"")
    assert "script-src 'none'" in headers["content-security-policy"]
