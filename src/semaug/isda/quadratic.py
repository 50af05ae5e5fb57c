"""The quadratic form of diagonal covariances, computed in chunks of classes.

With many classes the weight (C, D) is the largest tensor of the loss. Nothing else of that size is held, except for the
gradient of the weight in a backward pass.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from semaug.isda.precision import full_precision

_CHUNK = 2**22
"""Numbers of the weight in a chunk: few enough for the cache of a GPU (16 MB in fp32), and enough to make the cost of
launching a dozen operators per chunk negligible."""


def quadratic_form(
    features: Tensor | None,
    bias: Tensor | None,
    variance: Tensor,
    weight: Tensor,
    labels: Tensor,
    other: Tensor | None = None,
) -> Tensor:
    """Compute ``a_i·v_j + b_j + Σ_d s_id (w_jd − w̄_id)(v_jd − v̄_id)``, with V = `other` or, if that is None, V = W.

    ``w̄_i`` is explained in :mod:`semaug.isda.covariance`. All tensors have one precision, which is at least fp32.

    Args:
        features: Features a, shape (N, D); None leaves out the first two terms.
        bias: Bias b, shape (C,), or None.
        variance: Variances s, shape (N, D).
        weight: Weight W of the head, shape (C, D).
        labels: Class indices (N,) or probabilities (N, C).
        other: V, shape (C, D), or None.

    Returns:
        The sum, shape (N, C); with class indices the last term is exactly 0 for the own class.
    """
    # W and V are centred by their mean rows: only differences count, and smaller numbers lose less to rounding. The
    # centres change nothing but rounding, so they are constants.
    centres = weight.detach().mean(0), None if other is None else other.detach().mean(0)
    inputs = features, bias, variance, weight, other, labels, *centres
    # torch.compile does not accept a Function with forward-mode derivatives; it fuses the plain operators itself.
    result: Tensor = _form(*inputs) if torch.compiler.is_compiling() else _Form.apply(*inputs)
    return result


def _form(*inputs: Any) -> Tensor:
    """:func:`quadratic_form` in plain operators."""
    features, bias, variance, weight, other, labels, centre, other_centre = inputs
    own = own_other = _centred_own(weight, labels, centre)
    if other is not None:
        own_other = _centred_own(other, labels, other_centre)
    scaled, scaled_other = variance * own, variance * own_other
    size = _chunk_size(weight)
    columns = []
    for rows, other_rows in itertools.zip_longest(weight.split(size), () if other is None else other.split(size)):
        w = rows - centre
        if other_rows is None:
            columns.append(torch.addmm(scaled @ w.T, variance, w.square().T, beta=-2))
        else:
            v = other_rows - other_centre
            crossed = torch.addmm(scaled @ v.T, scaled_other, w.T)
            columns.append(torch.addmm(crossed, variance, (w * v).T, beta=-1))
    quadratic = torch.cat(columns, 1).add_((scaled * own_other).sum(1, keepdim=True))
    if not labels.is_floating_point():
        quadratic = quadratic.scatter(1, labels[:, None], 0.0)  # the expansion cancels only up to rounding
    return quadratic if features is None else F.linear(features, weight if other is None else other, bias) + quadratic


def _chunk_size(weight: Tensor) -> int:
    """Rows of the weight (C, D) in a chunk: at most `_CHUNK` numbers, in chunks of about equal size."""
    classes, dimensions = weight.shape
    chunks = math.ceil(classes / max(1, _CHUNK // dimensions))
    return math.ceil(classes / chunks)


def _centred_own(weight: Tensor, labels: Tensor, centre: Tensor) -> Tensor:
    """``w̄_i`` of the centred weight, (N, D)."""
    if not labels.is_floating_point():
        return weight[labels] - centre
    size = _chunk_size(weight)
    chunks = zip(labels.to(weight.dtype).split(size, 1), weight.split(size), strict=True)
    mean: Tensor = functools.reduce(torch.add, [part @ (rows - centre) for part, rows in chunks])
    return mean


class _Form(torch.autograd.Function):
    """:func:`_form` with a gradient that saves memory: it stores only the inputs, and never a centred weight.

    This holds for what training and the meta loop compute: the gradient for V = W, and otherwise the gradient in the
    variance. All other derivatives are left to autograd. Forward mode over forward mode is wrong: torch loses the outer
    tangents in a Function (pytorch/pytorch#197867).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return _form(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs: tuple[Any, ...] = ctx.saved_tensors
        results: list[Tensor | None] = [None] * len(inputs)
        if gradient is None:
            return tuple(results)
        needed = ctx.needs_input_grad
        bilinear_weight = inputs[4] is not None and (needed[3] or needed[4])
        with full_precision(gradient):
            if not (torch.is_grad_enabled() or needed[5] or bilinear_weight):
                results[:4] = _gradients(gradient, needed, inputs)
                return tuple(results)
            places = [place for place, need in enumerate(needed) if need]
            for place, result in zip(places, _pull_back(inputs, places)(gradient), strict=True):
                results[place] = result
            return tuple(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        inputs: tuple[Any, ...] = ctx.saved_tensors
        places = [place for place, tangent in enumerate(tangents[:6]) if tangent is not None]
        with full_precision(inputs[2]):
            # Forward mode as the transpose of reverse mode, because forward mode cannot be nested here.
            zero = inputs[2].new_zeros(len(inputs[2]), len(inputs[3]))
            push_forward = torch.func.vjp(_pull_back(inputs, places), zero)[1]
            result: Tensor = push_forward(tuple(tangents[place] for place in places))[0]
            return result


def _pull_back(inputs: Sequence[Any], places: Sequence[int]) -> Any:
    """The function from a gradient of :func:`_form` to the gradients of its inputs at `places`, by autograd."""

    def form(*tensors: Tensor) -> Tensor:
        changed = dict(enumerate(inputs)) | dict(zip(places, tensors, strict=True))
        return _form(*changed.values())

    return torch.func.vjp(form, *(inputs[place] for place in places))[1]


def _gradients(gradient: Tensor, needed: Sequence[bool], inputs: Sequence[Any]) -> list[Tensor | None]:
    """The gradients of :func:`_form` in features, bias, variance and, for V = W, the weight: one pass over the weight.

    With G the gradient of the result (of the quadratic form without the own class, where that is constant),

        ``∂s = G(W⊙V) − w̄⊙GV − v̄⊙GW + (G1)⊙w̄⊙v̄``,   ``∂W = Gᵀ(a − 2s⊙w̄) + 2Gᵀs⊙W``,   ``∂w̄ = −2s⊙(GW − (G1)⊙w̄)``,

    and ∂w̄ is added to the rows of the weight that make up w̄.
    """
    features, _, variance, weight, other, labels, centre, other_centre = inputs
    for_features, for_bias, for_variance, for_weight = needed[:4]
    same = other is None
    if same:
        other, other_centre = weight, centre
    own = _centred_own(weight, labels, centre)
    own_other = own if same else _centred_own(other, labels, other_centre)
    others, of_own = gradient, gradient.new_zeros(())
    if not labels.is_floating_point():
        others, of_own = gradient.scatter(1, labels[:, None], 0.0), gradient.gather(1, labels[:, None])

    double = 2 * variance
    to_weight = -double * own if features is None else torch.addcmul(features, double, own, value=-1)
    # Created from the gradient, so that under vmap they have its batch dimension; beta=0 overwrites their contents.
    products, along_other = gradient.new_zeros(variance.shape), gradient.new_zeros(variance.shape)
    along = along_other if same else gradient.new_zeros(variance.shape)
    by_weight = gradient.new_empty(weight.shape) if for_weight else None
    size = _chunk_size(weight)
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        part = others[:, rows]
        w = weight[rows] - centre
        v = w if same else other[rows] - other_centre
        along_other.addmm_(part, v)
        if not same:
            along.addmm_(part, w)
        if by_weight is not None:
            by_weight[rows].addmm_(part.T, double, beta=0).mul_(w).addmm_(part.T, to_weight)
        if for_variance:
            products.addmm_(part, v.mul_(w))
        del w, v  # before the next chunk is created

    from_other = torch.addcmul(along_other, others.sum(1, keepdim=True), own_other, value=-1)
    if by_weight is not None:
        by_own = -double * from_other
        _add_to_own(by_weight, labels, by_own if features is None else by_own + of_own * features)
    by_features = by_variance = None
    if for_features:
        by_features = along_other + of_own * own_other + gradient.sum(1, keepdim=True) * other_centre
    if for_variance:
        by_variance = products - own * from_other - own_other * along
    return [by_features, gradient.sum(0) if for_bias else None, by_variance, by_weight]


def _add_to_own(by_weight: Tensor, labels: Tensor, by_own: Tensor) -> None:
    """Add the gradient of the own weights ``w̄``, (N, D), to that of the weight, in place.

    By matrix products for class indices too: adding rows by index is slow on a GPU if it is to be deterministic.
    """
    if not labels.is_floating_point():
        labels = by_own.new_zeros(len(labels), len(by_weight)).scatter(1, labels[:, None], 1.0)
    size = _chunk_size(by_weight)
    for rows, part in zip(by_weight.split(size), labels.to(by_own.dtype).split(size, 1), strict=True):
        rows.addmm_(part.T, by_own)
