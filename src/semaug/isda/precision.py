"""Where half precision will not do, and how large numbers may become."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LARGEST_STRENGTH = 1e12
"""The largest λ that is taken; the paper's is 10."""

LARGEST_TERM = 1e20
"""The most that augmentation adds to a logit. Beyond about 1e9, fp32 keeps nothing of the plain logits beside it, so
nothing of use is lost; and neither the loss, nor a gradient or its norm, leaves the range of fp32."""


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Switch autocast off: the quadratic form subtracts nearly equal numbers and needs fp32 at least."""
    with torch.autocast(like.device.type, enabled=False):
        yield


def widened(tensor: Tensor) -> Tensor:
    """``tensor`` in fp32 if it came in half precision, else as it is (fp64 stays fp64)."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
