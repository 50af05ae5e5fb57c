"""BatchNorm over the images of all ranks, in any network, with every derivative.

Mean and variance are sums over ranks, and such a sum is an operator whose derivatives are sums over ranks again. What
is built from it can therefore be differentiated in reverse mode, twice and in forward mode, and is exact in each,
however uneven the ranks' batches are. (torch's SyncBatchNorm has neither a second derivative nor a forward mode.)

The networks are left as they are: :class:`OverRanks` is a mode in which `F.batch_norm`, by whichever module it is
called, means this one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from semaug.isda.precision import widened
from semaug.util import distributed


class OverRanks(TorchFunctionMode):
    """Inside, BatchNorm in training mode normalises by the mean and variance over the batches of all ranks."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm`, with mean and variance of the batches of all ranks in training mode."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = widened(input)
    shape = (1, -1, *[1] * (x.ndim - 2))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    sums = _Sum.apply(torch.cat([x.sum(dims), x.new_full((1,), x.numel() / x.shape[1])]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(dims)) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), momentum)
    slope = (variance + eps).rsqrt()
    if weight is not None:
        slope = slope * weight
    output: Tensor = centred * slope.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    return output.to(input.dtype)


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all ranks; so are its derivatives, of the sum of what the ranks make of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _summed(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(gradient)
        return total

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _summed(tangent)


def _summed(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce_(total)
    return total
