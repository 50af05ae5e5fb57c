"""The line of an epoch."""

from typing import Any

import pytest

from semaug.util.progress import Progress

ROW: dict[str, Any] = {
    "epoch": 2, "train_loss": 1.5, "train_accuracy": 0.5, "val_top1": 0.25, "strength": 0.0, "seconds": 10.0,
    "images_per_second": 640.4, "validation_seconds": 0.5, "saving_seconds": 0.1,
}  # fmt: skip


def line(capsys: pytest.CaptureFixture[str], **values: Any) -> str:
    Progress().epoch({**ROW, **values}, 2)
    return capsys.readouterr().err.strip()


def test_validation_and_saving_are_printed_if_they_take_long(capsys: pytest.CaptureFixture[str]) -> None:
    start = "epoch 2/2 · loss 1.500 · train 50.0 % · val 25.0 % · "
    assert line(capsys) == f"{start}640 images/s · 0 s left"
    assert "loss 5.6e+23 ·" in line(capsys, train_loss=5.6e23)
    slow = line(capsys, validation_seconds=2.0, saving_seconds=65.0)
    assert slow == f"{start}640 images/s · validation 2 s · saving 1 min 5 s · 0 s left"


def test_an_epoch_without_validation_and_one_that_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().epoch({name: value for name, value in ROW.items() if name != "val_top1"}, 2)
    assert capsys.readouterr().err.strip() == "epoch 2/2 · loss 1.500 · train 50.0 % · 640 images/s · 0 s left"
    assert "val 25.0 % · 12 validation images without finite numbers · 640" in line(capsys, val_not_finite=12)
