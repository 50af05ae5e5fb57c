"""Data that one update of a half step hands to the next: half batches, updates of f, and the meta loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from semaug.meta.sensitivity import Sensitivity
from semaug.network.network import Tape
from semaug.network.randomness import RandomState


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


def is_shape(tensor: Tensor) -> bool:
    """Whether only the shape of a tensor matters: the output of an early module that the late part does not use."""
    return tensor.ndim > 0 and not any(tensor.stride())


def map_update(
    update: Update, on_tensor: Callable[[Tensor], Tensor], on_state: Callable[[RandomState], RandomState]
) -> Update:
    """A copy of an update with other tensors and random states.

    Args:
        update: An update whose half batch has been through the network.
        on_tensor: Replaces a tensor. It is called for all of them, in the same order for updates of the same kind.
        on_state: Replaces a random state, likewise.

    Returns:
        The copy.
    """

    def of_part(part: MicroBatch) -> MicroBatch:
        assert part.tape is not None and part.features is not None  # noqa: PT018
        images, labels, features = on_tensor(part.images), on_tensor(part.labels), on_tensor(part.features)
        outputs = {
            name: [(pytree.tree_map_only(Tensor, on_tensor, output), on_state(after)) for output, after in calls]
            for name, calls in part.tape.outputs.items()
        }
        tape = replace(
            part.tape, images=on_tensor(part.tape.images), random_state=on_state(part.tape.random_state),
            outputs=outputs,
        )  # fmt: skip
        return replace(part, images=images, labels=labels, features=features, tape=tape)

    return Update(
        [of_part(part) for part in update.batch],
        {name: on_tensor(tensor) for name, tensor in update.parameters.items()},
        {name: on_tensor(slope) if isinstance(slope, Tensor) else slope for name, slope in update.sensitivity.items()},
        on_tensor(update.strength),
        update.precision,
    )
