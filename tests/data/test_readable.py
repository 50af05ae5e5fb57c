"""Images that cannot be read are reported before training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from photos import photo_folder
from replicas import png_bomb, put
from semaug.cli.main import main
from semaug.data import samples as samples_module
from semaug.data.cache import decoded
from semaug.data.check import check_data
from semaug.data.images import Preprocessing
from semaug.data.readable import readable_splits
from semaug.data.readers import read_data, training_splits
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import DataError

BAD = {"cut.png": "truncated", "empty.png": "the file is empty", "text.png": "not an image", "bomb.png": "pixels"}


def photos_with_bad_ones(root: Path) -> Path:
    """Sound photos of three classes, and bad ones in every split."""
    folder = photo_folder(root / "photos")
    for split in ("train", "test"):
        first = sorted((folder / split).iterdir())[0]
        content = next(first.iterdir()).read_bytes()
        put(first / "cut.png", content[: len(content) // 2])
        put(first / "empty.png", "")
        put(first / "text.png", "hello")
        put(first / "bomb.png", png_bomb(20_000))
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return photos_with_bad_ones(tmp_path)


def config(photos: Path, **options: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": "small", "pretrained": False, "epochs": 1, "resize": 24, "crop": 20, "batch_size": 8,
        "method": "basic", "workers": 0, "cache": photos.parent / "cache", "output": photos.parent / "run",
    }  # fmt: skip
    return TrainConfig(data=str(photos), **(settings | options))


@pytest.mark.parametrize(("cache", "workers"), [(True, 2), (False, 0)])
def test_training_stops_before_it_starts_and_lists_all_bad_images(photos: Path, cache: bool, workers: int) -> None:
    options = {} if cache else {"cache": None}
    with pytest.raises(DataError) as caught:
        train(config(photos, workers=workers, **options))
    sentence = str(caught.value)
    assert sentence.startswith("8 of 44 images cannot be read: train/")
    assert sentence.endswith("; repair or remove them, or set `on_bad_image` to skip to continue without them")
    assert " and 5 more, all listed in " in sentence
    assert "\n" not in sentence
    run = photos.parent / "run"
    listed = {entry["image"]: entry["reason"] for entry in json.loads((run / "bad_images.json").read_bytes())}
    assert sorted(Path(name).name for name in listed) == sorted([*BAD, *BAD])
    assert all(BAD[Path(name).name] in reason for name, reason in listed.items())
    assert not (run / "metrics.jsonl").exists()
    assert not (run / "checkpoints").exists()
    checked = {item.image.name: item.reason for item in check_data(read_data(str(photos))).unreadable}
    assert checked == listed


def without_bad(photos: Path) -> Path:
    for name in BAD:
        for path in photos.rglob(name):
            path.unlink()
    return photos


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with bad images, and a run that skipped them."""
    photos = photos_with_bad_ones(tmp_path_factory.mktemp("skipped"))
    return photos, train(config(photos, on_bad_image="skip"))


def test_skipping_trains_on_the_others(skipped: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, run = skipped
    assert json.loads((run / "evaluation.json").read_bytes())["count"] == 12
    assert len(json.loads((run / "bad_images.json").read_bytes())) == 8
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0  # it skips as in training
    assert "4 of 16 images cannot be read" in capsys.readouterr().err


def test_skipping_without_a_cache_says_so(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(photos, on_bad_image="skip", cache=None))
    messages = capsys.readouterr().err
    assert "8 of 44 images cannot be read" in messages
    assert "continuing without them" in messages
    assert "12 test images" in messages


def test_the_cache_of_what_is_left_is_that_of_the_sound_files(photos: Path) -> None:
    cache, preprocessing = photos.parent / "cache", Preprocessing(24, 20)
    data = read_data(str(photos))
    splits = training_splits(data)
    left, message = readable_splits(splits, data.classes, preprocessing, "skip", cache=cache)
    assert message is not None
    assert message.startswith("8 of 44 images")
    pixels = decoded(left["train"], preprocessing, cache).clone()
    expected = np.stack([preprocessing.pixels(left["train"].load(i)) for i in range(len(left["train"]))])
    assert torch.equal(pixels, torch.from_numpy(expected))
    again = [path for path in photos.rglob("text.png") if "train" in str(path)]
    Image.new("RGB", (30, 30), "red").save(again[0])  # repaired
    data = read_data(str(photos))
    left, message = readable_splits(training_splits(data), data.classes, preprocessing, "skip", cache=cache)
    assert message is not None
    assert message.startswith("7 of 44 images")
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
        left, message = readable_splits(splits, data.classes, preprocessing, cache=cache)
        assert message is None
        assert left == splits
        for split in ("train", "val"):
            decoded(left[split], preprocessing, cache)
        assert len(loaded) == expected
        loaded.clear()


def test_images_known_to_be_bad_are_the_only_ones_tried_again(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(
        DataError, match=rf"no training image can be read of '{lost.name.replace('_', ' ')}'.*images cannot be read"
    ):
        train(config(photos, on_bad_image="skip"))


def test_a_split_that_loses_all_of_its_images_is_an_error(photos: Path) -> None:
    without_bad(photos)
    for path in (photos / "test").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no image of the split test can be read"):
        train(config(photos, on_bad_image="skip"))


def test_images_that_vanish_are_bad_images(photos: Path) -> None:
    without_bad(photos)
    data = read_data(str(photos))
    next((photos / "test").rglob("*.png")).unlink()
    with pytest.raises(DataError, match=r"1 of 36 images cannot be read: test/.* \(No such file or directory\)"):
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


def test_predict_reports_bad_images_and_continues(
    skipped: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, run = skipped
    output = tmp_path / "out.jsonl"
    assert main(["predict", str(run), str(photos / "test"), "--output", str(output), "--format", "jsonl"]) == 0
    assert "16 images, 4 could not be read" in capsys.readouterr().err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    errors = {Path(row["path"]).name: row["error"] for row in rows if row["error"]}
    assert errors.keys() == BAD.keys()
    assert all(BAD[name] in error for name, error in errors.items())
    assert all(row["predictions"] for row in rows if not row["error"])
