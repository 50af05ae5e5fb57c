"""BatchNorm over the images of all ranks, in any network, with every derivative.

Mean and variance are sums over ranks, and the derivatives of such a sum are sums over ranks again. The result is exact
in reverse mode, in forward mode and in second derivatives, however uneven the ranks' batches are. (torch's
SyncBatchNorm has neither a second derivative nor a forward mode.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from semaug.isda.precision import widened
from semaug.util import distributed


class BatchNormOverRanks(TorchFunctionMode):
    """Mode in which `F.batch_norm`, called by any module, uses the images of all ranks; the network is unchanged."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm`, with the same arguments; in training mode the statistics are those of all ranks' batches."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = widened(input)
    shape = (1, -1, *[1] * (x.ndim - 2))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    sums = _SumOverRanks.apply(torch.cat([x.sum(dims), x.new_full((1,), x.numel() / x.shape[1])]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(shape)
    variance = _SumOverRanks.apply(centred.square().sum(dims)) / count
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


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks, for losses that are summed over ranks as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _summed(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total: Tensor = _SumOverRanks.apply(gradient)
        return total

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _summed(tangent)


def _summed(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce_(total)
    return total
