"""Small replicas of the data sets, in the layouts in which they are distributed, and images that are bombs."""

import io
import os
import struct
import uuid
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

CUB_FOLDERS = ("001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross")
CUB_CLASSES = ("Black footed Albatross", "Laysan Albatross", "Sooty Albatross")
VARIANTS = ("707-320", "Challenger 600", "F/A-18")
CAR_CLASSES = ("AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Ram C/V Cargo Van Minivan 2012")
WNIDS = ("n01440764", "n01443537")


@cache
def picture(seed: int, kind: str = "JPEG") -> bytes:
    """The bytes of an image that differs from that of any other seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8 + seed % 3, 10, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A pipe that is there already is an error, not something to wait for.
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def put_image(path: Path, seed: int) -> Path:
    return put(path, picture(seed))


def put_lines(path: Path, lines: list[str]) -> Path:
    return put(path, "".join(f"{line}\n" for line in lines))


def cub(folder: Path, per_class: int = 4) -> Path:
    """The even images of a class are training images."""
    images, labels, split = [], [], []
    for label, name in enumerate(CUB_FOLDERS, start=1):
        for i in range(per_class):
            number = len(images) + 1
            path = f"{name}/{name[4:]}_{i:04}_{number * 7919}.jpg"
            put_image(folder / "images" / path, number)
            images.append(f"{number} {path}")
            labels.append(f"{number} {label}")
            split.append(f"{number} {(i + 1) % 2}")
    put_lines(folder / "images.txt", images)
    put_lines(folder / "image_class_labels.txt", labels)
    put_lines(folder / "train_test_split.txt", split)
    put_lines(folder / "classes.txt", [f"{label} {name}" for label, name in enumerate(CUB_FOLDERS, start=1)])
    put_lines(folder / "bounding_boxes.txt", ["1 60.0 27.0 325.0 304.0"])
    return folder


def nabirds(folder: Path) -> Path:
    """Categories that are branches (0, 1, 100, 170) have no images; a leaf may be called like its branch."""
    names = {
        0: "Birds",
        1: "Ducks, Geese, and Swans",
        100: "Common Eider",
        170: "Oak Titmouse",
        817: "Oak Titmouse",
        295: "Common Eider (Adult male)",
        296: "Common Eider (Female/juvenile)",
    }
    images, labels, split = [], [], []
    for category in (817, 295, 296):
        for i in range(3):
            image = uuid.UUID(int=category * 1000 + i, version=4)
            put_image(folder / "images" / f"{category:04}" / f"{image.hex}.jpg", category + i)
            images.append(f"{image} {category:04}/{image.hex}.jpg")
            labels.append(f"{image} {category}")
            split.append(f"{image} {int(i < 2)}")
    put_lines(folder / "images.txt", images)
    put_lines(folder / "image_class_labels.txt", labels)
    put_lines(folder / "train_test_split.txt", split)
    put_lines(folder / "classes.txt", [f"{category} {name}" for category, name in names.items()])
    put_lines(folder / "hierarchy.txt", ["1 0", "100 1", "170 0", "817 170", "295 100", "296 100"])
    return folder


def aircraft(folder: Path) -> Path:
    lists: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    number = 1025794
    for variant in VARIANTS:
        for split in ("train", "train", "val", "test", "test"):
            put_image(folder / "data" / "images" / f"{number:07}.jpg", number)
            lists[split].append(f"{number:07} {variant}")
            number += 1
    lists["trainval"] = sorted(lists["train"] + lists["val"])
    for split, lines in lists.items():
        put_lines(folder / "data" / f"images_variant_{split}.txt", lines)
        put_lines(folder / "data" / f"images_{split}.txt", [line.split()[0] for line in lines])
    put_lines(folder / "data" / "variants.txt", list(VARIANTS))
    put_lines(folder / "data" / "families.txt", ["Boeing 707", "Challenger", "F/A-18"])
    return folder


def _structs(rows: list[dict[str, object]]) -> np.ndarray:
    """A MATLAB struct array, 1 × N."""
    structs = np.empty((1, len(rows)), dtype=[(field, object) for field in rows[0]])
    for i, row in enumerate(rows):
        structs[0, i] = tuple(np.uint8(value) if isinstance(value, int) else value for value in row.values())
    return structs


def _names() -> np.ndarray:
    cells = np.empty((1, len(CAR_CLASSES)), dtype=object)
    cells[0] = CAR_CLASSES
    return cells


BOX = {"bbox_x1": 3, "bbox_y1": 4, "bbox_x2": 9, "bbox_y2": 8}


def cars_devkit(folder: Path, labels: tuple[object, ...] = (1, 2, 3, 1, 2, 3)) -> Path:
    (folder / "devkit").mkdir(parents=True)
    savemat(folder / "devkit" / "cars_meta.mat", {"class_names": _names()})
    places = {"train": folder / "devkit" / "cars_train_annos.mat", "test": folder / "cars_test_annos_withlabels.mat"}
    for offset, (split, annotations) in enumerate(places.items()):
        rows = []
        for i, label in enumerate(labels, start=1):
            put_image(folder / f"cars_{split}" / f"{i:05}.jpg", 100 * offset + i)
            rows.append({**BOX, "class": label, "fname": f"{i:05}.jpg"})
        savemat(annotations, {"annotations": _structs(rows)})
    unlabelled = _structs([{**BOX, "fname": "00001.jpg"}])
    savemat(folder / "devkit" / "cars_test_annos.mat", {"annotations": unlabelled})
    return folder


def cars_single(folder: Path, first: str = "car_ims/000001.jpg", tested: int = 1) -> Path:
    rows = []
    for i in range(1, 10):
        put_image(folder / "car_ims" / f"{i:06}.jpg", i)
        path = first if i == 1 else f"car_ims/{i:06}.jpg"
        rows.append({"relative_im_path": path, **BOX, "class": 1 + (i - 1) // 3, "test": tested * (i % 3 == 0)})
    savemat(folder / "cars_annos.mat", {"annotations": _structs(rows), "class_names": _names()})
    return folder


def image_folder(
    folder: Path,
    splits: tuple[str, ...] = ("train", "test"),
    classes: tuple[str, ...] = ("crow", "jay"),
    count: int = 3,
) -> Path:
    """SPLIT/CLASS/*.jpg; for the split "" CLASS/*.jpg."""
    seed = 0
    for split in splits:
        for name in classes:
            for i in range(count):
                seed += 1
                put_image(folder / split / name / f"{i}.jpg", seed)
    return folder


def imagenet(folder: Path) -> Path:
    for offset, (split, pattern) in enumerate(
        (("train", "{wnid}_{i}.JPEG"), ("val", "ILSVRC2012_val_0000000{i}.JPEG"))
    ):
        for wnid in WNIDS:
            for i in range(2):
                put_image(folder / split / wnid / pattern.format(wnid=wnid, i=i), 10 * offset + i + int(wnid[-1]) * 100)
    return folder


def table(path: Path, header: str = "path,label,split", rows: tuple[str, ...] | None = None) -> Path:
    """A .csv or .tsv, with four images next to it in the folder "pictures"."""
    for i in range(4):
        put_image(path.parent / "pictures" / f"{i}.png", i)
    if rows is None:
        rows = (
            "pictures/0.png,crow,train",
            "pictures/1.png,jay,train",
            "pictures/2.png,crow,val",
            "pictures/3.png,jay,Test",
        )
    lines = [header, *rows]
    return put_lines(path, [line.replace(",", "\t") for line in lines] if path.suffix == ".tsv" else lines)


def zeros(count: int) -> bytes:
    """So many zeros as zlib compresses them, made quickly: equal blocks are compressed alike."""
    block = 2**20
    blocks, rest = divmod(count, block)
    squeeze = zlib.compressobj(9)
    parts = [squeeze.compress(bytes(block)) + squeeze.flush(zlib.Z_FULL_FLUSH) for _ in range(2)]
    end = squeeze.compress(bytes(rest)) + squeeze.flush()
    checksum = (count % 65521) << 16 | 1
    return parts[0] + parts[1] * (blocks - 1) + end[:-4] + struct.pack(">I", checksum)


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@cache
def png_bomb(side: int) -> bytes:
    """A PNG file of side × side black pixels, some thousand of them to a byte."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zeros(side * (1 + -(-side // 8)))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(*chunk) for chunk in chunks)


def tiff_with_large_tiles(side: int) -> bytes:
    """A TIFF image of 16 × 16 pixels in a tile of side × side."""
    body = zeros(side * side)
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(body)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", 8 + len(body)) + body + directory
