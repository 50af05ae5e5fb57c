"""A small folder of pictures, as a user would have it, and the settings of a quick run on it."""

from pathlib import Path
from typing import Any

from PIL import Image

from semaug.data.birds import Birds
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig

QUICK: dict[str, Any] = {
    "method": "learnable",
    "model": "small",
    "pretrained": False,
    "epochs": 3,
    "resize": 40,
    "crop": 32,
    "batch_size": 4,
    "val_per_class": 2,
    "workers": 0,
    "keep_checkpoints": True,
    "cache": None,
    "lr": 0.02,
    "device": "cpu",
    "augmentation": Augmentation(10.0),  # which augments at once; "auto" waits until the network fits its images
}


def photo_folder(root: Path, species: int = 3, train: int = 8, test: int = 4, size: int = 40) -> Path:
    """Write root/train/CLASS/N.png and root/test/CLASS/N.png; returns `root`."""
    for split, count in (("train", train), ("test", test)):
        drawn = Birds(species, count, split, size)
        for i, label in enumerate(drawn.labels):
            file = root / split / drawn.classes[label] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(drawn.drawing(i).image).save(file)
    return root


def quick_config(data: Path, output: Path, **options: Any) -> TrainConfig:
    """Settings of a run of three epochs; on the folder above an epoch has three steps."""
    return TrainConfig(data=str(data), output=output, **{**QUICK, **options})
