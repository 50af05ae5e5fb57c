"""Odd images are used, hostile ones are refused, and a run says which before it starts."""

import io
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.layouts import put
from photos import photo_folder
from semaug.cli.main import main
from semaug.data import samples as samples_module
from semaug.data.check import check_data
from semaug.data.images import Preprocessing, decoded
from semaug.data.readable import readable_splits
from semaug.data.readers import read_data, training_splits
from semaug.data.samples import load_image
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import SemaugError

# ---------------------------------------------------------------------------------------------------- readable ones


def saved(path: Path, image: Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def ramp(kind: str) -> np.ndarray:
    """Grey from black to white, from left to right."""
    across = np.tile(np.linspace(0, 1, 64), (16, 1))
    if kind == "float32":
        return across.astype(kind)
    return (across * {"uint8": 255, "uint16": 65535, "int32": 65535}[kind]).astype(kind)


@pytest.mark.parametrize(
    ("kind", "suffix"), [("uint16", "png"), ("uint16", "tif"), ("int32", "tif"), ("float32", "tif")]
)
def test_deep_grey_keeps_its_shades(tmp_path: Path, kind: str, suffix: str) -> None:
    deep = load_image(saved(tmp_path / f"deep.{suffix}", Image.fromarray(ramp(kind))))
    shades = np.asarray(deep, dtype=int)
    assert deep.mode == "RGB"
    assert np.abs(shades - ramp("uint8")[..., None]).max() <= 2


def test_cmyk_has_the_colours_that_were_put_in(tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 16), (200, 40, 30)).convert("CMYK")
    for name in ("a.jpg", "a.tif"):
        colour = load_image(saved(tmp_path / name, image)).getpixel((8, 8))
        assert np.abs(np.subtract(colour, (200, 40, 30))).max() < 12


def transparent(mode: str) -> tuple[Image.Image, dict[str, Any]]:
    """Red on the left; on the right fully transparent, with another colour below."""
    if mode == "P":
        image = Image.new("P", (16, 8), 0)
        image.putpalette([255, 0, 0, 10, 20, 30])
        image.paste(1, (8, 0, 16, 8))
        return image, {"transparency": bytes([255, 0])}
    image = Image.new("RGBA", (16, 8), (255, 0, 0, 255))
    image.paste((10, 20, 30, 0), (8, 0, 16, 8))
    return image, {}


@pytest.mark.parametrize(("mode", "suffix"), [("P", "png"), ("P", "gif"), ("RGBA", "png"), ("RGBA", "webp")])
@pytest.mark.filterwarnings("error")
def test_what_is_transparent_is_white(tmp_path: Path, mode: str, suffix: str) -> None:
    image, options = transparent(mode)
    if suffix == "gif":
        options = {"transparency": 1}
    if suffix == "webp":
        options = {"lossless": True}
    loaded = load_image(saved(tmp_path / f"a.{suffix}", image, **options))
    assert loaded.getpixel((2, 4)) == (255, 0, 0)
    assert loaded.getpixel((13, 4)) == (255, 255, 255)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_of_an_animation_the_first_frame_is_taken(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (12, 12), colour) for colour in ("red", "lime", "blue")]
    path = saved(tmp_path / f"a.{suffix}", frames[0], save_all=True, append_images=frames[1:])
    red, green, blue = load_image(path).getpixel((6, 6))  # type: ignore[misc]
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_righted(tmp_path: Path, orientation: int) -> None:
    upright = Image.new("RGB", (40, 20), "black")
    upright.paste("white", (0, 0, 10, 10))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    turned = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    righted = load_image(saved(tmp_path / "a.jpg", turned, exif=exif, quality=95))
    assert righted.size == (40, 20)
    assert min(righted.getpixel((4, 4))) > 240  # type: ignore[arg-type, type-var]
    assert max(righted.getpixel((35, 15))) < 15  # type: ignore[arg-type, type-var]


def test_damaged_exif_data_do_not_cost_the_image(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", Image.new("RGB", (10, 10)), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40)
    assert load_image(path).size == (10, 10)


@pytest.mark.parametrize("shape", ["squash", "aspect"])
@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (5000, 2)])
def test_tiny_and_thin_images_are_used(tmp_path: Path, shape: Any, size: tuple[int, int]) -> None:
    image = load_image(saved(tmp_path / "a.png", Image.new("RGB", size, (9, 8, 7))))
    pixels = Preprocessing(20, 16, shape).pixels(image)
    assert pixels.shape == (20, 20, 3)
    assert (pixels == (9, 8, 7)).all()


def test_the_content_decides_not_the_name(tmp_path: Path) -> None:
    for kind in ("PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM"):
        path = saved(tmp_path / f"{kind}.jpg", Image.new("RGB", (9, 7), "red"), format=kind)
        assert load_image(path).size == (9, 7)


@pytest.mark.parametrize(
    "name", ["a b.png", "two\nlines.png", "bird \u00fc\u9ce5\U0001f426.png", "'quo\"te.png", "-x.png"]
)
def test_any_name_of_a_file_or_class_will_do(tmp_path: Path, name: str) -> None:
    for folder in ("one", name[:-4]):
        saved(tmp_path / "set" / folder / name, Image.new("RGB", (8, 8), "red"))
    data = read_data(str(tmp_path / "set"))
    assert {data.splits["train"].name(i) for i in range(2)} == {f"one/{name}", f"{name[:-4]}/{name}"}
    assert decoded(data.splits["train"], Preprocessing(8, 8), tmp_path / "cache").shape == (2, 8, 8, 3)
    broken = tmp_path / "set" / "one" / name
    broken.write_bytes(b"")
    (item,) = check_data(data).unreadable
    assert item.image.name == f"one/{name}"
    with pytest.raises(SemaugError) as caught:
        load_image(broken)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------- hostile ones


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_bomb(side: int) -> bytes:
    """A PNG file of side × side black pixels, some thousand of them to a byte."""
    squeeze, row = zlib.compressobj(9), bytes(1 + side // 8)
    body = b"".join(squeeze.compress(row * 100) for _ in range(side // 100)) + squeeze.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def tiff_with_large_tiles(side: int) -> bytes:
    """A TIFF image of 16 × 16 pixels in a tile of side × side."""
    squeeze = zlib.compressobj()
    body = b"".join(squeeze.compress(bytes(side * 100)) for _ in range(side // 100)) + squeeze.flush()
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(body)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", 8 + len(body)) + body + directory


def jpeg_header(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    content = bytearray(file.getvalue())
    start = content.index(b"\xff\xc0") + 5
    content[start : start + 4] = struct.pack(">HH", side, side)
    return bytes(content)


BOMBS = {
    "20000.png": lambda: png_bomb(20_000),
    "gigapixels.png": lambda: png_bomb(60_000),
    "wide.ppm": lambda: b"P6 100000 100000 255 x",
    "wide.bmp": lambda: (
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 60, 0, 0, 54, 40, 50_000, 50_000, 1, 24, 0, 0, 0, 0, 0, 0)
    ),
    "wide.gif": lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b",\0\0\0\0\xff\xff\xff\xff\0\x08\0",
    "wide.jpg": lambda: jpeg_header(65_500),
    "tiles.tif": lambda: tiff_with_large_tiles(16_000),
    "wide.webp": lambda: (
        b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + b"\xff\x3f\0\xff\x3f\0"
    ),
}

MEASURE = """
import json, resource, sys
from pathlib import Path
from semaug.data.samples import load_image
from semaug.util.errors import SemaugError
folder, found = Path(sys.argv[1]), {}
load_image(folder / "sound.png")
for path in sorted(folder.iterdir()):
    before, sentence = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, ""
    try:
        load_image(path)
    except SemaugError as error:
        sentence = str(error)
    found[path.name] = sentence, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bombs")
    for name, content in BOMBS.items():
        put(folder / name, content())
        assert (folder / name).stat().st_size < 1_000_000
    saved(folder / "sound.png", Image.new("RGB", (8, 8)))
    return folder


def test_bombs_are_refused_before_memory_is_taken(bombs: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(bombs)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(result.stdout)
    assert found.pop("sound.png")[0] == ""
    assert found.keys() == BOMBS.keys()
    for name, (sentence, grown) in found.items():
        assert "it has more than 178956970 pixels" in sentence, (name, sentence)
        assert sentence.startswith("cannot read the image"), name
        assert grown < 30_000, name  # KiB; the smallest of these images would take 256 MB


def test_the_limit_holds_where_a_program_has_lifted_that_of_pillow(
    bombs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(SemaugError, match="more than 178956970 pixels"):
        load_image(bombs / "20000.png")


def test_an_image_below_the_limit_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "large.png", png_bomb(1600))
    assert load_image(path).size == (1600, 1600)
    monkeypatch.setattr(samples_module, "MAX_PIXELS", 1600 * 1600 - 1)
    with pytest.raises(SemaugError, match="more than 2559999 pixels"):
        load_image(path)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(%s) (w) file closefile\nshowpage\n%%%%EOF\n"


def test_postscript_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ghostscript = put(tmp_path / "bin" / "gs", f"#!/bin/sh\ntouch {tmp_path}/started\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ghostscript.parent}:{os.environ['PATH']}")
    path = put(tmp_path / "photo.jpg", EPS)
    with pytest.raises(SemaugError, match="not an image, or in a format that is not known"):
        load_image(path)
    assert not (tmp_path / "started").exists()
    with Image.open(path) as image, pytest.raises(OSError):  # noqa: PT011
        image.load()
    assert (tmp_path / "started").exists()  # which is what Pillow does if it is let


def test_what_is_no_image_is_refused_with_a_reason(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    sound = saved(
        tmp_path / "sound.jpg", Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), "uint8"))
    )
    for name, content, reason in (
        ("cut.jpg", sound.read_bytes()[:-900], "truncated"),
        ("empty.jpg", b"", "the file is empty"),
        ("text.jpg", b"hello", "not an image"),
        ("page.png", b"<html></html>", "not an image"),
    ):
        with pytest.raises(SemaugError, match=rf"^cannot read the image .*{name}: .*{reason}"):
            load_image(put(tmp_path / name, content))
    for name, reason in (("pipe.jpg", "not a file"), ("none.jpg", "no such file"), (".", "not a file")):
        with pytest.raises(SemaugError, match=reason):
            load_image(tmp_path / name)


# --------------------------------------------------------------------------------------- in a run, before it starts

BAD = {"cut.png": "truncated", "empty.png": "the file is empty", "text.png": "not an image", "bomb.png": "pixels"}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Sound photos of three classes, and bad ones in every split."""
    folder = photo_folder(tmp_path / "photos")
    for split in ("train", "test"):
        first = sorted((folder / split).iterdir())[0]
        content = next(first.iterdir()).read_bytes()
        put(first / "cut.png", content[: len(content) // 2])
        put(first / "empty.png", "")
        put(first / "text.png", "hello")
        put(first / "bomb.png", png_bomb(20_000))
    return folder


def config(photos: Path, **options: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": "small", "pretrained": False, "epochs": 1, "resize": 24, "crop": 20, "batch_size": 8,
        "method": "basic", "workers": 0, "cache": photos.parent / "cache", "output": photos.parent / "run",
    }  # fmt: skip
    return TrainConfig(data=str(photos), **(settings | options))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_training_stops_before_it_starts_and_lists_all_bad_images(photos: Path, cache: bool, workers: int) -> None:
    options = {} if cache else {"cache": None}
    with pytest.raises(SemaugError) as caught:
        train(config(photos, workers=workers, **options))
    sentence = str(caught.value)
    assert sentence.startswith("8 of 44 images cannot be read: train/")
    assert sentence.endswith("; repair or remove them, or go on without them by --on-bad-image skip")
    assert " and 5 more, all listed in " in sentence
    assert "\n" not in sentence
    run = photos.parent / "run"
    listed = {entry["image"]: entry["reason"] for entry in json.loads((run / "bad_images.json").read_bytes())}
    assert sorted(Path(name).name for name in listed) == sorted([*BAD, *BAD])
    assert all(BAD[Path(name).name] in reason for name, reason in listed.items())
    assert not (run / "metrics.jsonl").exists()
    assert not (run / "checkpoints").exists()
    found = {item.image.name: item.reason for item in check_data(read_data(str(photos))).unreadable}
    assert found == listed


def without_bad(photos: Path) -> Path:
    for name in BAD:
        for path in photos.rglob(name):
            path.unlink()
    return photos


@pytest.mark.parametrize("cache", [True, False])
def test_skipping_trains_on_the_others(photos: Path, cache: bool, capsys: pytest.CaptureFixture[str]) -> None:
    options = {} if cache else {"cache": None}
    run = train(config(photos, on_bad_image="skip", **options))
    told = capsys.readouterr().err
    assert "8 of 44 images cannot be read" in told
    assert "going on without them" in told
    assert json.loads((run / "evaluation.json").read_bytes())["count"] == 12
    assert "12 test images" in told
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0  # as it was trained
    assert "4 of 16 images cannot be read" in capsys.readouterr().err


def test_the_cache_of_what_is_left_is_that_of_the_sound_files(photos: Path) -> None:
    cache, preprocessing = photos.parent / "cache", Preprocessing(24, 20)
    data = read_data(str(photos))
    splits = training_splits(data)
    left, told = readable_splits(splits, data.classes, preprocessing, "skip", cache=cache)
    assert told is not None
    assert told.startswith("8 of 44 images")
    pixels = decoded(left["train"], preprocessing, cache).clone()
    expected = np.stack([preprocessing.pixels(left["train"].load(i)) for i in range(len(left["train"]))])
    assert torch.equal(pixels, torch.from_numpy(expected))
    again = [path for path in photos.rglob("text.png") if "train" in str(path)]
    Image.new("RGB", (30, 30), "red").save(again[0])  # repaired
    data = read_data(str(photos))
    left, told = readable_splits(training_splits(data), data.classes, preprocessing, "skip", cache=cache)
    assert told is not None
    assert told.startswith("7 of 44 images")
    whole = [left[split].name(i) for split in ("train", "val") for i in range(len(left[split]))]
    assert str(again[0].relative_to(photos)) in whole
    for split in ("train", "val"):
        assert len(decoded(left[split], preprocessing, cache)) == len(left[split])


def test_sound_images_are_decoded_once(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_bad(photos)
    loaded: list[Path] = []
    real = samples_module.load_image

    def counting(path: Path) -> Image.Image:
        loaded.append(path)
        return real(path)

    monkeypatch.setattr(samples_module, "load_image", counting)
    data = read_data(str(photos))
    splits, preprocessing, cache = training_splits(data), Preprocessing(24, 20), photos.parent / "cache"
    for expected in (36, 0):
        left, told = readable_splits(splits, data.classes, preprocessing, cache=cache)
        assert told is None
        assert left == splits
        for split in ("train", "val"):
            decoded(left[split], preprocessing, cache)
        assert len(loaded) == expected
        loaded.clear()


def test_bad_images_that_are_known_are_looked_at_again_alone(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read_data(str(photos))
    splits, preprocessing, cache = training_splits(data), Preprocessing(24, 20), photos.parent / "cache"
    left, _ = readable_splits(splits, data.classes, preprocessing, "skip", cache=cache)
    loaded: list[str] = []
    real = samples_module.load_image

    def counting(path: Path) -> Image.Image:
        loaded.append(path.name)
        return real(path)

    monkeypatch.setattr(samples_module, "load_image", counting)
    assert readable_splits(splits, data.classes, preprocessing, "skip", cache=cache)[0] == left
    assert sorted(loaded) == sorted([*BAD, *BAD])


def test_a_class_that_loses_all_of_its_images_is_an_error(photos: Path) -> None:
    without_bad(photos)
    lost = sorted((photos / "train").iterdir())[1]
    for path in lost.iterdir():
        path.write_bytes(b"")
    with pytest.raises(SemaugError, match=rf"no training image can be read of '{lost.name}'.*images cannot be read"):
        train(config(photos, on_bad_image="skip"))


def test_a_split_that_loses_all_of_its_images_is_an_error(photos: Path) -> None:
    without_bad(photos)
    for path in (photos / "test").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(SemaugError, match="no image of the split test can be read"):
        train(config(photos, on_bad_image="skip"))


def test_images_that_vanish_are_bad_images(photos: Path) -> None:
    without_bad(photos)
    data = read_data(str(photos))
    next((photos / "test").rglob("*.png")).unlink()
    with pytest.raises(SemaugError, match=r"1 of 36 images cannot be read: test/.* \(there is no such file\)"):
        readable_splits(training_splits(data), data.classes, Preprocessing(24, 20), cache=photos.parent / "cache")


def test_data_check_lists_every_bad_image(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(photos), "--workers", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  ! 8 images are unreadable") for line in lines)
    for split in ("train", "test"):
        for name, reason in BAD.items():
            assert any(line.startswith(f"    {split}/") and f"/{name}: " in line and reason in line for line in lines)


def test_data_check_names_a_single_bad_image_once(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_bad(photos)
    bad = next((photos / "test").rglob("*.png"))
    bad.write_bytes(b"")
    assert main(["data", "check", str(photos), "--workers", "0"]) == 0
    output = capsys.readouterr().out
    assert "  ! 1 image is unreadable" in output
    assert output.count(bad.name) == 1


def test_predict_goes_on_with_the_others_and_reports_the_bad_ones(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(config(photos, on_bad_image="skip"))
    capsys.readouterr()
    assert (
        main(["predict", str(run), str(photos / "test"), "--output", str(tmp_path / "out.jsonl"), "--format", "jsonl"])
        == 0
    )
    assert "16 images, 4 could not be read" in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    errors = {Path(row["path"]).name: row["error"] for row in rows if row["error"]}
    assert errors.keys() == BAD.keys()
    assert all(BAD[name] in error for name, error in errors.items())
    assert all(row["predictions"] for row in rows if not row["error"])
