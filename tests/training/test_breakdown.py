"""A run that breaks down stops with one sentence and keeps its best model; the best validation is a finite one."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import commands
from photos import quick_config
from semaug.cli.main import main
from semaug.inference.runs import read_metrics
from semaug.meta.learner import LearnableAugmentation
from semaug.training import trainer
from semaug.training.checks import breakdown
from semaug.training.trainer import train
from semaug.util.errors import TrainingError


def rows(*accuracies: float, loss: float = 1.0) -> list[dict[str, Any]]:
    return [{"train_accuracy": accuracy, "train_loss": loss} for accuracy in accuracies]


@pytest.mark.parametrize(
    ("accuracies", "classes", "images"),
    [
        ((0.6, 0.011), 200, 5994),
        ((0.02, 0.06, 0.004), 200, 5994),
        ((0.9, 0.97, 0.5), 2, 400),
        ((0.7, 0.34), 3, 300),
        ((0.3, 0.9, 0.85, 0.1), 10, 1000),
    ],
)
def test_a_fall_to_chance_is_a_breakdown(accuracies: tuple[float, ...], classes: int, images: int) -> None:
    reason = breakdown(rows(*accuracies), classes, images, 1 / classes)
    assert reason is not None
    assert f"fell from {100 * max(accuracies):.1f} % to {100 * accuracies[-1]:.1f} %, and guessing gives" in reason


@pytest.mark.parametrize(
    ("accuracies", "classes", "images", "chance"),
    [
        ((0.004,), 200, 5994, 0.005),  # has not learned yet
        ((0.01, 0.03, 0.008), 200, 5994, 0.005),  # has hardly learned
        ((0.9, 0.3), 200, 5994, 0.005),  # a bad epoch, from which training recovers
        ((0.62, 0.5), 2, 400, 0.5),
        ((0.95, 0.6), 2, 400, 0.5),
        ((0.7, 0.34), 3, 18, 1 / 3),  # may be chance on so few images
        ((1.0, 0.5), 2, 12, 0.5),
        ((0.96, 0.92), 2, 1000, 0.9),  # one class has nine tenths of the images
        ((0.5, 0.6, 0.7), 3, 300, 1 / 3),
    ],
)
def test_no_healthy_run_is_a_breakdown(accuracies: tuple[float, ...], classes: int, images: int, chance: float) -> None:
    assert breakdown(rows(*accuracies), classes, images, chance) is None


def test_an_exploded_loss_is_a_breakdown_if_it_lasts_and_nothing_is_learned() -> None:
    exploded = rows(0.004, 0.005, loss=1e16)
    assert "exploded to 1e+16" in str(breakdown(exploded, 200, 5994, 0.005))
    assert breakdown(exploded[:1], 200, 5994, 0.005) is None, "a peak in one epoch may pass"
    assert breakdown([*exploded, *rows(0.01)], 200, 5994, 0.005) is None
    assert breakdown(rows(0.1, 0.3, loss=1e16), 200, 5994, 0.005) is None, "a large strength, but training learns"
    assert breakdown(rows(0.004, 0.005, loss=50 * math.log(200)), 200, 5994, 0.005) is None


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes that differ in colour, which is learned in an epoch."""
    root, generator = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        (root / name).mkdir()
        for i in range(36):
            pixels = generator.integers(0, 80, (36, 36, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def test_a_learning_rate_far_too_large_ends_in_one_sentence_and_training_does_not_resume(
    colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = ["train", "--data", str(colours)]
    command += [*commands.OPTIONS, "--lr", "100", "--strength", "3", "--epochs", "30", "--output", str(run)]
    sentences = []
    for _ in range(2):
        assert main(command) == 2
        sentences.append(capsys.readouterr().err.strip().splitlines()[-1])
    assert sentences[0] == sentences[1]
    epochs = read_metrics(run)
    assert len(epochs) < 30
    assert sentences[0].startswith(f"semaug: training diverged in epoch {len(epochs)}: the training loss exploded to ")
    assert sentences[0].endswith("; with another --output, try a smaller --strength or a smaller --lr")
    assert f"; {run} has the model of epoch " in sentences[0]
    assert (run / "model.safetensors").exists()
    assert not (run / "evaluation.json").exists(), "the run is not complete"
    assert main(["report", str(run), "--output", str(tmp_path / "report.html")]) == 0


def test_a_network_that_forgets_everything_stops_and_its_best_model_is_kept(
    colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"resize": 36, "batch_size": 8, "val_per_class": 6, "epochs": 9, "method": "basic"}
    original, count = LearnableAugmentation.step, iter(range(1_000))

    def step(self: LearnableAugmentation, *batch: Tensor) -> dict[str, Tensor]:
        if next(count) >= 18:  # from the fourth epoch on
            for parameter in self.network.model.parameters():
                parameter.data.zero_()
        return original(self, *batch)

    settings = quick_config(colours, tmp_path / "run", lr=0.01, **options)
    monkeypatch.setattr(LearnableAugmentation, "step", step)
    message = r"diverged in epoch 4: the training accuracy fell from 9.* to 3.* has the model of epoch [123],"
    for _ in range(2):
        with pytest.raises(TrainingError, match=message) as raised:
            train(settings)
    assert "strength" not in str(raised.value), "the method has none"
    assert [row["epoch"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert next(count) == 24, "the second call has trained nothing"


def without_numbers(monkeypatch: pytest.MonkeyPatch, epochs: set[int]) -> None:
    """Make the outputs for the first image of each validation batch in these epochs, counted from 1, not a number."""
    original, count = trainer.predict_logits, iter(range(1, 1_000))

    def predict_logits(*arguments: Any, **options: Any) -> Iterator[Tensor]:
        bad = next(count) in epochs
        for logits in original(*arguments, **options):
            yield torch.cat([logits[:1] * math.nan, logits[1:]]) if bad else logits

    monkeypatch.setattr(trainer, "predict_logits", predict_logits)


def test_a_validation_that_is_not_finite_is_never_the_best(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_numbers(monkeypatch, {1, 3})
    run = train(quick_config(photos, tmp_path / "run", track="tensorboard"))
    first, second, third = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert first["val_not_finite"] == third["val_not_finite"] == 1
    assert "val_loss" not in first
    assert "val_not_finite" not in second
    assert json.loads((run / "evaluation.json").read_text())["best_epoch"] == 2
    assert "1 validation images without finite numbers" in capsys.readouterr().err


def test_without_any_finite_validation_there_is_no_best_model_and_one_sentence(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_numbers(monkeypatch, {1, 2})
    with pytest.raises(TrainingError, match="no epoch of .* gave finite numbers in validation"):
        train(quick_config(photos, tmp_path / "run", epochs=2))
    assert not (tmp_path / "run" / "model.safetensors").exists()
