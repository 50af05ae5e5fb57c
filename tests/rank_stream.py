"""Runs on a stream that record which images the network gets, in one process or in several."""

import json
import os
import signal
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from semaug.data.images import IMAGENET_MEAN, IMAGENET_STD
from semaug.meta.learner import LearnableAugmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util import distributed
from semaug.util.signals import Interrupted

CLASSES, SIDE = 10, 8
IMAGES, PER_SHARD = 20_000, 1_000  # the buffer, through which images are shuffled, holds ten shards


@dataclass
class Numbered:
    """Images of one colour each, which encodes their number; the class is the number's last digit."""

    count: int

    @cached_property
    def labels(self) -> list[int]:
        return [i % CLASSES for i in range(self.count)]

    def __len__(self) -> int:
        return self.count

    def load(self, i: int) -> Image.Image:
        return Image.new("RGB", (SIDE, SIDE), (i % 256, i // 256, 7))

    def name(self, i: int) -> str:
        return f"{i}.png"

    def fingerprint(self) -> str:
        return f"numbered {self.count}"


def numbers(images: Tensor) -> list[int]:
    """Which of the numbered images these are, from the input of the network."""
    colours = images[:, :, 0, 0] * torch.tensor(IMAGENET_STD) * 255 + torch.tensor(IMAGENET_MEAN) * 255
    red, green, blue = colours.round().long().T
    assert torch.equal(blue, torch.full_like(blue, 7))
    return (red + 256 * green).tolist()


def config(data: Path, output: Path, **options: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "method": "isda",
        "model": "small",
        "pretrained": False,
        "epochs": 1,
        "resize": SIDE,
        "crop": SIDE,
        "batch_size": 500,
        "lr": 0.02,
        "device": "cpu",
        "images_on": "stream",
        "workers": 1,
        "keep_checkpoints": True,
        "sync_batch_norm": True,
    }
    return TrainConfig(data=str(data), output=output, **{**settings, **options})


def watched(settings: TrainConfig, stop_in: int | None = None) -> list[list[int]]:
    """Train, and stop in a step; returns the numbers of the images of each step."""
    seen: list[list[int]] = []
    step = LearnableAugmentation.step

    def noted(self: LearnableAugmentation, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen.append(numbers(images))
        assert labels.tolist() == [i % CLASSES for i in seen[-1]]
        if len(seen) - 1 == stop_in and distributed.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, images, labels)

    LearnableAugmentation.step = noted  # type: ignore[method-assign]
    try:
        train(settings)
    except Interrupted:
        assert stop_in is not None
    finally:
        LearnableAugmentation.step = step  # type: ignore[method-assign]
    return seen


def main(shards: Path, folder: Path) -> None:
    """As one of several processes: a run, and another that is stopped and resumed.

    FOLDER/RANK.json lists the images of each step of this process.
    """
    distributed.initialize("cpu")
    images = {
        "whole": watched(config(shards, folder / "whole")),
        "stopped": watched(config(shards, folder / "stopped"), stop_in=6),
        "rest": watched(config(shards, folder / "stopped", workers=0)),
    }
    (folder / f"{distributed.rank()}.json").write_text(json.dumps(images))
    distributed.shut_down()
