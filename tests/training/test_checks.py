"""Checks during training: warnings about CovNet, and BatchNorm with a single value per channel."""

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from photos import quick_config
from semaug.isda.sources import CovNet
from semaug.training.checks import FiniteCheck, covnet_warning, refuse_single_values
from semaug.training.methods import Augmentation
from semaug.training.trainer import train
from semaug.util.errors import TrainingError
from semaug.util.signals import Interrupted


def warning(source: nn.Module, mean: float = 0.5, drift: float = 0.1, spread: float = 0.05, epochs: int = 3) -> str:
    row = {"variance_mean": mean, "variance_std_samples": spread, "drift": drift}
    return str(covnet_warning(source, [{**row, "strength": float(epoch)} for epoch in range(epochs)]))


def test_only_a_faulty_covnet_causes_a_warning() -> None:
    plain, shaped = CovNet(8), CovNet(8, fixed_trace=0.001)
    assert warning(plain) == warning(shaped, mean=0.001) == "None"
    assert warning(nn.Linear(2, 2), mean=0.0, drift=0.0) == "None", "this is not a CovNet"
    assert "collapsed" in warning(plain, mean=0.005)
    assert "saturated" in warning(plain, mean=0.995, epochs=1)
    assert warning(CovNet(8, activation="softplus"), mean=5.0) == "None", "softplus has no upper end"
    for source in (plain, shaped):
        assert "is not learning: its weights have changed by 2e-06 of their norm" in warning(source, drift=2e-6)
        assert "the same Σ to all images" in warning(source, spread=1e-5 if source is plain else 1e-8)
        assert warning(source, drift=2e-6, spread=1e-9, epochs=2) == "None", "only one epoch had augmentation"


@pytest.mark.parametrize(("bias", "what"), [(-20.0, "has collapsed"), (20.0, "is saturated")])
def test_a_covnet_at_an_end_of_its_range_causes_one_warning_also_if_training_is_interrupted(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before_step: Callable[[Callable[[int], None]], None],
    capsys: pytest.CaptureFixture[str],
    bias: float,
    what: str,
) -> None:
    original = CovNet.__init__

    def at_the_end(self: CovNet, *arguments: Any) -> None:
        original(self, *arguments)
        nn.init.constant_(self.layers.output.bias, bias)

    monkeypatch.setattr(CovNet, "__init__", at_the_end)
    before_step(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None)
    with pytest.raises(Interrupted):
        train(quick_config(photos, tmp_path / "run"))
    train(quick_config(photos, tmp_path / "run"))
    said = capsys.readouterr().err
    assert said.count(f"CovNet {what}") == said.count("warning:") == 1


def test_covnet_as_the_paper_trains_it_is_reported_as_not_learning(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(quick_config(photos, tmp_path / "paper"))
    said = capsys.readouterr().err
    assert said.count("warning: after epoch 3 CovNet is not learning") == said.count("warning:") == 1
    quick = Augmentation(10.0, meta_optimizer="adam", meta_lr=0.01)
    train(quick_config(photos, tmp_path / "adam", augmentation=quick))
    assert "is not learning" not in capsys.readouterr().err


def test_a_single_step_fails_in_fp32_and_too_many_in_a_row_in_fp16() -> None:
    good, bad = {"train_loss": 1.0, "drift": 0.5}, {"train_loss": 1.0, "drift": float("nan")}
    assert FiniteCheck(10, fp16=False).first_failure([good, good, bad, good]) == 2
    overflow = {"train_loss": float("inf")}
    check = FiniteCheck(3, fp16=True)
    assert check.first_failure([bad, overflow, overflow, good]) is None
    assert check.first_failure([overflow, overflow]) is None
    assert check.first_failure([overflow]) == 0, "the third in a row, over several calls"


def test_batch_norm_over_one_value_is_an_error_in_training_mode_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(4))
    refuse_single_values(model)
    one, two = torch.randn(1, 3, 3, 3), torch.randn(2, 3, 3, 3)
    for network in (model, copy.deepcopy(model)):
        with pytest.raises(TrainingError, match="BatchNorm needs more than one value.* larger `batch_size`"):
            network(one)
        assert network(two).shape == (2, 4)
    assert model.eval()(one).shape == (1, 4)
    large = nn.Sequential(nn.BatchNorm2d(3))
    refuse_single_values(large)
    assert large(one).shape == one.shape, "nine pixels of one image are enough"
