"""Runs logged by the real TensorBoard and the real W&B (offline)."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from photos import quick_config
from semaug.inference.runs import read_metrics
from semaug.training.settings import TrainConfig
from semaug.training.tracking import make_tracker
from semaug.training.trainer import train
from semaug.util import progress
from semaug.util.errors import MissingPackageError, SemaugError
from semaug.util.untrusted import read_json


def interrupt(settings: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until the second epoch has been saved."""

    def stop_after_two(self: progress.Progress, row: dict[str, Any], epochs: int) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "epoch", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            train(settings)


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_each_epoch_of_a_resumed_run_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = quick_config(photos, tmp_path / "run", track="tensorboard")
    interrupt(settings, monkeypatch)
    run = train(settings)
    logged, rows = scalars(run), read_metrics(run)
    assert "epoch" not in logged
    for name in ("val_top1", "train_loss", "strength"):
        assert logged[name] == [(row["epoch"], pytest.approx(row[name])) for row in rows]
    evaluation = read_json(run / "evaluation.json")
    assert logged["evaluation/test_top1"] == [(evaluation["best_epoch"], pytest.approx(evaluation["top1"]))]
    files = [file.read_bytes() for file in (run / "tensorboard").iterdir()]
    assert len(files) == 2
    assert any(b'"learnable"' in content for content in files), "the settings are logged"


def test_tensorboard_discards_an_epoch_that_was_logged_and_not_saved(tmp_path: Path) -> None:
    for done, values in ((0, {1: 0.1, 2: 0.2}), (1, {2: 0.3, 3: 0.4})):
        tracker = make_tracker("tensorboard", tmp_path, {}, done)
        for epoch, value in values.items():
            tracker.log(epoch, {"val_top1": value})
        tracker.close()
    assert scalars(tmp_path)["val_top1"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.3)), (3, pytest.approx(0.4))]


def test_wandb_continues_the_same_run(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = quick_config(photos, tmp_path / "run", track="wandb")
    interrupt(settings, monkeypatch)
    run = train(settings)
    name = json.loads((run / "tracking.json").read_text())["wandb"]
    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith(f"-{name}") and list(folder.glob("*.wandb")) for folder in folders)
    for folder, name in zip(folders, (b"val_top1", b"test_mean_class_accuracy"), strict=True):
        deadline = time.monotonic() + 60  # wandb writes the file in a process of its own
        while name not in next(folder.glob("*.wandb")).read_bytes():
            assert time.monotonic() < deadline, name
            time.sleep(0.05)


def test_a_missing_package_is_an_error_before_anything_is_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semaug.training.tracking.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"`track` wandb needs a package: pip install '\.\[wandb\]'"):
        train(quick_config(photos, tmp_path / "run", track="wandb"))
    assert not (tmp_path / "run").exists()


def test_wandb_without_a_login_is_explained_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**options: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(SemaugError, match="wandb does not start \\(No API key configured\\); log in to wandb, or set"):
        make_tracker("wandb", tmp_path, {}, 0)
