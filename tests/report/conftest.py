"""Runs of the real trainer on a few drawn birds, small enough to be made anew by every test process."""

from pathlib import Path
from typing import Any

import pytest

from semaug.data.samples import embedded_birds
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six species, four of them finches, in folders."""
    folder = tmp_path_factory.mktemp("birds")
    data = embedded_birds(6, 6, 5, size=48)
    for split, samples in data.splits.items():
        for i, label in enumerate(samples.labels):
            file = folder / split / data.classes[label] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            samples.load(i).save(file)
    return folder


def train_run(photos: Path, output: Path, **options: Any) -> Path:
    settings: dict[str, Any] = {
        "method": "learnable",
        "model": "small",
        "pretrained": False,
        "epochs": 2,
        "resize": 40,
        "crop": 32,
        "batch_size": 6,
        "val_per_class": 1,
        "workers": 0,
        "cache": None,
        "lr": 0.01,
    }
    return train(TrainConfig(data=str(photos), output=output, **{**settings, **options}))


@pytest.fixture(scope="session")
def runs(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    methods: tuple[Any, ...] = ("basic", "constant", "isda", "learnable", "p2p")
    return {method: train_run(photos, folder / method, method=method) for method in methods}
