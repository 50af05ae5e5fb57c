"""Trainings that several processes make; as a script, one of the processes: PHOTOS OUTPUT LAST-EPOCH NAME …"""

import sys
from pathlib import Path
from typing import Any

import torch

from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util import distributed, progress

SETTINGS: dict[str, Any] = {
    "method": "learnable",
    "model": "small",
    "pretrained": False,
    "epochs": 3,
    "resize": 40,
    "crop": 32,
    "batch_size": 8,  # two batches of nine images: halves of five and four
    "val_per_class": 2,
    "workers": 0,
    "cache": None,
    "lr": 0.02,
    "device": "cpu",
    "sync_batch_norm": True,
}
RUNS: dict[str, dict[str, Any]] = {
    "paper": {"ema": 0.9},
    "pipelined": {"augmentation": Augmentation(order="pipelined", frozen_blocks=1, source="modulated", meta_lr=1.0)},
    "micro": {"model": "vit_tiny_patch16_224", "micro_batch": 1, "augmentation": Augmentation(order="pipelined")},
    "mixup": {"method": "mixup"},
    "cutmix": {"method": "cutmix", "epochs": 1},
    "erased": {"method": "random-erasing", "epochs": 1},
    "changed": {"method": "randaugment", "epochs": 1},
    "randaugment": {"augmentation": Augmentation(meta_images="randaugment")},
    "held-out": {"augmentation": Augmentation(meta_images="held-out", meta_share=0.2)},
}


class Enough(Exception):
    pass


def run(photos: Path, output: Path, name: str, last: int = 99) -> Path:
    """Train as `RUNS` says, up to an epoch, in fp64, where what is left of rounding shows that nothing else differs."""
    original = progress.Progress.epoch

    def epoch(self: progress.Progress, row: dict[str, Any], epochs: int) -> None:
        if row["epoch"] == last:
            raise Enough

    progress.Progress.epoch = epoch  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        return train(TrainConfig(**{"data": str(photos), "output": output / name, **SETTINGS, **RUNS[name]}))
    except Enough:
        return output / name
    finally:
        progress.Progress.epoch = original  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.initialize("cpu")
    for name in sys.argv[4:]:
        run(Path(sys.argv[1]), Path(sys.argv[2]), name, int(sys.argv[3]))
    distributed.shut_down()
