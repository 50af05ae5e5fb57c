"""The function that the meta-gradient engines differentiate: L_train of one recorded pass."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from semaug.meta.losses import HeadLoss, HeadLossAlong
from semaug.network.network import Network, Tape


@dataclass
class TrainProblem:
    """``L_train(θ_f; θ_g)`` of one recorded pass, as a function of the late parameters.

    Args:
        network: The classifier.
        tape: What the pass recorded: images, early outputs and random states.
        parameters: The late parameters at the point of differentiation, the head's among them.
        features: The features (N, D) there, in fp32 or fp64.
        loss: L_train as a function of features and head; θ_g enters through its closure.
        autocast: Precision of the pass, or None.
        loss_along: Closed form of the derivative of `loss` along a direction, or None.
        weight: Weight of this loss in the sum over micro-batches and ranks.
    """

    network: Network
    tape: Tape
    parameters: Mapping[str, Tensor]
    features: Tensor
    loss: HeadLoss
    autocast: torch.dtype | None = None
    loss_along: HeadLossAlong | None = None
    weight: float = 1.0

    @contextmanager
    def features_at(self, parameters: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Repeat the late part of the pass at other parameters; a backward pass belongs into the `with` block."""
        device = self.features.device.type
        # A cached half-precision copy of a weight would lose its tangent or belong to another graph.
        cast = torch.autocast(device, self.autocast, cache_enabled=False) if self.autocast else nullcontext()
        with ExitStack() as stack:
            with cast:
                features = stack.enter_context(self.network.replaying(parameters, self.tape))
            yield features

    def head_names(self) -> tuple[str, str]:
        """Names of the head's weight and bias among the parameters."""
        return f"{self.network.head_name}.weight", f"{self.network.head_name}.bias"


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements of several tensors."""
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors])
    return torch.stack(norms).square().sum().sqrt()
