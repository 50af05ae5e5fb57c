"""Where half precision will not do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Switch autocast off: the quadratic form subtracts nearly equal numbers and needs fp32 at least."""
    with torch.autocast(like.device.type, enabled=False):
        yield


def widened(tensor: Tensor) -> Tensor:
    """``tensor`` in fp32 if it came in half precision, else as it is (fp64 stays fp64)."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
