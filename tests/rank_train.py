"""Runs that several processes make together."""

from pathlib import Path
from typing import Any

import torch

from photos import quick_config
from semaug.training.methods import Augmentation
from semaug.training.trainer import train
from semaug.util import distributed, progress

SETTINGS: dict[str, Any] = {"batch_size": 8, "sync_batch_norm": True}  # two batches of nine: halves of five and four
RUNS: dict[str, dict[str, Any]] = {
    "paper": {"ema": 0.9},
    "pipelined": {"augmentation": Augmentation(order="pipelined", frozen_blocks=1, meta_lr=1.0)},
    "micro": {
        "model": "test_vit",
        "micro_batch": 1,
        "layer_decay": 0.75,
        "ema": 0.9,
        "augmentation": Augmentation(order="pipelined"),
    },
    "isda": {"method": "isda", "freeze": 1},
    "mixup": {"method": "mixup"},
    "cutmix": {"method": "cutmix", "epochs": 1},
    "erased": {"method": "random-erasing", "epochs": 1},
    "changed": {"method": "randaugment", "epochs": 1},
    "snapmix": {"method": "isda+snapmix", "epochs": 1},
    "manifold": {"method": "manifold-mixup", "epochs": 1},
    "local": {"augmentation": Augmentation(pseudo="local"), "epochs": 2, "sync_batch_norm": False},
}


class Enough(Exception):
    """Ends training after an epoch."""


def run(photos: Path, output: Path, name: str, last: int = 99) -> Path:
    """Train as `RUNS` says, up to an epoch, in fp64: there only rounding may differ between numbers of processes."""
    original = progress.Progress.epoch

    def epoch(self: progress.Progress, row: dict[str, Any], epochs: int) -> None:
        if row["epoch"] == last:
            raise Enough

    progress.Progress.epoch = epoch  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        return train(quick_config(photos, output / name, **{**SETTINGS, **RUNS[name]}))
    except Enough:
        return output / name
    finally:
        progress.Progress.epoch = original  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


def main(photos: Path, output: Path, runs: list[tuple[str, int]]) -> None:
    """Make these runs, each up to an epoch, as one of several processes."""
    distributed.initialize("cpu")
    for name, last in runs:
        run(photos, output, name, last)
    distributed.shut_down()
