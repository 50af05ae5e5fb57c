"""Fixtures of the tests of training: a folder of pictures, undisturbed runs on it, and hooks before steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from photos import photo_folder, quick_config
from semaug.meta.learner import LearnableAugmentation
from semaug.training.trainer import train


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 classes with 8 training images, of which 2 are for validation, and 4 test images each."""
    return photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def undisturbed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains a quick run with further settings and returns its directory; the same settings are trained once."""
    runs: dict[str, Path] = {}

    def run(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in runs:
            runs[key] = train(quick_config(photos, tmp_path_factory.mktemp("undisturbed") / "run", **options))
        return runs[key]

    return run


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Installs a function that is called before each step of training with the number of steps so far."""
    original = LearnableAugmentation.step

    def install(hook: Callable[[int], None]) -> None:
        count = iter(range(1_000_000))

        def step(self: LearnableAugmentation, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            hook(next(count))
            return original(self, images, labels)

        monkeypatch.setattr(LearnableAugmentation, "step", step)

    return install
