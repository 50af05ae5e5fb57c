"""The head: the linear layer that maps features to logits."""

from typing import TypeGuard

from torch import Tensor, nn

Head = nn.Linear | nn.Conv2d
"""A linear layer over features: `nn.Linear`, or a 1×1 convolution, which some networks have after pooling."""


def is_linear(module: nn.Module | None) -> TypeGuard[Head]:
    """Check whether a module is a linear layer over features.

    Args:
        module: Any module, or None.

    Returns:
        True for `nn.Linear` and for a 1×1 convolution without stride, groups or padding.
    """
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.stride == (1, 1) and module.groups == 1 and not module.padding[0]
    return isinstance(module, nn.Linear)


def weight_and_bias(head: Head) -> tuple[Tensor, Tensor | None]:
    """Return the parameters of a head in the shapes of a linear layer.

    Args:
        head: The head, from D features to C logits.

    Returns:
        Its weight, shape (C, D), and its bias, shape (C,), or None if it has none.
    """
    return head.weight.flatten(1), head.bias
