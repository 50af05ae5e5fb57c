"""fp32 inside autocast, and the bounds that keep fp32 from overflowing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LARGEST_STRENGTH = 1e12
"""The largest λ allowed; the paper's is 10."""

LARGEST_TERM = 1e20
"""The largest term that augmentation adds to a logit. Beyond about 1e9, fp32 loses the plain logits next to it, so this
bound costs nothing of use; and neither the loss, nor a gradient or its norm, leaves the range of fp32."""


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Switch autocast off: the quadratic form subtracts nearly equal numbers and needs at least fp32.

    Args:
        like: Any tensor on the device of the computation.
    """
    with torch.autocast(like.device.type, enabled=False):
        yield


def widened(tensor: Tensor) -> Tensor:
    """Convert half precision to fp32.

    Args:
        tensor: Any tensor.

    Returns:
        The tensor in fp32 if it is fp16 or bf16, otherwise the tensor itself (fp64 stays fp64).
    """
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def check_size(value: float) -> None:
    """Check that a strength is small enough for fp32.

    Args:
        value: λ.

    Raises:
        ValueError: If λ is above 1e12.
    """
    if value > LARGEST_STRENGTH:
        raise ValueError(f"strength must be at most {LARGEST_STRENGTH:g}, not {value:g}")
