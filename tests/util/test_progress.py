"""The line of an epoch."""

import errno
import io
import sys
from types import SimpleNamespace
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


def test_without_a_terminal_a_task_prints_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 0.0, 10.0, 50.0, 70.0, 80.0, 150.0, 160.0])
    monkeypatch.setattr("semaug.util.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Progress().task("epoch 1/2", 500) as advance:
        for done in (100, 200, 300, 350, 400, 500):
            advance(done, 500)
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1/2: 300 of 500, 47 s left",
        "epoch 1/2: 400 of 500, 38 s left",
    ]


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


class Unwritable(io.StringIO):
    def __init__(self, error: OSError | None, is_terminal: bool) -> None:
        super().__init__()
        self.error, self.is_terminal = error, is_terminal

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), BrokenPipeError()])
def test_messages_that_cannot_be_written_end_nothing(
    error: OSError, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Unwritable(error, is_terminal))
    progress = Progress()
    for epoch in range(2):
        progress.say(f"epoch {epoch}")
        with progress.task("epoch", 2) as advance:
            advance(1, 2)


def test_a_terminal_that_is_closed_meanwhile_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Unwritable(None, is_terminal=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress()
    with progress.task("epoch", 2) as advance:
        terminal.error = OSError(errno.EIO, "Input/output error")
        advance(1, 2)
    progress.say("the end")
    assert sys.stderr is terminal
