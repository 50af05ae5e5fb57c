"""Odd images are read, and hostile ones refused."""

import io
import os
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from replicas import png_bomb, put, tiff_with_large_tiles
from semaug.data import samples as samples_module
from semaug.data.cache import decoded
from semaug.data.check import check_data
from semaug.data.images import Preprocessing
from semaug.data.readers import read_data
from semaug.data.samples import load_image
from semaug.util.errors import DataError
from semaug.util.processes import ordered_map

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


def tiff_of_grey(bits: int, photometric: int, pixels: bytes) -> bytes:
    """A TIFF file of 64×16 pixels, as cameras and microscopes write it, and Pillow does not."""
    tags = {256: 64, 257: 16, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 16, 279: len(pixels)}
    table = b"".join(struct.pack("<HHII", tag, 4 if value > 65535 else 3, 1, value) for tag, value in tags.items())
    return struct.pack("<4sI", b"II*\0", 8 + len(pixels)) + pixels + struct.pack("<H", len(tags)) + table + b"\0" * 4


def test_deep_grey_is_scaled_as_its_file_says(tmp_path: Path) -> None:
    """Also if all of it is dark, if it has 12 bits, and if 0 is white."""
    grey, white = ramp("uint16"), np.full((16, 64), 255)
    bits = np.unpackbits((grey >> 4).astype(">u2").view(np.uint8).reshape(16, 64, 2), axis=2)[..., 4:]
    dark, other = grey // 256, np.where(grey == grey[0, 9], white, grey >> 8)
    files = {
        "twelve.tif": (tiff_of_grey(12, 1, np.packbits(bits).tobytes()), grey >> 8),
        "inverted.tif": (tiff_of_grey(16, 0, (65535 - grey).astype("<u2").tobytes()), grey >> 8),
        "dark.pgm": (b"P5 64 16 65535\n" + dark.astype(">u2").tobytes(), dark >> 8),
        "twelve.pgm": (b"P5 64 16 4095\n" + (grey >> 4).astype(">u2").tobytes(), grey >> 8),
    }
    image = Image.fromarray(grey)
    saved(tmp_path / "key.png", image, transparency=int(grey[0, 9]))
    for name, (content, expected) in {**files, "key.png": ((tmp_path / "key.png").read_bytes(), other)}.items():
        shades = np.asarray(load_image(put(tmp_path / name, content)), dtype=int)
        assert np.abs(shades - expected[..., None]).max() <= 1, name


def signed_tiff(pixels: np.ndarray) -> bytes:
    content = tiff_of_grey(16, 1, pixels.astype("<i2").tobytes())
    return content.replace(struct.pack("<HHII", 277, 3, 1, 1), struct.pack("<HHII", 339, 3, 1, 2))


def test_signed_grey_is_scaled_as_its_file_says(tmp_path: Path) -> None:
    grey = ramp("uint16") // 2
    for name, pixels in {"whole.tif": grey, "dark.tif": grey // 128}.items():
        shades = np.asarray(load_image(put(tmp_path / name, signed_tiff(pixels))), dtype=int)
        assert np.abs(shades - (pixels >> 7)[..., None]).max() <= 1, name


def test_floating_grey_is_scaled_by_its_largest_value(tmp_path: Path) -> None:
    for largest in (1.01, 255, 257, 65535):
        image = Image.fromarray(ramp("float32") * np.float32(largest))
        shades = np.asarray(load_image(saved(tmp_path / f"{largest}.tif", image)), dtype=int)
        assert np.abs(shades - ramp("uint8")[..., None]).max() <= 3


@pytest.mark.parametrize(
    "grey",
    [
        ramp("float32") * 1.5,
        ramp("float32") * 1e6,
        np.full_like(ramp("float32"), np.inf),
        ramp("float32") * 2 - 1,
        (ramp("float32") * 2**30).astype("int32"),
        ramp("int32") - 100,
    ],
)
def test_grey_of_no_usual_scale_is_refused(tmp_path: Path, grey: np.ndarray) -> None:
    with pytest.raises(DataError, match="fit no usual scale; convert it to 8 bits"):
        load_image(saved(tmp_path / "a.tif", Image.fromarray(np.asarray(grey, grey.dtype))))


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
def test_transparent_pixels_become_white(tmp_path: Path, mode: str, suffix: str) -> None:
    image, options = transparent(mode)
    if suffix == "gif":
        options = {"transparency": 1}
    if suffix == "webp":
        options = {"lossless": True}
    loaded = load_image(saved(tmp_path / f"a.{suffix}", image, **options))
    assert loaded.getpixel((2, 4)) == (255, 0, 0)
    assert loaded.getpixel((13, 4)) == (255, 255, 255)


def png(bits: int, colour_type: int, width: int, row: bytes, transparent: bytes) -> bytes:
    """A PNG file of one row in a depth that Pillow does not write, with a transparent shade or colour."""
    header = struct.pack(">IIBBBBB", width, 1, bits, colour_type, 0, 0, 0)
    parts = {b"IHDR": header, b"tRNS": transparent, b"IDAT": zlib.compress(b"\0" + row), b"IEND": b""}
    chunks = (
        struct.pack(">I", len(part)) + k + part + struct.pack(">I", zlib.crc32(k + part)) for k, part in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_the_transparent_colour_of_a_png_has_the_depth_of_its_pixels(tmp_path: Path) -> None:
    colours = struct.pack(">9H", 0x1200, 0x3400, 0x5600, 0, 0, 0, 0x7777, 0x8888, 0x9999)
    files = {
        png(2, 0, 4, b"\x1b", b"\0\1"): [(0,) * 3, (255,) * 3, (170,) * 3, (255,) * 3],  # shades 0, 1, 2, 3
        png(4, 0, 4, b"\x06\x7e", b"\0\6"): [(0,) * 3, (255,) * 3, (119,) * 3, (238,) * 3],
        png(16, 2, 3, colours, colours[:6]): [(255,) * 3, (0,) * 3, (0x77, 0x88, 0x99)],
    }
    for content, expected in files.items():
        pixels = np.asarray(load_image(put(tmp_path / "a.png", content)))
        assert list(map(tuple, pixels[0].tolist())) == expected


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_the_first_frame_of_an_animation_is_used(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (12, 12), colour) for colour in ("red", "lime", "blue")]
    path = saved(tmp_path / f"a.{suffix}", frames[0], save_all=True, append_images=frames[1:])
    red, green, blue = load_image(path).getpixel((6, 6))  # type: ignore[misc]
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright(tmp_path: Path, orientation: int) -> None:
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
    loaded = load_image(saved(tmp_path / "a.jpg", turned, exif=exif, quality=95))
    assert loaded.size == (40, 20)
    assert min(loaded.getpixel((4, 4))) > 240  # type: ignore[arg-type, type-var]
    assert max(loaded.getpixel((35, 15))) < 15  # type: ignore[arg-type, type-var]


def test_damaged_exif_data_are_ignored(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", Image.new("RGB", (10, 10)), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40)
    assert load_image(path).size == (10, 10)


@pytest.mark.parametrize("shape", ["squash", "aspect"])
@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (5000, 2)])
def test_tiny_and_thin_images_are_used(tmp_path: Path, shape: Any, size: tuple[int, int]) -> None:
    image = load_image(saved(tmp_path / "a.png", Image.new("RGB", size, (9, 8, 7))))
    pixels = Preprocessing(20, 16, shape).pixels(image)
    assert pixels.shape == (20, 20, 3)
    assert (pixels == (9, 8, 7)).all()


def test_the_format_is_recognised_by_the_content(tmp_path: Path) -> None:
    for kind in ("PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM"):
        path = saved(tmp_path / f"{kind}.jpg", Image.new("RGB", (9, 7), "red"), format=kind)
        assert load_image(path).size == (9, 7)


@pytest.mark.parametrize(
    "name", ["a b.png", "two\nlines.png", "bird \u00fc\u9ce5\U0001f426.png", "'quo\"te.png", "-x.png"]
)
def test_files_and_classes_may_have_any_name(tmp_path: Path, name: str) -> None:
    for folder in ("one", name[:-4]):
        saved(tmp_path / "set" / folder / name, Image.new("RGB", (8, 8), "red"))
    data = read_data(str(tmp_path / "set"))
    assert {data.splits["train"].name(i) for i in range(2)} == {f"one/{name}", f"{name[:-4]}/{name}"}
    assert decoded(data.splits["train"], Preprocessing(8, 8), tmp_path / "cache").shape == (2, 8, 8, 3)
    broken = tmp_path / "set" / "one" / name
    broken.write_bytes(b"")
    (item,) = check_data(data).unreadable
    assert item.image.name == f"one/{name}"
    with pytest.raises(DataError) as caught:
        load_image(broken)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------- hostile ones


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


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bombs")
    for name, content in BOMBS.items():
        put(folder / name, content())
        assert (folder / name).stat().st_size < 1_000_000
    saved(folder / "sound.png", Image.new("RGB", (8, 8)))
    return folder


def refusal_and_growth(path: Path) -> tuple[str, int]:
    """The message with which an image is refused, and by how many KiB the process has grown at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load_image(path)
    except DataError as error:
        return str(error), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return "", 0


def test_bombs_are_refused_before_memory_is_taken(bombs: Path) -> None:
    paths = [bombs / "sound.png", *(bombs / name for name in BOMBS)]
    # in a forked process, whose peak begins at what it has now
    (sound, _), *results = ordered_map(refusal_and_growth, paths, 1)
    assert sound == ""
    for path, (message, grown) in zip(paths[1:], results, strict=True):
        assert message.startswith("cannot read the image"), path.name
        assert "it has more than 178956970 pixels" in message, (path.name, message)
        assert grown < 30_000, path.name  # the smallest of these images would take 256 MB


def test_the_limit_holds_if_a_program_has_lifted_that_of_pillow(bombs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(DataError, match="more than 178956970 pixels"):
        load_image(bombs / "20000.png")


def jpeg_with_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG whose scans of a few bytes each go through all blocks: "no more coefficients from here on"."""
    blocks = (side // 8) ** 2
    runs = "".join("0" + "1" * 14 for _ in range(blocks // 32767 + 1))  # of 32767 blocks
    data = int(runs.ljust(-(-len(runs) // 8) * 8, "1"), 2).to_bytes(-(-len(runs) // 8)).replace(b"\xff", b"\xff\0")
    tables = b"".join(
        b"\xff\xc4" + struct.pack(">HB", 20, kind) + bytes([1, *[0] * 15, value])
        for kind, value in ((0, 0), (0x10, 0xE0))
    )
    head = b"\xff\xd8\xff\xdb" + struct.pack(">HB", 67, 0) + b"\1" * 64
    head += b"\xff\xc2" + struct.pack(">HBHHB", 11, 8, side, side, 1) + b"\1\x11\0" + tables
    first = b"\xff\xda" + struct.pack(">HB", 8, 1) + b"\1\0\0\0\0" + bytes(-(-blocks // 8))
    return head + first + scans * (b"\xff\xda" + struct.pack(">HB", 8, 1) + b"\1\0\1\1\0" + data) + b"\xff\xd9"


def long_bitmap() -> bytes:
    """A run-length encoded bitmap of one row, whose resizing would take 3 GB."""
    header = struct.pack("<IHHIIiiHHIIiiII", 1084, 0, 0, 1078, 40, 170_000_000, 1, 1, 8, 1, 6, 0, 0, 256, 0)
    return b"BM" + header + bytes(1024) + b"\1\1\0\0\0\1"


SLOW_OR_LARGE = {
    "13000.png": (lambda: png_bomb(13_000), "pixels in [0-9]+ bytes, like a decompression bomb"),
    "long.bmp": (long_bitmap, "a side of more than 1000000 pixels"),
    "scans.jpg": (lambda: jpeg_with_scans(4000, 2000), "too many scans"),
    "comments.ppm": (lambda: b"P3 500 500 255\n" + b"#\n" * 400_000, "more than 1000 comments"),
}


@pytest.mark.parametrize("name", SLOW_OR_LARGE)
def test_files_below_1_mb_do_not_take_gigabytes_or_minutes(tmp_path: Path, name: str) -> None:
    make, reason = SLOW_OR_LARGE[name]
    path = put(tmp_path / name, make())
    assert path.stat().st_size < 1_000_000
    with pytest.raises(DataError, match=reason):
        load_image(path)


def test_a_jpeg_of_many_scans_that_is_small_is_used(tmp_path: Path) -> None:
    assert load_image(put(tmp_path / "scans.jpg", jpeg_with_scans(64, 200))).size == (64, 64)


@pytest.mark.parametrize("kind", ["RGBA", "P", "LA", "float32", "int32", "uint16"])
def test_strips_give_the_same_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    random = np.random.default_rng(0)
    if kind in ("RGBA", "P", "LA"):
        colours = Image.fromarray(random.integers(0, 255, (37, 51, 4), "uint8"))
        image = colours.convert("RGB").quantize(20) if kind == "P" else colours.convert(kind)
    else:
        image = Image.fromarray((random.random((37, 51)) * 50_000).astype(kind))
    path = saved(tmp_path / ("a.tif" if kind in ("float32", "int32") else "a.png"), image)
    whole = load_image(path)
    monkeypatch.setattr(samples_module, "_STRIP_PIXELS", 200)
    assert load_image(path).tobytes() == whole.tobytes()


def test_an_image_below_the_limit_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "large.png", png_bomb(1600))
    assert load_image(path).size == (1600, 1600)
    monkeypatch.setattr(samples_module, "MAX_PIXELS", 1600 * 1600 - 1)
    with pytest.raises(DataError, match="more than 2559999 pixels"):
        load_image(path)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(%s) (w) file closefile\nshowpage\n%%%%EOF\n"


def test_postscript_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ghostscript = put(tmp_path / "bin" / "gs", f"#!/bin/sh\ntouch {tmp_path}/started\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ghostscript.parent}:{os.environ['PATH']}")
    path = put(tmp_path / "photo.jpg", EPS)
    with pytest.raises(DataError, match="not an image of a known format"):
        load_image(path)
    assert not (tmp_path / "started").exists()
    with Image.open(path) as image, pytest.raises(OSError):  # noqa: PT011
        image.load()
    assert (tmp_path / "started").exists()  # Pillow by default runs it


def test_other_files_are_refused_with_a_reason(tmp_path: Path) -> None:
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
        with pytest.raises(DataError, match=rf"^cannot read the image .*{name}: .*{reason}"):
            load_image(put(tmp_path / name, content))
    with open(tmp_path / "sparse.jpg", "wb") as sparse:
        sparse.truncate(20 * 2**30)
    for name, reason in (
        ("pipe.jpg", "not a regular file"),
        ("none.jpg", "No such file"),
        (".", "not a regular file"),
        ("sparse.jpg", "it has more than 1073741824 bytes"),
        ("x" * 300, "name too long"),
    ):
        with pytest.raises(DataError, match=reason):
            load_image(tmp_path / name)
