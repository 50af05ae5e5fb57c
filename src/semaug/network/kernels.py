"""Fused kernels for the tangent pass on a GPU, in Triton: each reads primal and tangent once and writes what is wanted.

:mod:`semaug.network.tangents` asks ``fits…`` before it calls one; where the answer is no (on a CPU, in fp64, in another memory
layout, without Triton) it computes the same in torch. Everything is computed in fp32, whatever is read and written.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # not a CUDA build of torch
    triton = None

Pair = tuple[Tensor | None, Tensor | None]
"""A parameter and its tangent, either of which may be missing."""

Dual = tuple[Tensor, Tensor]
"""A tensor and its tangent."""

INTERPRETED = False
"""Kernels run on CPU tensors too, in Triton's interpreter: for tests."""


def _usable(*tensors: Tensor) -> bool:
    on_device = triton is not None and (INTERPRETED or tensors[0].is_cuda)
    return on_device and all(
        tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and 0 < tensor.numel() < 2**31
        for tensor in tensors
    )


def fits(x: Tensor, dx: Tensor) -> bool:
    """Whether images and their tangents lie channels-last (or are a matrix) on a device with Triton."""
    return _usable(x, dx) and _channels_last(x) and _channels_last(dx)


def _channels_last(x: Tensor) -> bool:
    if x.ndim == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.ndim == 2 and x.is_contiguous()


def fits_rows(x: Tensor, dx: Tensor) -> bool:
    return _usable(x, dx) and x.is_contiguous() and dx.is_contiguous() and x.shape[-1] <= 8192


def fits_flat(x: Tensor, *others: Tensor) -> bool:
    """Whether all fill their memory without gaps, in the same order."""
    same = all(other.stride() == x.stride() for other in others)
    return _usable(x, *others) and same and (x.is_contiguous() or _channels_last(x))


def fits_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    same = query.ndim == 4 and query.shape[:2] == key.shape[:2] and key.shape == value.shape
    return half and same and _usable(query, key, value) and query.shape[-1] == value.shape[-1] <= 128


def _blocks(count: int, size: int) -> int:
    """How many blocks of a size hold so many things."""
    return -(-count // size)


def _power_of_two(count: int) -> int:
    """The least power of two that is not below."""
    return 1 << (count - 1).bit_length()


# -- BatchNorm --------------------------------------------------------------------------------------------------------


def batch_norm(
    x: Tensor,
    dx: Tensor,
    statistics: Pair,
    weight: Pair,
    bias: Pair,
    eps: float,
    bounds: tuple[float, float] | None,
    want_primal: bool,
) -> tuple[Tensor, Tensor]:
    """BatchNorm's output and tangent, clamped to `bounds` if given; by the batch's statistics if none are given.

    Two passes over the data: one for the sums, one for the results. Without `want_primal` the first result is empty.
    """
    channels = x.shape[1]
    rows = x.numel() // channels
    block = min(128, _power_of_two(channels))
    height = 4096 // block
    columns = _blocks(channels, block)
    coefficients = torch.empty(6, channels, dtype=torch.float32, device=x.device)
    parameters = (*weight, *bias)
    given = {f"HAS_{name}": tensor is not None for name, tensor in zip(("W", "DW", "B", "DB"), parameters, strict=True)}
    pointers = [coefficients if tensor is None else tensor for tensor in parameters]
    mean, variance = statistics
    if mean is None or variance is None:
        splits = max(1, min(_blocks(rows, 4 * height), 1024 // columns))
        sums = torch.empty(splits, 4, channels, dtype=torch.float32, device=x.device)
        per_program = _blocks(_blocks(rows, splits), height) * height
        _norm_sums[(columns, splits)](x, dx, sums, rows, channels, per_program, BLOCK_ROWS=height, BLOCK_CHANNELS=block)
        mean = variance = coefficients
    else:
        splits, sums = 0, coefficients
    _norm_coefficients[(_blocks(channels, 8),)](
        x, dx, sums, mean, variance, *pointers, coefficients, rows, channels, splits, eps,
        HAS_SUMS=splits > 0, **given, BLOCK_SPLITS=128, BLOCK_CHANNELS=8,
    )  # fmt: skip
    dy = torch.empty_like(dx)
    y = torch.empty_like(x) if want_primal else dy
    low, high = bounds or (0.0, 0.0)
    _norm_apply[(columns, _blocks(rows, 4 * height))](
        x, dx, coefficients, y, dy, rows, channels, low, high,
        CLAMPED=bounds is not None, WANT_PRIMAL=want_primal, BLOCK_ROWS=height, BLOCK_CHANNELS=block, REPEAT=4,
    )  # fmt: skip
    return y, dy


def layer_norm(
    x: Tensor, dx: Tensor, weight: Pair, bias: Pair, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """LayerNorm's output and tangent over the last dimension, in one pass, in the precision asked for."""
    width = x.shape[-1]
    y, dy = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype)
    parameters = (*weight, *bias)
    given = {f"HAS_{name}": tensor is not None for name, tensor in zip(("W", "DW", "B", "DB"), parameters, strict=True)}
    pointers = [y if tensor is None else tensor for tensor in parameters]
    _layer_norm_tangent[(x.numel() // width,)](x, dx, *pointers, y, dy, width, eps, **given, BLOCK=_power_of_two(width))
    return y, dy


def clamp_(x: Tensor, dx: Tensor, low: float, high: float) -> None:
    """Clamp `x` in place and set its tangent to 0 where that held it."""
    count = x.numel()
    _add_clamp[(_blocks(count, 4096),)](x, dx, x, dx, count, low, high, ADDS=False, CLAMPED=True, BLOCK=4096)


def add_(x: Tensor, dx: Tensor, y: Tensor, dy: Tensor, bounds: tuple[float, float] | None) -> None:
    """Add `y` to `x` in place, and tangent to tangent; then clamp as :func:`clamp_` does, if bounds are given."""
    count = x.numel()
    low, high = bounds or (0.0, 0.0)
    _add_clamp[(_blocks(count, 4096),)](
        x, dx, y, dy, count, low, high, ADDS=True, CLAMPED=bounds is not None, BLOCK=4096
    )


def attention(query: Dual, key: Dual, value: Dual, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention and its tangent, (batch, heads, length, size) each, never holding length × length numbers."""
    (q, dq), (k, dk), (v, dv) = (_alike(*pair) for pair in (query, key, value))
    batch, heads, length, size = q.shape
    # As (batch, length, heads, size) in memory, which is what follows in a transformer.
    out, dout = (
        torch.empty(batch, length, heads, size, dtype=q.dtype, device=q.device).transpose(1, 2) for _ in range(2)
    )
    strides = [stride for tensor in (q, k, v, out) for stride in tensor.stride()[:3]]
    width = max(16, _power_of_two(size))
    block = 64 if width <= 64 else 32
    _attention_tangent[(_blocks(length, block), batch * heads)](
        q, dq, k, dk, v, dv, out, dout, heads, length, k.shape[2], size, scale,
        *strides, BLOCK_Q=block, BLOCK_K=block, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out, dout


def _alike(primal: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the same layout, with neighbours in the last dimension."""
    if primal.stride(-1) == 1 and primal.stride() == tangent.stride():
        return primal, tangent
    return primal.contiguous(), tangent.contiguous()


if triton is not None:

    @triton.jit
    def _norm_sums(
        x, dx, sums, rows, channels, per_program, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr
    ) -> None:
        """Per channel, over some rows: sums of x, x², ẋ and xẋ, where x and ẋ are less their value in row 0.

        The shift keeps the small difference of large sums that a variance is from drowning in rounding.
        """
        channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        inside = channel < channels
        first = tl.program_id(1) * per_program
        last = tl.minimum(first + per_program, rows)
        shift_x = tl.load(x + channel, inside, 0.0).to(tl.float32)[None, :]
        shift_dx = tl.load(dx + channel, inside, 0.0).to(tl.float32)[None, :]
        sum_x = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
        sum_xx = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
        sum_dx = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
        sum_xdx = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
        for start in range(first, last, BLOCK_ROWS):
            row = start + tl.arange(0, BLOCK_ROWS)
            here = (row < last)[:, None] & inside[None, :]
            place = row[:, None] * channels + channel[None, :]
            values = tl.where(here, tl.load(x + place, here, 0.0).to(tl.float32) - shift_x, 0.0)
            tangents = tl.where(here, tl.load(dx + place, here, 0.0).to(tl.float32) - shift_dx, 0.0)
            sum_x += values
            sum_xx += values * values
            sum_dx += tangents
            sum_xdx += values * tangents
        out = sums + tl.program_id(1) * 4 * channels + channel
        tl.store(out, tl.sum(sum_x, 0), inside)
        tl.store(out + channels, tl.sum(sum_xx, 0), inside)
        tl.store(out + 2 * channels, tl.sum(sum_dx, 0), inside)
        tl.store(out + 3 * channels, tl.sum(sum_xdx, 0), inside)

    @triton.jit
    def _norm_coefficients(
        x, dx, sums, running_mean, running_variance, weight, dweight, bias, dbias, coefficients,
        rows, channels, splits, eps, HAS_SUMS: tl.constexpr,
        HAS_W: tl.constexpr, HAS_DW: tl.constexpr, HAS_B: tl.constexpr, HAS_DB: tl.constexpr,
        BLOCK_SPLITS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
    ) -> None:  # fmt: skip
        """Per channel, from the sums or the running statistics: μ, μ̇, slope, mixing, β and β̇.

        They give ``y = slope (x − μ) + β`` and ``ẏ = slope (ẋ − μ̇) + mixing (x − μ) + β̇``.
        """
        channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        inside = channel < channels
        sum_x = tl.zeros((BLOCK_CHANNELS,), tl.float32)
        sum_xx = tl.zeros((BLOCK_CHANNELS,), tl.float32)
        sum_dx = tl.zeros((BLOCK_CHANNELS,), tl.float32)
        sum_xdx = tl.zeros((BLOCK_CHANNELS,), tl.float32)
        for start in range(0, splits, BLOCK_SPLITS):
            split = start + tl.arange(0, BLOCK_SPLITS)
            here = (split < splits)[:, None] & inside[None, :]
            place = sums + split[:, None] * 4 * channels + channel[None, :]
            sum_x += tl.sum(tl.load(place, here, 0.0), 0)
            sum_xx += tl.sum(tl.load(place + channels, here, 0.0), 0)
            sum_dx += tl.sum(tl.load(place + 2 * channels, here, 0.0), 0)
            sum_xdx += tl.sum(tl.load(place + 3 * channels, here, 0.0), 0)
        if HAS_SUMS:
            mean_x = sum_x / rows
            mean_dx = sum_dx / rows
            variance = tl.maximum(sum_xx / rows - mean_x * mean_x, 0.0)
            covariance = sum_xdx / rows - mean_x * mean_dx
            mean_x += tl.load(x + channel, inside, 0.0).to(tl.float32)
            mean_dx += tl.load(dx + channel, inside, 0.0).to(tl.float32)
        else:
            mean_x = tl.load(running_mean + channel, inside, 0.0).to(tl.float32)
            variance = tl.load(running_variance + channel, inside, 1.0).to(tl.float32)
            mean_dx = tl.zeros((BLOCK_CHANNELS,), tl.float32)
            covariance = tl.zeros((BLOCK_CHANNELS,), tl.float32)
        inverse = 1.0 / tl.sqrt(variance + eps)
        slope = inverse
        if HAS_W:
            slope *= tl.load(weight + channel, inside, 0.0).to(tl.float32)
        mixing = -slope * inverse * inverse * covariance
        if HAS_DW:
            mixing += inverse * tl.load(dweight + channel, inside, 0.0).to(tl.float32)
        offset = tl.zeros((BLOCK_CHANNELS,), tl.float32)
        if HAS_B:
            offset += tl.load(bias + channel, inside, 0.0).to(tl.float32)
        offset_tangent = tl.zeros((BLOCK_CHANNELS,), tl.float32)
        if HAS_DB:
            offset_tangent += tl.load(dbias + channel, inside, 0.0).to(tl.float32)
        out = coefficients + channel
        tl.store(out, mean_x, inside)
        tl.store(out + channels, mean_dx, inside)
        tl.store(out + 2 * channels, slope, inside)
        tl.store(out + 3 * channels, mixing, inside)
        tl.store(out + 4 * channels, offset, inside)
        tl.store(out + 5 * channels, offset_tangent, inside)

    @triton.jit
    def _norm_apply(
        x, dx, coefficients, y, dy, rows, channels, low, high,
        CLAMPED: tl.constexpr, WANT_PRIMAL: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, REPEAT: tl.constexpr,
    ) -> None:  # fmt: skip
        channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        inside = channel < channels
        row_of = coefficients + channel
        mean = tl.load(row_of, inside, 0.0)[None, :]
        mean_tangent = tl.load(row_of + channels, inside, 0.0)[None, :]
        slope = tl.load(row_of + 2 * channels, inside, 0.0)[None, :]
        mixing = tl.load(row_of + 3 * channels, inside, 0.0)[None, :]
        bias = tl.load(row_of + 4 * channels, inside, 0.0)[None, :]
        bias_tangent = tl.load(row_of + 5 * channels, inside, 0.0)[None, :]
        for part in tl.static_range(REPEAT):
            row = (tl.program_id(1) * REPEAT + part) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            here = (row < rows)[:, None] & inside[None, :]
            place = row[:, None] * channels + channel[None, :]
            centred = tl.load(x + place, here, 0.0).to(tl.float32) - mean
            tangent = tl.load(dx + place, here, 0.0).to(tl.float32) - mean_tangent
            output = slope * centred + bias
            tangent = slope * tangent + mixing * centred + bias_tangent
            if CLAMPED:
                tangent = tl.where((output > low) & (output < high), tangent, 0.0)
                output = tl.minimum(tl.maximum(output, low), high)
            if WANT_PRIMAL:
                tl.store(y + place, output.to(y.dtype.element_ty), here)
            tl.store(dy + place, tangent.to(dy.dtype.element_ty), here)

    @triton.jit
    def _layer_norm_tangent(
        x, dx, weight, dweight, bias, dbias, y, dy, width, eps,
        HAS_W: tl.constexpr, HAS_DW: tl.constexpr, HAS_B: tl.constexpr, HAS_DB: tl.constexpr, BLOCK: tl.constexpr,
    ) -> None:  # fmt: skip
        column = tl.arange(0, BLOCK)
        inside = column < width
        place = tl.program_id(0).to(tl.int64) * width + column
        values = tl.load(x + place, inside, 0.0).to(tl.float32)
        tangents = tl.load(dx + place, inside, 0.0).to(tl.float32)
        centred = tl.where(inside, values - tl.sum(values) / width, 0.0)
        centred_tangent = tl.where(inside, tangents - tl.sum(tangents) / width, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(centred * centred) / width + eps)
        normalised = centred * inverse
        along = tl.sum(normalised * centred_tangent) / width
        output = normalised
        tangent = inverse * (centred_tangent - normalised * along)
        if HAS_W:
            scale = tl.load(weight + column, inside, 0.0).to(tl.float32)
            output *= scale
            tangent *= scale
        if HAS_DW:
            tangent += tl.load(dweight + column, inside, 0.0).to(tl.float32) * normalised
        if HAS_B:
            output += tl.load(bias + column, inside, 0.0).to(tl.float32)
        if HAS_DB:
            tangent += tl.load(dbias + column, inside, 0.0).to(tl.float32)
        tl.store(y + place, output.to(y.dtype.element_ty), inside)
        tl.store(dy + place, tangent.to(dy.dtype.element_ty), inside)

    @triton.jit
    def _add_clamp(
        x, dx, y, dy, count, low, high, ADDS: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
    ) -> None:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        values = tl.load(x + place, inside, 0.0)
        tangents = tl.load(dx + place, inside, 0.0)
        if ADDS:
            # Rounded to the tensor's precision before it is clamped, as two operators would.
            values = (values.to(tl.float32) + tl.load(y + place, inside, 0.0).to(tl.float32)).to(values.dtype)
            tangents = (tangents.to(tl.float32) + tl.load(dy + place, inside, 0.0).to(tl.float32)).to(tangents.dtype)
        if CLAMPED:
            exact = values.to(tl.float32)
            tangents = tl.where((exact > low) & (exact < high), tangents, 0.0)
            values = tl.minimum(tl.maximum(exact, low), high).to(x.dtype.element_ty)
        tl.store(dx + place, tangents.to(dx.dtype.element_ty), inside)
        tl.store(x + place, values, inside)

    @triton.jit
    def _attention_tangent(
        q, dq, k, dk, v, dv, out, dout, heads, length, keys, size, scale,
        q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
        BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    ) -> None:  # fmt: skip
        """One block of queries against all keys, with the running maximum of the scores as reference."""
        batch = tl.program_id(1).to(tl.int64) // heads
        head = tl.program_id(1).to(tl.int64) % heads
        row = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        column = tl.arange(0, WIDTH)
        in_rows = (row < length)[:, None] & (column < size)[None, :]
        place = batch * q_batch + head * q_head + row[:, None] * q_row + column[None, :]
        query = tl.load(q + place, in_rows, 0.0)
        query_tangent = tl.load(dq + place, in_rows, 0.0)
        highest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        total_tangent = tl.zeros((BLOCK_Q,), tl.float32)
        sum_out = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
        sum_tangent = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
        for start in range(0, keys, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            here = (at < keys)[:, None] & (column < size)[None, :]
            place = batch * k_batch + head * k_head + at[:, None] * k_row + column[None, :]
            key = tl.trans(tl.load(k + place, here, 0.0))
            key_tangent = tl.trans(tl.load(dk + place, here, 0.0))
            scores = tl.dot(query, key) * scale
            scores_tangent = (tl.dot(query_tangent, key) + tl.dot(query, key_tangent)) * scale
            scores = tl.where((at < keys)[None, :], scores, float("-inf"))
            new = tl.maximum(highest, tl.max(scores, 1))
            fade = tl.exp(highest - new)
            weights = tl.exp(scores - new[:, None])
            moved = weights * scores_tangent
            total = total * fade + tl.sum(weights, 1)
            total_tangent = total_tangent * fade + tl.sum(moved, 1)
            place = batch * v_batch + head * v_head + at[:, None] * v_row + column[None, :]
            value = tl.load(v + place, here, 0.0)
            value_tangent = tl.load(dv + place, here, 0.0)
            kind = value.dtype
            sum_out = sum_out * fade[:, None] + tl.dot(weights.to(kind), value)
            sum_tangent = sum_tangent * fade[:, None] + tl.dot(moved.to(kind), value)
            sum_tangent += tl.dot(weights.to(kind), value_tangent)
            highest = new
        output = sum_out / total[:, None]
        tangent = sum_tangent / total[:, None] - (total_tangent / total)[:, None] * output
        place = batch * out_batch + head * out_head + row[:, None] * out_row + column[None, :]
        tl.store(out + place, output.to(out.dtype.element_ty), in_rows)
        tl.store(dout + place, tangent.to(dout.dtype.element_ty), in_rows)
