"""Checkpoints written in the background: in order, one at a time, and waited for."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from photos import quick_config
from semaug.meta.learner import LearnableAugmentation
from semaug.training import checkpoints
from semaug.training.run_directory import RunDirectory
from semaug.training.trainer import train
from semaug.util.errors import DataError, FileError


def state(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "metrics": [{"epoch": i + 1} for i in range(epoch)]}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes wait for this event before their content is flushed to disk."""
    released, fsync = threading.Event(), os.fsync

    def waiting(descriptor: int) -> None:
        assert released.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", waiting)
    yield released
    released.set()


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_saving_returns_before_the_write_and_everything_that_reads_waits(tmp_path: Path, held: threading.Event) -> None:
    with RunDirectory(tmp_path) as run:
        run.save(state(1), best={"epoch": 1})
        assert not (tmp_path / "checkpoints" / "last").exists()
        threading.Timer(0.1, held.set).start()
        loaded = run.load("last")
        assert loaded == state(1)
        assert run.load("best") == {"epoch": 1}
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"epoch": 1}


def test_the_next_save_waits_and_the_context_ends_when_all_is_written(tmp_path: Path, held: threading.Event) -> None:
    with RunDirectory(tmp_path) as run:
        run.save(state(1))
        threading.Timer(0.1, held.set).start()
        run.save(state(2))
        assert checkpoints.load(tmp_path / "checkpoints" / "last") is not None, "the first one is complete"
    assert checkpoints.load(tmp_path / "checkpoints" / "last") == state(2)
    assert checkpoints.load(checkpoints.previous(tmp_path / "checkpoints" / "last")) == state(1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_best_epoch_is_written_before_the_last_and_the_metrics_after_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    original = Path.replace

    def replace(self: Path, to: Path) -> Path:
        written.append(to.name)
        return original(self, to)

    monkeypatch.setattr(Path, "replace", replace)
    with RunDirectory(tmp_path) as run:
        run.save(state(1), best={"epoch": 1})
    assert written == ["best", "last", "metrics.jsonl", "metrics.csv"]


def failing_run(folder: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[RunDirectory], object]) -> None:
    """A run whose first checkpoint is written and whose second is not."""
    with RunDirectory(folder) as run:
        run.save(state(1))
        run.wait()
        monkeypatch.setattr(os, "fsync", fail)
        run.save(state(2))
        then(run)


@pytest.mark.parametrize("then", [lambda run: run.save(state(3)), lambda run: run.load("last"), lambda run: None])
def test_a_write_that_fails_is_reported_by_whatever_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[RunDirectory], object]
) -> None:
    with pytest.raises(FileError, match=r"^cannot write .*last: No space left on device$"):
        failing_run(tmp_path, monkeypatch, then)
    assert checkpoints.load(tmp_path / "checkpoints" / "last") == state(1)


def test_another_error_is_not_hidden_by_one_of_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(run: RunDirectory) -> None:
        raise DataError("unreadable")

    with pytest.raises(DataError, match="unreadable"):
        failing_run(tmp_path, monkeypatch, interrupt)


def test_training_goes_on_while_a_checkpoint_is_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of the first epoch ends only when the second epoch has begun."""
    begun, steps = threading.Event(), iter(range(1_000))
    original, save = LearnableAugmentation.step, checkpoints.save

    def step(self: Any, *batch: Any) -> Any:
        if next(steps) == 3:
            begun.set()
        return original(self, *batch)

    def slow(path: Path, content: dict[str, Any], run: str) -> None:
        assert begun.wait(60)
        save(path, content, run)

    monkeypatch.setattr(LearnableAugmentation, "step", step)
    monkeypatch.setattr(checkpoints, "save", slow)
    run = train(quick_config(photos, tmp_path / "run", method="isda"))
    assert (run / "model.safetensors").exists()
    assert not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())
