"""fp32 inside autocast and in converted modules, and the bounds that keep fp32 from overflowing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn

LARGEST_STRENGTH = 1e12
"""The largest λ allowed; the paper's is 10."""

LARGEST_TERM = 1e20
"""The largest term that augmentation adds to a logit. Beyond about 1e9, fp32 loses the plain logits next to it, so this
bound costs nothing of use; and neither the loss, nor a gradient or its norm, leaves the range of fp32."""


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Switch autocast off on the device of a tensor: the quadratic form subtracts nearly equal numbers."""
    with torch.autocast(like.device.type, enabled=False):
        yield


def widened(tensor: Tensor) -> Tensor:
    """The tensor in fp32 if it is in half precision (fp16 or bf16), otherwise the tensor itself."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class WideBuffers(nn.Module):
    """A module whose buffers keep their precision when it, or a module around it, is converted to half precision.

    Running statistics need at least fp32: a count in bf16 stays at 256, because 257 is rounded to it.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def widely(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            return converted if widened(converted) is converted else tensor.to(converted.device)

        super()._apply(widely, recurse)  # type: ignore[no-untyped-call]
        return self
