"""Training on images that are decoded ahead of the step: the same run to the bit, and every image once in an epoch."""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rank_stream
import soak
from forks import run_ranks
from photos import quick_config
from rank_stream import IMAGES, PER_SHARD, Numbered, watched
from semaug.data.readers import read_data
from semaug.data.samples import DataSet
from semaug.data.shards import write_shards
from semaug.training.trainer import train
from semaug.util.errors import SemaugError
from semaug.util.signals import Interrupted
from semaug.util.untrusted import read_json

BeforeStep = Callable[[Callable[[int], None]], None]
KINDS: dict[str, dict[str, Any]] = {
    "learnable": {"ema": 0.9, "epochs": 2},
    "mixup": {"method": "mixup", "epochs": 2},
    "crops of random size": {"method": "isda", "crop_scale": 0.2, "epochs": 2},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 shards of numbered training images, and one for validation."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    splits = {"train": Numbered(IMAGES), "val": Numbered(200)}
    data = DataSet("numbered", tuple(map(str, range(10))), dict(splits))
    assert write_shards(data, folder, per_shard=PER_SHARD) == 21
    return folder


def test_every_image_is_used_once_in_an_epoch_also_if_training_is_interrupted(shards: Path, tmp_path: Path) -> None:
    whole = watched(rank_stream.config(shards, tmp_path / "whole"))
    settings = rank_stream.config(shards, tmp_path / "stopped")
    first = watched(settings, stop_in=6)
    assert (len(whole), len(first)) == (20, 7)
    assert first + watched(settings) == whole
    assert Counter(i for step in whole for i in step) == Counter(range(IMAGES))
    assert soak.differences(tmp_path / "stopped", tmp_path / "whole") == []


def test_two_processes_use_each_image_once_and_resume_to_the_same_end(shards: Path, tmp_path: Path) -> None:
    run_ranks(2, tmp_path, rank_stream.main, shards, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for images in ranks:
        assert len(images["stopped"]) == 7
        assert images["stopped"] + images["rest"] == images["whole"]
        assert {len(step) for step in images["whole"]} == {PER_SHARD // 2}, "each reads its half"
    assert Counter(i for images in ranks for step in images["whole"] for i in step) == Counter(range(IMAGES))
    assert soak.differences(tmp_path / "stopped", tmp_path / "whole") == []


# ---------------------------------------------------------------------------------------------- the same run to the bit


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "shards"
    write_shards(read_data(str(photos)), folder, per_shard=5)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_trains_like_decoded_images(photos: Path, packed: Path, tmp_path: Path, kind: str) -> None:
    for data in (photos, packed):
        reference = train(quick_config(data, tmp_path / data.name, cache=tmp_path / "cache", **KINDS[kind]))
        for workers in (0, 2):
            output = tmp_path / f"{data.name}-{workers}"
            run = train(quick_config(data, output, images_on="stream", workers=workers, **KINDS[kind]))
            assert soak.differences(run, reference) == []


def test_a_stream_neither_decodes_all_images_nor_fills_the_cache(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semaug.training.run_data.decoded", lambda *_: pytest.fail("all images are decoded"))
    train(quick_config(photos, tmp_path / "run", epochs=1, images_on="stream", cache=tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_run_on_a_stream_can_be_resumed_with_decoded_images_and_the_other_way_round(
    packed: Path, tmp_path: Path, before_step: BeforeStep
) -> None:
    whole = train(quick_config(packed, tmp_path / "whole", **KINDS["learnable"]))
    before_step(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step < 3 else None)
    for images_on in ("stream", None, "stream"):
        with pytest.raises(Interrupted):
            train(quick_config(packed, tmp_path / "run", images_on=images_on, workers=1, **KINDS["learnable"]))
    assert soak.differences(train(quick_config(packed, tmp_path / "run", **KINDS["learnable"])), whole) == []


# -------------------------------------------------------------------------------------------------------- the messages


def test_an_unreadable_image_ends_training_or_is_skipped(photos: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    bad = sorted((folder / "train").rglob("*.png"))[5]
    bad.write_bytes(b"no image")
    write_shards(read_data(str(folder)), tmp_path / "shards", per_shard=5)
    for data in (folder, tmp_path / "shards"):
        settings = quick_config(data, tmp_path / f"{data.name}-run", epochs=2, images_on="stream", workers=1)
        with pytest.raises(SemaugError, match=rf"^cannot read the image \S*{bad.name}: .*`on_bad_image` to skip"):
            train(settings)
        cache = tmp_path / f"{data.name}-cache"
        run = train(replace(settings, on_bad_image="skip", cache=cache))
        assert [Path(row["image"]).name for row in read_json(run / "bad_images.json")] == [bad.name]
        assert not list(cache.glob("*.npy")), "no pixels are cached"
        other = train(quick_config(data, tmp_path / f"{data.name}-decoded", epochs=2, on_bad_image="skip"))
        assert soak.differences(run, other) == []


def test_an_unreadable_test_image_costs_no_training(photos: Path, tmp_path: Path, before_step: BeforeStep) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    images = sorted((folder / "test").rglob("*.*"))
    bad = images[1]
    bad.write_bytes(b"no image")
    steps: list[int] = []
    before_step(steps.append)
    settings = quick_config(folder, tmp_path / "run", images_on="stream", epochs=1)
    with pytest.raises(SemaugError, match=rf"^cannot read the image \S*{bad.name}: "):
        train(settings)
    assert len(steps) == 3
    run = train(replace(settings, on_bad_image="skip"))
    assert len(steps) == 3, "no step is repeated"
    assert read_json(run / "evaluation.json")["count"] == len(images) - 1


def test_a_run_resumes_on_the_same_images_only(photos: Path, tmp_path: Path, before_step: BeforeStep) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    settings = quick_config(folder, tmp_path / "run", images_on="stream", epochs=1)
    before_step(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 0 else None)
    with pytest.raises(Interrupted):
        train(settings)
    first, *_ = sorted((folder / "train").rglob("*.png"))
    shutil.copy(first, first.with_name("copy.png"))
    with pytest.raises(SemaugError, match=r"the images .* are not those that the run in .* began with"):
        train(settings)
    first.with_name("copy.png").unlink()
    train(settings)


def test_images_that_do_not_fit_cause_an_error_or_a_hint(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = 24 * 40 * 40 * 3  # bytes, for training and validation
    free = {"disk": needed - 1, "memory": 10**12}
    sysconf, cache = os.sysconf, tmp_path / "new" / "cache"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free["disk"]))
    sizes = {"SC_PAGE_SIZE": lambda: 1, "SC_PHYS_PAGES": lambda: free["memory"]}
    monkeypatch.setattr(os, "sysconf", lambda name: sizes[name]() if name in sizes else sysconf(name))

    def quick(name: str, **options: Any) -> None:
        train(quick_config(photos, tmp_path / name, epochs=1, method="isda", **options))

    sentence = "the decoded images take 0.0 GB, and"
    with pytest.raises(SemaugError, match=rf"^{sentence} .*cache has 0.0 GB left; set `images_on` to stream"):
        quick("run", cache=cache)
    free["memory"] = needed - 1
    with pytest.raises(SemaugError, match=rf"^{sentence} memory has 0.0 GB; set `images_on` to stream"):
        quick("run")
    free["disk"] = needed
    quick("run", cache=cache)  # the disk is large enough: a hint
    assert f"{sentence} memory has 0.0 GB; " in " ".join(capsys.readouterr().err.split())
    free["disk"] = 0
    quick("again", cache=cache)  # what is cached needs no space, but still memory
    assert f"{sentence} memory has 0.0 GB; " in " ".join(capsys.readouterr().err.split())
    quick("stream", images_on="stream")
