"""The linear layer that makes the logits."""

from typing import TypeGuard

from torch import Tensor, nn

Head = nn.Linear | nn.Conv2d
"""A linear layer over features: `nn.Linear`, or a 1×1 convolution, as some networks have it after pooling."""


def is_linear(module: nn.Module | None) -> TypeGuard[Head]:
    """Whether a module is a linear layer over features."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.stride == (1, 1) and module.groups == 1 and not module.padding[0]
    return isinstance(module, nn.Linear)


def weight_and_bias(head: Head) -> tuple[Tensor, Tensor | None]:
    """Weight (C, D) and bias (C,) of a head."""
    return head.weight.flatten(1), head.bias
