"""The head: the linear layer that maps features to logits."""

from typing import TypeGuard

from torch import Tensor, nn

Head = nn.Linear | nn.Conv2d
"""A linear layer over features: `nn.Linear`, or a 1×1 convolution, which some networks have after pooling."""


def is_linear(module: nn.Module | None) -> TypeGuard[Head]:
    """Whether a module is linear in features: `nn.Linear`, or a 1×1 convolution without stride, groups and padding."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.stride == (1, 1) and module.groups == 1 and not module.padding[0]
    return isinstance(module, nn.Linear)


def weight_and_bias(head: Head) -> tuple[Tensor, Tensor | None]:
    """The weight (C, D) of a head from D features to C logits, and its bias (C,) or None."""
    return head.weight.flatten(1), head.bias
