"""Training on images that are decoded ahead of the step: the same run, to the bit, and every image once in an epoch."""

import json
import os
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import rank_stream
import soak
from photos import photo_folder
from rank_stream import Numbered, watched
from semaug.data import space as room
from semaug.data.images import Preprocessing
from semaug.data.readers import read_data
from semaug.data.samples import DataSet
from semaug.data.shards import write_shards
from semaug.meta.learner import LearnableAugmentation
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import SemaugError
from semaug.util.files import read_json
from semaug.util.signals import Interrupted
from several import TESTS, in_processes

IMAGES = 20_000


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 shards of 1000 images."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    splits = {"train": Numbered(IMAGES), "val": Numbered(200)}
    assert write_shards(DataSet("numbered", tuple(map(str, range(10))), dict(splits)), folder) == 21
    return folder


def test_twenty_thousand_images_are_met_once_each_however_training_is_broken_off(shards: Path, tmp_path: Path) -> None:
    whole = watched(rank_stream.config(shards, tmp_path / "whole"))
    broken = rank_stream.config(shards, tmp_path / "broken")
    first = watched(broken, stop_in=6)
    assert (len(whole), len(first)) == (20, 7)
    rest = watched(broken)
    assert first + rest == whole
    met = Counter(i for step in whole for i in step)
    assert set(met) == set(range(IMAGES))
    assert set(met.values()) == {1}
    assert soak.differences(tmp_path / "broken", tmp_path / "whole") == []


def test_two_processes_meet_each_image_once_and_go_on_to_the_same_end(shards: Path, tmp_path: Path) -> None:
    in_processes(2, TESTS / "rank_stream.py", str(shards), str(tmp_path))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        assert len(found["broken"]) == 7
        assert found["broken"] + found["rest"] == found["whole"]
        assert {len(step) for step in found["whole"]} == {500}, "each reads its half"
    met = Counter(i for found in ranks for step in found["whole"] for i in step)
    assert set(met) == set(range(IMAGES))
    assert set(met.values()) == {1}
    assert soak.differences(tmp_path / "broken", tmp_path / "whole") == []


# ---------------------------------------------------------------------------------------------- the same run to the bit


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "shards"
    write_shards(read_data(str(photos)), folder, per_shard=5)
    return folder


def config(data: Path, output: Path, **options: Any) -> TrainConfig:
    settings: dict[str, Any] = {"model": "small", "pretrained": False, "epochs": 2, "resize": 40, "crop": 32}
    settings |= {"batch_size": 4, "val_per_class": 2, "workers": 0, "cache": None, "lr": 0.02, "device": "cpu"}
    return TrainConfig(data=str(data), output=output, **{**settings, **options})


KINDS: dict[str, dict[str, Any]] = {
    "learnable": {"ema": 0.9},
    "mixup": {"method": "mixup"},
    "randaugment": {"augmentation": Augmentation(meta_images="randaugment")},
    "held-out": {"augmentation": Augmentation(meta_images="held-out", meta_share=0.2)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_trains_as_decoded_images_do(photos: Path, packed: Path, tmp_path: Path, kind: str) -> None:
    for data in (photos, packed):
        reference = train(config(data, tmp_path / data.name, cache=tmp_path / "cache", **KINDS[kind]))
        for workers in (0, 2):
            output = tmp_path / f"{data.name}-{workers}"
            run = train(config(data, output, images_on="stream", workers=workers, **KINDS[kind]))
            assert soak.differences(run, reference) == []


def test_what_is_decoded_and_what_is_kept(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr("semaug.training.trainer.decoded", lambda *_: pytest.fail("all images are decoded"))
        train(config(photos, tmp_path / "run", images_on="stream", cache=cache))
    assert not cache.exists()


@pytest.mark.parametrize("kind", ["learnable", "held-out"])
def test_a_run_goes_on_with_decoded_images_and_the_other_way_round(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole = train(config(packed, tmp_path / "whole", **KINDS[kind]))
    step, count = LearnableAugmentation.step, 0

    def asked(self: LearnableAugmentation, *inputs: Tensor) -> dict[str, Tensor]:
        nonlocal count
        count += 1
        if count in (1, 2, 3):
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *inputs)

    monkeypatch.setattr(LearnableAugmentation, "step", asked)
    for images_on in ("stream", None, "stream"):
        with pytest.raises(Interrupted):
            train(config(packed, tmp_path / "run", images_on=images_on, workers=1, **KINDS[kind]))
    assert soak.differences(train(config(packed, tmp_path / "run", **KINDS[kind])), whole) == []


# --------------------------------------------------------------------------------------------------------- what is told


def test_an_image_that_cannot_be_read_ends_training_or_is_left_out(photos: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    bad = sorted((folder / "train").rglob("*.png"))[5]
    bad.write_bytes(b"no image")
    write_shards(read_data(str(folder)), tmp_path / "shards", per_shard=5)
    for data in (folder, tmp_path / "shards"):
        streaming = config(data, tmp_path / f"{data.name}-run", images_on="stream", workers=1)
        with pytest.raises(SemaugError, match=rf"^cannot read the image \S*{bad.name}: .*`on_bad_image` to skip"):
            train(streaming)
        cache = tmp_path / f"{data.name}-cache"
        run = train(replace(streaming, on_bad_image="skip", cache=cache))
        assert [Path(row["image"]).name for row in read_json(run / "bad_images.json")] == [bad.name]
        assert not list(cache.glob("*.npy")), "no pixels are kept"
        other = train(config(data, tmp_path / f"{data.name}-decoded", on_bad_image="skip"))
        assert soak.differences(run, other) == []


def test_a_test_image_that_cannot_be_read_costs_no_training(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    images = sorted((folder / "test").rglob("*.*"))
    bad = images[1]
    bad.write_bytes(b"no image")
    steps, step = [], LearnableAugmentation.step
    monkeypatch.setattr(LearnableAugmentation, "step", lambda *inputs: steps.append(1) or step(*inputs))
    streaming = config(folder, tmp_path / "run", images_on="stream", epochs=1)
    with pytest.raises(SemaugError, match=rf"^cannot read the image \S*{bad.name}: "):
        train(streaming)
    assert len(steps) == 3
    run = train(replace(streaming, on_bad_image="skip"))
    assert len(steps) == 3, "it was trained already"
    assert read_json(run / "evaluation.json")["count"] == len(images) - 1


def test_within_an_epoch_the_images_must_stay_the_same(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    step = LearnableAugmentation.step
    with monkeypatch.context() as patch:
        patch.setattr(
            LearnableAugmentation, "step", lambda *inputs: os.kill(os.getpid(), signal.SIGTERM) or step(*inputs)
        )
        with pytest.raises(Interrupted):
            train(config(folder, tmp_path / "run", images_on="stream"))
    first, *_ = sorted((folder / "train").rglob("*.png"))
    shutil.copy(first, first.with_name("copy.png"))
    with pytest.raises(SemaugError, match="was left within an epoch of 18 training images, and now there are 19"):
        train(config(folder, tmp_path / "run", images_on="stream"))
    first.with_name("copy.png").unlink()
    train(config(folder, tmp_path / "run", images_on="stream"))


def test_images_that_do_not_fit_are_told_with_what_to_do(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = 24 * 40 * 40 * 3  # of training and validation
    cache, told = tmp_path / "new" / "cache", "the decoded images take 0.0 GB, and"
    monkeypatch.setattr(room, "_free", lambda folder: needed - 1)
    with pytest.raises(SemaugError, match=rf"^{told} .*cache has 0.0 GB left; set `images_on` to stream"):
        train(config(photos, tmp_path / "run", cache=cache))
    monkeypatch.setattr(room, "_memory", lambda: needed - 1)
    with pytest.raises(SemaugError, match=rf"^{told} memory has 0.0 GB; set `images_on` to stream"):
        train(config(photos, tmp_path / "run"))
    monkeypatch.setattr(room, "_free", lambda folder: needed)
    train(config(photos, tmp_path / "run", cache=cache, epochs=1))  # to a disk with room: a hint
    assert f"{told} memory has 0.0 GB; set `images_on` to stream" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(room, "_free", lambda folder: 0)
    train(config(photos, tmp_path / "again", cache=cache, epochs=1))  # what is in the cache needs no room
    train(config(photos, tmp_path / "stream", images_on="stream", epochs=1))
    assert room._bytes(read_data(str(photos)).splits["train"], Preprocessing(40, 32)) == needed


def test_the_room_on_a_disk_is_that_of_the_folder_that_is_there(tmp_path: Path) -> None:
    assert room._free(tmp_path / "a" / "b") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert room._memory() > 1e8
