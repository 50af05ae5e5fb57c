"""The quadratic form of a diagonal covariance for many classes: no C×D numbers besides the weight and its gradient.

``(w_j − w̄_i)ᵀ diag(s_i) (w_j − w̄_i)`` is worked off in chunks of classes, forward, backward and along a direction.
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


def without_own_class(quadratic: Tensor, labels: Tensor) -> Tensor:
    """Set the own-class column to exactly 0: its expansion cancels only up to rounding."""
    return quadratic if labels.is_floating_point() else quadratic.scatter(1, labels[:, None], 0.0)


_CHUNK = 2**22
"""How many numbers of the weight are worked off at a time: few enough for the cache of a GPU (16 MB in fp32), and many
enough that starting a dozen operators for each chunk does not count."""


def _chunk_size(weight: Tensor) -> int:
    """How many rows of the weight (C, D) make a chunk: at most `_CHUNK` numbers, in chunks of about equal size."""
    classes, dimensions = weight.shape
    chunks = math.ceil(classes / max(1, _CHUNK // dimensions))
    return math.ceil(classes / chunks)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return sum(terms[1:], start=terms[0])


def _centred_own(weight: Tensor, labels: Tensor, centre: Tensor) -> Tensor:
    """``w̄_i`` of the weight less its `centre`, (N, D)."""
    if not labels.is_floating_point():
        return weight[labels] - centre
    size = _chunk_size(weight)
    chunks = zip(labels.to(weight.dtype).split(size, 1), weight.split(size), strict=True)
    return _sum([part @ (rows - centre) for part, rows in chunks])


def augmented(features: Tensor | None, bias: Tensor | None, variance: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``a_i·w_j + b_j + Σ_d s_id (w_jd − w̄_id)²``, (N, C), of tensors in one precision."""
    inputs = features, bias, variance, weight, None, labels, weight.detach().mean(0), None
    # torch.compile does not take a Function with a forward-mode formula, and fuses the plain operators itself.
    return _form(*inputs) if torch.compiler.is_compiling() else _apply(*inputs)


def augmented_along(features: Tensor, variance: Tensor, weight: Tensor, d_weight: Tensor, labels: Tensor) -> Tensor:
    """The derivative of :func:`augmented` along a direction of the weight: ``a_i·ẇ_j + 2 Σ_d s_id (w − w̄)(ẇ − w̄̇)``."""
    inputs = features, None, 2 * variance, weight, d_weight, labels, weight.detach().mean(0), d_weight.detach().mean(0)
    return _form(*inputs) if torch.compiler.is_compiling() else _apply(*inputs)


def _form(
    features: Tensor | None,
    bias: Tensor | None,
    variance: Tensor,
    left: Tensor,
    right: Tensor | None,
    labels: Tensor,
    left_centre: Tensor,
    right_centre: Tensor | None,
) -> Tensor:
    """``a_i·v_j + b_j + Σ_d s_id (u_jd − ū_id)(v_jd − v̄_id)``, (N, C), with U = ``left``, V = ``right`` or, if None, U.

    Without ``features`` the first two terms are left out. U and V are centred, by their mean rows, because only
    differences count, and small ones cancel less. The centre changes the result by rounding only: it is a constant.
    """
    own_left = own_right = _centred_own(left, labels, left_centre)
    if right is not None and right_centre is not None:
        own_right = _centred_own(right, labels, right_centre)
    scaled, scaled_right = variance * own_left, variance * own_right
    size = _chunk_size(left)
    columns = []
    for rows, right_rows in itertools.zip_longest(left.split(size), () if right is None else right.split(size)):
        u = rows - left_centre
        if right_rows is None:
            columns.append(torch.addmm(scaled @ u.T, variance, u.square().T, beta=-2))
        else:
            v = right_rows - right_centre
            crossed = torch.addmm(scaled @ v.T, scaled_right, u.T)
            columns.append(torch.addmm(crossed, variance, (u * v).T, beta=-1))
    quadratic = torch.cat(columns, 1).add_((scaled * own_right).sum(1, keepdim=True))
    quadratic = without_own_class(quadratic, labels)
    return quadratic if features is None else F.linear(features, left if right is None else right, bias) + quadratic


def _form_at(inputs: Sequence[Any], places: Sequence[int], *tensors: Tensor) -> Tensor:
    """:func:`_form` of the inputs, with `tensors` at some places."""
    changed = list(inputs)
    for place, tensor in zip(places, tensors, strict=True):
        changed[place] = tensor
    return _form(*changed)


def _form_gradients(gradient: Tensor, needed: Sequence[bool], inputs: Sequence[Any]) -> list[Tensor | None]:
    """The gradients of :func:`_form` in its first five inputs, given that in its result: one pass over the weights.

    With G the gradient, its own-class column aside since that of the quadratic form is constant,

        ``∂s = G(U⊙V) − ū⊙GV − v̄⊙GU + (G1)⊙ū⊙v̄``,   ``∂V = Gᵀ(a − s⊙ū) + Gᵀs ⊙ U``,   ``∂v̄ = −s⊙(GU − (G1)⊙ū)``,

    and ∂v̄ goes to the rows of V that make up v̄. ∂U is ∂V with U and V exchanged and without a; for V = U it is the sum.
    """
    features, _, variance, left, right, labels, left_centre, right_centre = inputs
    for_features, for_bias, for_variance, for_left, for_right = needed[:5]
    same = right is None
    if same:  # what follows computes the gradient in V, here that in both
        right, right_centre, for_left, for_right = left, left_centre, False, for_left
    own_left = _centred_own(left, labels, left_centre)
    own_right = own_left if same else _centred_own(right, labels, right_centre)
    others, of_own = gradient, gradient.new_zeros(())
    if not labels.is_floating_point():
        others, of_own = gradient.scatter(1, labels[:, None], 0.0), gradient.gather(1, labels[:, None])

    scale = 2 * variance if same else variance
    to_right = -scale * own_left if features is None else torch.addcmul(features, scale, own_left, value=-1)
    # Made from the gradient, so that under vmap they have its batch dimension. beta=0 writes over what was there.
    products, along_right = gradient.new_zeros(variance.shape), gradient.new_zeros(variance.shape)
    along_left = along_right if same else gradient.new_zeros(variance.shape)
    by_left = gradient.new_empty(left.shape) if for_left else None
    by_right = gradient.new_empty(left.shape) if for_right else None
    size = _chunk_size(left)
    for start in range(0, len(left), size):
        rows = slice(start, start + size)
        part = others[:, rows]
        u = left[rows] - left_centre
        v = u if same else right[rows] - right_centre
        along_right.addmm_(part, v)
        if not same:
            along_left.addmm_(part, u)
        if by_left is not None:
            by_left[rows].addmm_(part.T, variance, beta=0).mul_(v).addmm_(part.T, variance * own_right, alpha=-1)
        if by_right is not None:
            by_right[rows].addmm_(part.T, scale, beta=0).mul_(u).addmm_(part.T, to_right)
        if for_variance:
            products.addmm_(part, v.mul_(u))
        del u, v  # before the next are made

    total = others.sum(1, keepdim=True)
    from_right = torch.addcmul(along_right, total, own_right, value=-1)
    from_left = from_right if same else torch.addcmul(along_left, total, own_left, value=-1)
    if by_left is not None:
        _add_to_own(by_left, labels, -variance * from_right)
    if by_right is not None:
        by_own = -scale * from_left
        _add_to_own(by_right, labels, by_own if features is None else by_own + of_own * features)
    by_features = by_variance = None
    if for_features:
        by_features = along_right + of_own * own_right + gradient.sum(1, keepdim=True) * right_centre
    if for_variance:
        by_variance = products - own_left * from_right - own_right * along_left
    by_bias = gradient.sum(0) if for_bias else None
    return [by_features, by_bias, by_variance, *((by_right, None) if same else (by_left, by_right))]


def _add_to_own(by_weight: Tensor, labels: Tensor, by_own: Tensor) -> None:
    """Add the gradient in the own weights ``w̄``, (N, D), to that in the weight, in place."""
    if not labels.is_floating_point():
        by_weight.index_put_((labels,), by_own, accumulate=True)
        return
    size = _chunk_size(by_weight)
    for rows, part in zip(by_weight.split(size), labels.to(by_own.dtype).split(size, 1), strict=True):
        rows.addmm_(part.T, by_own)


class _Form(torch.autograd.Function):
    """:func:`_form` with derivatives that hold little: it keeps its inputs alone and never a centred weight.

    The derivative along a direction is made of such forms again, so reverse mode over forward mode holds as little.
    What else may be asked for (a second reverse mode, derivatives in soft labels) is left to autograd. Forward mode
    over forward mode is not for use: torch loses the outer tangents in a Function (pytorch/pytorch#197867).
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
        with full_precision(gradient):
            if not torch.is_grad_enabled() and not ctx.needs_input_grad[5]:
                results[:5] = _form_gradients(gradient, ctx.needs_input_grad, inputs)
                return tuple(results)
            needed = [place for place, need in enumerate(ctx.needs_input_grad) if need]
            in_needed = functools.partial(_form_at, inputs, needed)
            pull_back = torch.func.vjp(in_needed, *(inputs[place] for place in needed))[1]
            for place, result in zip(needed, pull_back(gradient), strict=True):
                results[place] = result
            return tuple(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        features, _, variance, left, right, labels, left_centre, right_centre = inputs = ctx.saved_tensors
        by_features, by_bias, by_variance, by_left, by_right, by_labels = tangents[:6]
        terms: list[Tensor] = []
        with full_precision(variance):
            if by_features is not None:
                terms.append(F.linear(by_features, left if right is None else right))
            if by_bias is not None:
                terms.append(by_bias.expand(len(variance), -1))
            if by_variance is not None:
                terms.append(_apply(None, None, by_variance, *inputs[3:]))
            if right is None and by_left is not None:
                centres = left_centre, by_left.detach().mean(0)
                terms.append(_apply(features, None, 2 * variance, left, by_left, labels, *centres))
            elif by_left is not None:
                centres = by_left.detach().mean(0), right_centre
                terms.append(_apply(None, None, variance, by_left, right, labels, *centres))
            if by_right is not None:
                centres = left_centre, by_right.detach().mean(0)
                terms.append(_apply(features, None, variance, left, by_right, labels, *centres))
            if by_labels is not None:
                # Forward mode as the transpose of reverse mode, since it cannot be nested here.
                pull_back = torch.func.vjp(functools.partial(_form_at, inputs, [5]), labels)[1]
                terms.append(torch.func.vjp(pull_back, torch.zeros_like(labels))[1]((by_labels,))[0])
        return _sum(terms)


def _apply(*inputs: Any) -> Tensor:
    result: Tensor = _Form.apply(*inputs)
    return result
