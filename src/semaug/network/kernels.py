"""Fused kernels for the tangent pass on a GPU: each reads primal and tangent once and writes the results.

A function returns output and tangent, or None (False) where its kernel does not apply: on a CPU, in fp64, in another
memory layout, for more blocks than CUDA launches, without Triton. :mod:`semaug.network.tangents` then computes the same
in torch. Arithmetic is in fp32.
"""

import torch
from torch import Tensor

try:
    import triton

    from semaug.network import _triton
except ImportError:  # not a CUDA build of torch
    triton = None

Dual = tuple[Tensor, Tensor]
"""A tensor and its tangent."""

Pair = tuple[Tensor | None, Tensor | None]
"""Two optional tensors: a parameter and its tangent, or running mean and variance."""

MOST_BLOCKS = 65535
"""The limit that CUDA sets to the second dimension of a grid."""

INTERPRETED = False
"""Whether kernels run on CPU tensors too, in Triton's interpreter: for tests."""


def channels_last(*tensors: Tensor) -> bool:
    """Whether kernels can read all `tensors` pixel by pixel: maps (N, C, height, width) or matrices (N, C)."""
    return _usable(*tensors) and all(map(_is_channels_last, tensors))


def _usable(*tensors: Tensor) -> bool:
    on_device = triton is not None and (INTERPRETED or tensors[0].is_cuda)
    return on_device and all(
        tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and 0 < tensor.numel() < 2**31
        for tensor in tensors
    )


def _is_channels_last(x: Tensor) -> bool:
    if x.ndim == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.ndim == 2 and x.is_contiguous()


def _optional(weight: Pair, bias: Pair, placeholder: Tensor) -> tuple[list[Tensor], dict[str, bool]]:
    """Parameters and tangents with a placeholder for missing ones, and flags that say which of them exist."""
    parameters = (*weight, *bias)
    flags = {f"HAS_{name}": tensor is not None for name, tensor in zip(("W", "DW", "B", "DB"), parameters, strict=True)}
    return [placeholder if tensor is None else tensor for tensor in parameters], flags


def batch_norm(
    input: Dual,
    statistics: Pair,
    weight: Pair,
    bias: Pair,
    eps: float,
    bounds: tuple[float, float] | None,
    want_primal: bool,
) -> Dual | None:
    """BatchNorm's output and tangent in two passes over the data: one for the sums, one for the results.

    Args:
        input: Maps (N, C, height, width) or a matrix (N, C), channels last, and the tangent.
        statistics: Running mean and variance (C,); both None to use those of the batch.
        weight: Scale (C,) and its tangent.
        bias: Shift (C,) and its tangent.
        eps: Added to the variance.
        bounds: Range to which the output is clamped; None does not clamp.
        want_primal: False to compute the tangent alone; the output is then undefined.
    """
    x, dx = input
    if not channels_last(x, dx):
        return None
    channels = x.shape[1]
    rows = x.numel() // channels
    block = min(128, triton.next_power_of_2(channels))
    height = 4096 // block
    columns = triton.cdiv(channels, block)
    if triton.cdiv(rows, 4 * height) > MOST_BLOCKS:
        return None
    coefficients = torch.empty(6, channels, dtype=torch.float32, device=x.device)
    pointers, flags = _optional(weight, bias, coefficients)
    mean, variance = statistics
    if mean is None or variance is None:
        splits = max(1, min(triton.cdiv(rows, 4 * height), 1024 // columns))
        sums = torch.empty(splits, 4, channels, dtype=torch.float32, device=x.device)
        per_program = triton.cdiv(triton.cdiv(rows, splits), height) * height
        _triton._norm_sums[(columns, splits)](
            x, dx, sums, rows, channels, per_program, BLOCK_ROWS=height, BLOCK_CHANNELS=block
        )
        mean = variance = coefficients
    else:
        splits, sums = 0, coefficients
    _triton._norm_coefficients[(triton.cdiv(channels, 8),)](
        x, dx, sums, mean, variance, *pointers, coefficients, rows, channels, splits, eps,
        HAS_SUMS=splits > 0, **flags, BLOCK_SPLITS=128, BLOCK_CHANNELS=8,
    )  # fmt: skip
    dy = torch.empty_like(dx)
    y = torch.empty_like(x) if want_primal else dy
    low, high = bounds or (0.0, 0.0)
    _triton._norm_apply[(columns, triton.cdiv(rows, 4 * height))](
        x, dx, coefficients, y, dy, rows, channels, low, high,
        CLAMPED=bounds is not None, WANT_PRIMAL=want_primal, BLOCK_ROWS=height, BLOCK_CHANNELS=block, REPEAT=4,
    )  # fmt: skip
    return y, dy


def layer_norm(input: Dual, weight: Pair, bias: Pair, eps: float, dtype: torch.dtype) -> Dual | None:
    """LayerNorm's output and tangent over the last dimension, in one pass.

    Args:
        input: Contiguous tensor (…, D), D at most 8192, and its tangent.
        weight: Scale (D,) and its tangent.
        bias: Shift (D,) and its tangent.
        eps: Added to the variance.
        dtype: Precision of the results.
    """
    x, dx = input
    width = x.shape[-1]
    if not (_usable(x, dx) and x.is_contiguous() and dx.is_contiguous() and width <= 8192):
        return None
    y, dy = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype)
    pointers, flags = _optional(weight, bias, y)
    _triton._layer_norm[(x.numel() // width,)](
        x, dx, *pointers, y, dy, width, eps, **flags, BLOCK=triton.next_power_of_2(width)
    )
    return y, dy


def add_clamp_(input: Dual, other: Dual | None, bounds: tuple[float, float] | None) -> bool:
    """Add `other` to `input` in place, tangent to tangent, and clamp the sum to `bounds`; either may be None.

    Returns whether the kernel applies: all tensors must have the same memory layout, without gaps.
    """
    x, dx = input
    y, dy = other or input
    same = all(tensor.stride() == x.stride() for tensor in (dx, y, dy))
    if not (_usable(x, dx, y, dy) and same and (x.is_contiguous() or _is_channels_last(x))):
        return False
    low, high = bounds or (0.0, 0.0)
    _triton._add_clamp[(triton.cdiv(x.numel(), 4096),)](
        x, dx, y, dy, x.numel(), low, high, ADDS=other is not None, CLAMPED=bounds is not None, BLOCK=4096
    )
    return True


def attention(query: Dual, key: Dual, value: Dual, scale: float) -> Dual | None:
    """Softmax attention and its tangent, without a matrix of length × length.

    Args:
        query: Tensor (batch, heads, length, size) in half precision, size at most 128, and its tangent.
        key: Tensor (batch, heads, keys, size) and its tangent.
        value: Tensor of the key's shape and its tangent.
        scale: Factor of the scores.
    """
    q, k, v = query[0], key[0], value[0]
    half = q.dtype in (torch.float16, torch.bfloat16)
    same = q.ndim == 4 and q.shape[:2] == k.shape[:2] and k.shape == v.shape and q.shape[-1] == v.shape[-1] <= 128
    if not (half and same and _usable(q, k, v)) or q.shape[0] * q.shape[1] > MOST_BLOCKS:
        return None
    (q, dq), (k, dk), (v, dv) = (_same_layout(*pair) for pair in (query, key, value))
    batch, heads, length, size = q.shape
    # As (batch, length, heads, size) in memory, which the next layer of a transformer reads.
    out, dout = (
        torch.empty(batch, length, heads, size, dtype=q.dtype, device=q.device).transpose(1, 2) for _ in range(2)
    )
    strides = [stride for tensor in (q, k, v, out) for stride in tensor.stride()[:3]]
    width = max(16, triton.next_power_of_2(size))
    block = 64 if width <= 64 else 32
    _triton._attention[(triton.cdiv(length, block), batch * heads)](
        q, dq, k, dk, v, dv, out, dout, heads, length, k.shape[2], size, scale,
        *strides, BLOCK_Q=block, BLOCK_K=block, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out, dout


def _same_layout(primal: Tensor, tangent: Tensor) -> Dual:
    """Both with the same strides, and contiguous in the last dimension."""
    if primal.stride(-1) == 1 and primal.stride() == tangent.stride():
        return primal, tangent
    return primal.contiguous(), tangent.contiguous()
