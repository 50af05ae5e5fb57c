"""The head: the linear layer that maps features to logits."""

from typing import TypeGuard

import torch
from torch import Tensor, nn

from semaug.isda.loss import plain_logits

Head = nn.Linear | nn.Conv2d
"""A linear layer over features: `nn.Linear`, or a 1×1 convolution, which some networks have after pooling."""


def is_linear(module: nn.Module | None) -> TypeGuard[Head]:
    """Whether a module is linear in features: `nn.Linear`, or a 1×1 convolution without stride, groups and padding."""
    if isinstance(module, nn.Conv2d):
        plain = module.kernel_size == (1, 1) and module.stride == (1, 1) and module.groups == 1
        return plain and module.padding == (0, 0)
    return isinstance(module, nn.Linear)


def weight_and_bias(head: Head) -> tuple[Tensor, Tensor | None]:
    """The weight (C, D) of a head from D features to C logits, and its bias (C,) or None."""
    return head.weight.flatten(1), head.bias


@torch.no_grad()
def follows_weight(head: Head, features: Tensor) -> bool:
    """Whether the logits of a head are ``W a + b``; a subclass with its own `forward` may compute others."""
    if getattr(head.forward, "__func__", None) in (nn.Linear.forward, nn.Conv2d.forward):
        return True
    if any(name not in ("weight", "bias") for name, _ in head.named_parameters()):
        return False
    shape = (*features.shape, 1, 1) if isinstance(head, nn.Conv2d) else features.shape
    logits, expected = head(features.view(shape)).flatten(1), plain_logits(features, *weight_and_bias(head))
    return bool((logits - expected).abs().max() <= 0.02 * (1 + expected.abs().max()))
