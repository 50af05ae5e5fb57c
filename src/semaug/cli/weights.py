"""`semaug weights`: download pretrained weights before training."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from semaug.cli.common import Command, show


@dataclass(frozen=True)
class Weights(Command):
    """Download the pretrained weights of a network, for training without a network connection; prints the file."""

    model: Annotated[str, tyro.conf.Positional]
    """Name of the network in timm, such as resnet50, or torchvision/NAME."""

    def run(self) -> None:
        from semaug.network.models import pretrained_weights

        show(pretrained_weights(self.model))
