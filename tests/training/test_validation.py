"""Validation: how often, in which batches, and what depends on it."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import OPTIONS
from photos import quick_config
from semaug.cli.main import main
from semaug.inference.runs import read_metrics
from semaug.training.batches import PixelLoader
from semaug.training.trainer import Trainer, train
from semaug.util.errors import SettingError
from semaug.util.untrusted import read_json


def validated(run: Path) -> list[int]:
    return [row["epoch"] for row in read_metrics(run) if "val_top1" in row]


def test_validation_every_second_epoch_and_after_the_last(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = ["train", "--data", str(photos), *OPTIONS, "--epochs", "5", "--validate-every", "2"]
    assert main([*command, "--track", "tensorboard", "--output", str(run)]) == 0
    assert validated(run) == [2, 4, 5]
    rows = read_metrics(run)
    assert all(("val_loss" in row) == ("val_top1" in row) for row in rows)
    assert all(row["validation_seconds"] >= 0 and row["saving_seconds"] >= 0 for row in rows)
    assert all(row["seconds"] >= row["validation_seconds"] + row["saving_seconds"] for row in rows)
    assert read_json(run / "evaluation.json")["best_epoch"] in (2, 4, 5)
    with open(run / "metrics.csv", newline="") as file:
        assert [row["val_top1"] == "" for row in csv.DictReader(file)] == [True, False, True, False, False]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch ")]
    assert [" val " in line for line in lines] == [False, True, False, True, True]
    assert "Validation accuracy" in (run / "report.html").read_text()


def test_patience_counts_from_epochs_that_are_validated(photos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "isda", "epochs": 30, "patience": 1, "lr": 1e-9, "validate_every": 3}
    run = train(quick_config(photos, tmp_path / "run", **options))
    epochs = [row["epoch"] for row in read_metrics(run)]
    assert epochs[-1] == 6, "the second validation is no better"
    assert validated(run) == [3, 6]


def test_how_often_is_at_least_every_epoch(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="`validate_every` must be from 1 to 1000000, not 0"):
        train(quick_config(photos, tmp_path / "run", validate_every=0))


def test_the_size_of_validation_batches_changes_nothing_beyond_rounding(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = read_metrics(train(quick_config(photos, tmp_path / "small")))
    monkeypatch.setattr(Trainer, "_validation_batch", lambda self: 256)
    large = read_metrics(train(quick_config(photos, tmp_path / "large")))
    for one, other in zip(small, large, strict=True):
        assert one["val_top1"] == other["val_top1"]
        assert one["val_loss"] == pytest.approx(other["val_loss"], abs=1e-5)


def test_pixels_of_decoded_images_are_those_asked_for() -> None:
    preprocessing = quick_config(Path(), Path()).resolve().preprocessing
    images = torch.arange(5 * 40 * 40 * 3).remainder(251).byte().view(5, 40, 40, 3)
    loader = PixelLoader(preprocessing, torch.device("cpu"), 0)
    parts = [torch.tensor([4, 1]), torch.tensor([0])]
    for part, pixels in zip(parts, loader.load(images, parts), strict=True):
        assert torch.equal(pixels, images[part])
