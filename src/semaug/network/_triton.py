"""Triton code of the fused tangent kernels; :mod:`semaug.network.kernels` launches them.

``x`` is a tensor and ``dx`` its tangent; both are read once. All arithmetic is in fp32, whatever is read and written.
"""

import triton
import triton.language as tl


@triton.jit
def _norm_sums(
    x, dx, sums, rows, channels, per_program, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr
) -> None:
    """Sums of x, x², ẋ and xẋ for each channel over some rows.

    x and ẋ are first shifted by their value in row 0: a variance is a small difference of large sums otherwise.
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
    """μ, μ̇, slope, mixing, β and β̇ for each channel, from the sums or the running statistics.

    ``y = slope (x − μ) + β`` and ``ẏ = slope (ẋ − μ̇) + mixing (x − μ) + β̇``.
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
    slope = inverse * tl.load(weight + channel, inside & HAS_W, 1.0).to(tl.float32)
    mixing = -slope * inverse * inverse * covariance
    mixing += inverse * tl.load(dweight + channel, inside & HAS_DW, 0.0).to(tl.float32)
    offset = tl.load(bias + channel, inside & HAS_B, 0.0).to(tl.float32)
    offset_tangent = tl.load(dbias + channel, inside & HAS_DB, 0.0).to(tl.float32)
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
def _layer_norm(
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
    scale = tl.load(weight + column, inside & HAS_W, 1.0).to(tl.float32)
    output = normalised * scale + tl.load(bias + column, inside & HAS_B, 0.0).to(tl.float32)
    tangent = inverse * (centred_tangent - normalised * along) * scale
    tangent += tl.load(dweight + column, inside & HAS_DW, 0.0).to(tl.float32) * normalised
    tangent += tl.load(dbias + column, inside & HAS_DB, 0.0).to(tl.float32)
    tl.store(y + place, output.to(y.dtype.element_ty), inside)
    tl.store(dy + place, tangent.to(dy.dtype.element_ty), inside)


@triton.jit
def _add_clamp(x, dx, y, dy, count, low, high, ADDS: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    values = tl.load(x + place, inside, 0.0)
    tangents = tl.load(dx + place, inside, 0.0)
    if ADDS:
        # Rounded to the tensor's precision before clamping, as two separate operators would.
        values = (values.to(tl.float32) + tl.load(y + place, inside, 0.0).to(tl.float32)).to(values.dtype)
        tangents = (tangents.to(tl.float32) + tl.load(dy + place, inside, 0.0).to(tl.float32)).to(tangents.dtype)
    if CLAMPED:
        exact = values.to(tl.float32)
        tangents = tl.where((exact > low) & (exact < high), tangents, 0.0)
        values = tl.minimum(tl.maximum(exact, low), high).to(x.dtype.element_ty)
    tl.store(dx + place, tangents.to(dx.dtype.element_ty), inside)
    tl.store(x + place, values, inside)


@triton.jit
def _attention(
    q, dq, k, dk, v, dv, out, dout, heads, length, keys, size, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """One block of queries against all keys; the running maximum of the scores keeps exp in range."""
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
