"""What passes from one update of a half step to the next: half batches, updates of f, and the meta loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semaug.meta.sensitivity import Sensitivity
from semaug.network.network import Tape


@dataclass
class MicroBatch:
    """Images that go through the network together: a half batch, or a part of it.

    Args:
        images: Images (n, 3, H, W).
        labels: Class indices (n,), or probabilities (n, C).
        share: n as a share of this rank's half batch.
        weight: This rank's half batch as a share of that of all ranks.
        features: Features (n, D) of the first pass; with their graph if the micro-batch is the whole half batch.
        tape: What the first pass recorded for repeating its late part.
        counted: Whether the source of Σ has seen the features.
        image_weights: Weight (n,) of each image in L_train; None: all 1.
    """

    images: Tensor
    labels: Tensor
    share: float = 1.0
    weight: float = 1.0
    features: Tensor | None = None
    tape: Tape | None = None
    counted: bool = False
    image_weights: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole half batch of the rank."""
        return self.share == 1.0


HalfBatch = list[MicroBatch]


@dataclass
class Update:
    """An update of θ_f through which the meta loss is differentiated.

    Args:
        batch: The half batch X.
        parameters: The late parameters of f before the update, by name. The early ones are frozen in the meta loop.
        sensitivity: ``∂θ̃_f/∂∇L_train`` for each of them, elementwise.
        strength: λ of the update.
        precision: Autocast precision of its passes.
    """

    batch: HalfBatch
    parameters: dict[str, Tensor]
    sensitivity: dict[str, Sensitivity]
    strength: Tensor
    precision: torch.dtype | None


@dataclass
class MetaLoss:
    """The meta loss after an update of f.

    Args:
        value: This rank's part of the loss.
        gradient: Its gradient v in the late parameters, by name.
        rank_weight: With local pseudo updates the weight of this rank in the mean over ranks, else None.
    """

    value: Tensor
    gradient: dict[str, Tensor]
    rank_weight: float | None = None
