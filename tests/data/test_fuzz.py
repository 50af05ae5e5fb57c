"""Damaged images, annotations, tables and shards, and odd folders end in one sentence, never in a crash."""

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import loadmat, savemat

import replicas
from fuzzing import examples, mutated, odd_json, outcome
from replicas import put, put_image
from semaug.data.cache import cache_file, decoded
from semaug.data.images import Preprocessing
from semaug.data.readers import read_data
from semaug.data.samples import embedded_birds, load_image
from semaug.data.shards import write_shards
from semaug.report.figures.groups import table_groups

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore::DeprecationWarning")

# ----------------------------------------------------------------------------------------------------------- images


def encoded(mode: str, kind: str, **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (24, 31, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    image = Image.fromarray(noise[..., 0].astype(np.uint16) * 250) if mode == "I;16" else image.convert(mode)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (31, 24), "red")]}
IMAGES = {
    "jpeg": encoded("RGB", "JPEG", exif=EXIF),
    "progressive": encoded("RGB", "JPEG", progressive=True),
    "cmyk": encoded("CMYK", "JPEG"),
    "png": encoded("RGB", "PNG"),
    "png-16": encoded("I;16", "PNG"),
    "png-palette": encoded("P", "PNG", transparency=bytes(range(256))),
    "gif": encoded("RGB", "GIF", **FRAMES),
    "webp": encoded("RGBA", "WEBP", exif=EXIF),
    "tiff": encoded("RGB", "TIFF"),
    "tiff-lzw": encoded("RGBA", "TIFF", compression="tiff_lzw"),
    "tiff-deflate": encoded("I;16", "TIFF", compression="tiff_adobe_deflate"),
    "bmp": encoded("RGB", "BMP"),
    "ppm": encoded("RGB", "PPM"),
}


def is_read_or_refused(path: Path) -> None:
    image, sentence = outcome(load_image, path)
    if image is None:
        assert sentence.startswith("cannot read the image")
        assert "\n" not in sentence
    else:
        assert Preprocessing(8, 8).pixels(image).shape == (8, 8, 3)


@pytest.mark.parametrize("kind", IMAGES)
@examples(60)
@given(data=st.data())
def test_damaged_images_are_read_or_refused(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    is_read_or_refused(put(tmp_path / "a.jpg", data.draw(mutated(IMAGES[kind], near=120))))


@examples(150)
@given(start=st.sampled_from([b"", *(content[:8] for content in IMAGES.values())]), rest=st.binary(max_size=300))
def test_bytes_are_read_or_refused(tmp_path: Path, start: bytes, rest: bytes) -> None:
    is_read_or_refused(put(tmp_path / "a.png", start + rest))


# ----------------------------------------------------------------------------------------------------- annotations


def is_data_or_refused(path: Path) -> None:
    data, sentence = outcome(read_data, str(path))
    assert "\n" not in sentence
    if data is not None:
        assert all(0 <= label < len(data.classes) for samples in data.splits.values() for label in samples.labels)


def compressed_cars(folder: Path) -> Path:
    """As MATLAB 7 writes: every variable is compressed."""
    replicas.cars_single(folder)
    content = loadmat(folder / "cars_annos.mat")
    content = {key: value for key, value in content.items() if not key.startswith("__")}
    savemat(folder / "cars_annos.mat", content, do_compression=True)
    return folder


MATLAB_FILES = [
    (replicas.cars_devkit, "devkit/cars_meta.mat"),
    (replicas.cars_devkit, "devkit/cars_train_annos.mat"),
    (replicas.cars_devkit, "cars_test_annos_withlabels.mat"),
    (compressed_cars, "cars_annos.mat"),
]


@pytest.mark.parametrize(("build", "name"), MATLAB_FILES)
@examples(80)
@given(data=st.data())
def test_damaged_matlab_files(tmp_path: Path, build: Callable[[Path], Path], name: str, data: st.DataObject) -> None:
    folder, kept = tmp_path / "set", tmp_path / "kept"
    if not folder.exists():
        build(folder)
        assert read_data(str(folder)).name == "cars"
        shutil.copy(folder / name, kept)
    put(folder / name, data.draw(mutated(kept.read_bytes(), near=600)))
    is_data_or_refused(folder)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "shards"
    write_shards(embedded_birds(2, 3, 2, size=32), folder, per_shard=4)
    return folder


def are_shards_or_refused(folder: Path) -> None:
    data, _ = outcome(read_data, str(folder))
    for samples in data.splits.values() if data is not None else ():
        for i in range(len(samples)):
            outcome(samples.load, i)
            outcome(samples.name, i)


@pytest.mark.parametrize("name", ["shards.json", "train-000000.npy"])
@examples(100)
@given(data=st.data())
def test_damaged_descriptions_of_shards(packed: Path, name: str, data: st.DataObject) -> None:
    original = (packed / name).read_bytes()
    damaged = odd_json(json.loads(original)) if name == "shards.json" else mutated(original, near=130)
    try:
        put(packed / name, data.draw(damaged))
        are_shards_or_refused(packed)
    finally:
        put(packed / name, original)


@examples(60)
@given(data=st.data())
def test_damaged_caches_of_decoded_images(tmp_path: Path, data: st.DataObject) -> None:
    samples, preprocessing = embedded_birds(2, 2, 2, size=32).splits["train"], Preprocessing(8, 8)
    file = cache_file(samples, preprocessing, tmp_path)
    if not file.exists():
        decoded(samples, preprocessing, tmp_path)
        shutil.copy(file, tmp_path / "kept")
    put(file, data.draw(mutated((tmp_path / "kept").read_bytes(), near=130)))
    pixels = decoded(samples, preprocessing, tmp_path)
    assert (pixels == decoded(samples, preprocessing, None)).all(), "decoded again"


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("parquet")
    names = [f"{i}.jpg" for i in range(6)]
    for i, name in enumerate(names):
        put_image(folder / name, i)
    columns = {"image": names, "label": ["crow", "jay", "rook"] * 2, "split": ["train"] * 3 + ["test"] * 3}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
    assert len(read_data(str(folder / "t.parquet")).classes) == 3
    return folder


@examples(150)
@given(data=st.data())
def test_damaged_parquet_files(parquet: Path, data: st.DataObject) -> None:
    content = (parquet / "t.parquet").read_bytes()
    is_data_or_refused(put(parquet / "damaged.parquet", data.draw(mutated(content))))


@examples(60)
@given(
    image=st.lists(st.one_of(st.none(), st.text(max_size=5), st.just("1.jpg")), min_size=3, max_size=3),
    label=st.one_of(
        st.lists(st.one_of(st.none(), st.text(max_size=4)), min_size=3, max_size=3),
        st.lists(st.integers(-(2**40), 2**40), min_size=3, max_size=3),
        st.lists(st.floats(), min_size=3, max_size=3),
        st.lists(st.binary(max_size=3), min_size=3, max_size=3),
    ),
)
def test_parquet_files_with_other_content(parquet: Path, image: list[Any], label: list[Any]) -> None:
    import pyarrow.parquet

    table = pyarrow.table({"path": pyarrow.array(image, pyarrow.string()), "label": label})
    pyarrow.parquet.write_table(table, parquet / "other.parquet")
    is_data_or_refused(parquet / "other.parquet")


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)
ODD_NAMES = st.one_of(
    NAMES, st.sampled_from(["n01440764", "train", "val", "test", "TRAIN", "devkit", "data", "images"])
)


@examples(120)
@given(tree=st.lists(st.tuples(ODD_NAMES, ODD_NAMES, NAMES), max_size=5))
def test_folders_of_any_names(tree: list[tuple[str, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for split, class_name, name in tree:
            try:
                put(Path(folder) / split / class_name / f"{name}.jpg", replicas.picture(1))
            except OSError:  # a file where a folder is asked for
                continue
        is_data_or_refused(Path(folder))


FILE_NAMES = st.one_of(
    NAMES,
    st.binary(min_size=1, max_size=8).filter(lambda name: not {*b"/\0"} & {*name}).map(os.fsdecode),  # rarely UTF-8
    st.sampled_from(
        [*replicas.WNIDS, "n01443537 ", "n99999999", "N01440764", "n0144076", "n０1440764", "TRAIN", "Val"]
    ),
    st.sampled_from(["train", "val", "test", "valid", ".hidden", "__MACOSX", "-", "~", "$HOME", "a" * 200, "devkit"]),
).filter(lambda name: name not in (".", ".."))
PLACES = st.sampled_from(
    ["", "train", "val", *(f"{split}/{wnid}" for split in ("train", "val") for wnid in replicas.WNIDS)]
)
DEEDS = {
    "image": lambda path: put(path.with_name(f"{path.name}.JPEG"), replicas.picture(1)),
    "empty file": lambda path: put(path.with_name(f"{path.name}.JPEG"), b""),
    "other file": lambda path: put(path, b"n01440764 1"),
    "class": lambda path: put(path / "1.JPEG", replicas.picture(2)),
    "empty folder": lambda path: path.mkdir(),
    "folder like an image": lambda path: path.with_name(f"{path.name}.JPEG").mkdir(),
    "link to all": lambda path: path.symlink_to(path.parent),
    "link to itself": lambda path: path.symlink_to(path),
    "dangling link": lambda path: path.with_name(f"{path.name}.JPEG").symlink_to("nowhere"),
    "link out": lambda path: path.symlink_to("/proc/self"),
    "pipe": lambda path: os.mkfifo(path.with_name(f"{path.name}.JPEG")),
    "no longer there": lambda path: shutil.rmtree(path.parent),
    "a file instead": lambda path: (shutil.rmtree(path.parent), put(path.parent, b"")),
}


@examples(200)
@given(deeds=st.lists(st.tuples(st.sampled_from(list(DEEDS)), PLACES, FILE_NAMES), min_size=1, max_size=6))
def test_imagenet_with_anything_in_it(deeds: list[tuple[str, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = replicas.imagenet(Path(root) / "imagenet")
        for deed, place, name in deeds:
            with contextlib.suppress(OSError, shutil.Error):  # there is already one, or the place is gone
                DEEDS[deed](folder / place / name)
        is_data_or_refused(folder)
        data, sentence = outcome(lambda name: read_data(name, Path(root)), "imagenet")
        assert "\n" not in sentence
        assert data is None or (data.name == "imagenet" and set(data.splits) <= {"train", "test"})


def test_imagenet_with_an_odd_file_in_every_place(tmp_path: Path) -> None:
    for place in ("", "train", "val", "train/n01440764", "val/n01440764"):
        folder = replicas.imagenet(tmp_path / f"at-{place.replace('/', '-')}")
        put(folder / place / "odd\nname.JPEG", b"")
        os.symlink(folder, folder / place / "loop")
        is_data_or_refused(folder)


@examples(150)
@given(
    content=st.one_of(st.binary(max_size=80), st.text(max_size=60).map(lambda text: f"class,group\n{text}".encode()))
)
def test_tables_of_groups(tmp_path: Path, content: bytes) -> None:
    file = put(tmp_path / "groups.csv", content)
    groups, sentence = outcome(lambda path: table_groups(path, ["a", "=b"]), file)
    assert (groups is None) == bool(sentence)
