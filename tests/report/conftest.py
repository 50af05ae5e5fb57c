"""Runs of the real trainer on a few drawn birds, made once for all tests of reports and figures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semaug.data.samples import embedded_birds
from semaug.report import figures
from semaug.training.methods import Augmentation
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


def train_run(data: Path, output: Path, **options: Any) -> Path:
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
        "keep_checkpoints": True,
        "cache": None,
        "lr": 0.01,
        "augmentation": Augmentation(10.0),
    }
    return train(TrainConfig(data=str(data), output=output, **{**settings, **options}))


@pytest.fixture(scope="session")
def train_small() -> Callable[..., Path]:
    """A function that trains the small network on a folder of images."""
    return train_run


@pytest.fixture(scope="session")
def runs(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    methods: tuple[Any, ...] = ("basic", "constant", "isda", "learnable", "p2p")
    return {method: train_run(photos, folder / method, method=method) for method in methods}


@pytest.fixture(scope="session")
def drawn(runs: dict[str, Path]) -> dict[str, figures.Figure]:
    """Each figure once."""
    sources = {label: runs[label] for label in ("constant", "isda", "learnable")}
    made = [
        figures.tsne({label: runs[label] for label in ("basic", "learnable")}),
        figures.augmentations({label: runs[label] for label in ("basic", "learnable")}, copies=3),
        figures.neighbours(sources, queries=3, count=4),
        figures.diagnostics(runs),
        figures.confusions(runs["basic"], pairs=3),
        figures.cam(runs["basic"], images=4),
        figures.parts(runs["p2p"], images=2),
        figures.destruction_chart(4, 3),
    ]
    return {figure.name: figure for figure in made}
