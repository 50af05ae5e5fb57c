"""Forward mode, made fast: rules of our own for the operators in which a network's tangent pass spends its time.

torch can push a tangent through nearly every operator, but not quickly: BatchNorm's formula alone is some twenty
passes over the activations. :class:`TangentRules` is a mode under which convolutions, linear layers, BatchNorm,
LayerNorm, attention and in-place ReLUs on dual tensors follow the closed forms below; every other operator keeps
torch's formula. The rules say the same as torch's, to rounding; on a GPU they run in fused kernels
(:mod:`semaug.network.kernels`).

A tangent pass repeats a forward pass that has been made before. :class:`Recorder` is a mode for that first pass: it
notes, in order, what the operators with a rule put out. While autograd's graph of the first pass exists this costs next
to nothing, since the graph holds nearly all of these tensors anyway, and the tangent pass need not compute them again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from semaug.isda.precision import widened
from semaug.network import kernels

Bounds = tuple[float, float]
"""Where an activation that clamps its input passes it on: (0, ∞) for ReLU, (0, 6) for ReLU6."""


@dataclass
class Call:
    """One call of an operator with a rule."""

    function: Any
    output: Tensor | None = None  # without its graph, where it is worth keeping
    version: int = 0
    clamped: Bounds | None = None  # by an in-place activation right after it

    def keep(self, output: Tensor) -> None:
        self.output, self.version = output.detach(), output._version

    def kept(self, like: Tensor) -> Tensor | None:
        """The output, unless something has overwritten it since or it is not `like` the one of this pass."""
        if self.output is None or self.output._version != self.version:
            return None
        return self.output if self.output.shape == like.shape and self.output.dtype == like.dtype else None


@dataclass
class Record:
    """The calls of a forward pass, in order."""

    calls: list[Call] = field(default_factory=list)

    def forget_outputs(self) -> None:
        """Let go of the tensors; what is left says how the calls follow each other."""
        for call in self.calls:
            call.output = None


class Recorder(TorchFunctionMode):
    """Notes the calls of a forward pass in a :class:`Record`; those of BatchNorm only if asked to."""

    def __init__(self, record: Record, batch_norm: bool = True) -> None:
        super().__init__()
        self.calls, self.batch_norm = record.calls, batch_norm
        self._fresh: Tensor | None = None  # the last output, of BatchNorm or +=, that nothing has been done with yet

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        output = func(*args, **kwargs)
        fresh, self._fresh = self._fresh, None
        if _is_recorded(func, args) and (self.batch_norm or func is not F.batch_norm):
            self.calls.append(Call(func))
            if func in KEPT:
                self.calls[-1].keep(output)
            else:
                self._fresh = output
        elif fresh is not None and args and args[0] is fresh:
            last, last.clamped = self.calls[-1], in_place_bounds(func, args, kwargs)
            if last.clamped is not None and last.function is F.batch_norm:
                last.keep(fresh)
        return output


def _is_recorded(func: Any, args: Sequence[Any]) -> bool:
    return (func in KEPT or func in CLAMPABLE) and bool(args) and args[0].is_floating_point()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Attention; with dropout not by a fused kernel, whose masks come in an order that no other pass can repeat."""
    with sdpa_kernel(SDPBackend.MATH) if dropout_p else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)


class TangentRules(TorchFunctionMode):
    """Pushes dual tensors through the operators that have a rule here, with a record of the same pass if there is one.

    For passes without gradient only: what the rules return has no graph.
    """

    def __init__(self, record: Record | None = None) -> None:
        super().__init__()
        self._calls = iter(record.calls if record is not None else ())
        self._clamped: Tensor | None = None  # what an operator put out, the activation that follows already applied

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **kwargs)
        clamped, self._clamped = self._clamped, None
        if clamped is not None and args and args[0] is clamped:
            return clamped
        call = self._next(func) if _is_recorded(func, args) else None
        output = NotImplemented if torch.is_grad_enabled() else rule(call, *args, **kwargs)
        if output is NotImplemented:
            return func(*args, **kwargs)
        if call is not None and call.clamped is not None:
            self._clamped = output
        return output

    def _next(self, func: Any) -> Call | None:
        """The record of this call; none once the pass has gone another way than the recorded one."""
        call = next(self._calls, None)
        if call is not None and call.function is not func:
            self._calls, call = iter(()), None
        return call


def in_place_bounds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounds | None:
    """What an activation clamps to, if it is one and works in place."""
    if func in (torch.relu_, Tensor.relu_):
        return 0.0, float("inf")
    if func in (F.relu, F.relu6):
        in_place = args[1] if len(args) > 1 else kwargs.get("inplace", False)
        return (0.0, 6.0 if func is F.relu6 else float("inf")) if in_place else None
    if func is F.hardtanh:
        low, high, in_place = _hardtanh(*args, **kwargs)
        return (low, high) if in_place else None
    return None


def _hardtanh(
    input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> tuple[float, float, bool]:
    return min_val, max_val, inplace


# -- rules ------------------------------------------------------------------------------------------------------------
# Each takes the record of its call and the operator's own arguments, and gives a dual tensor; NotImplemented where it
# has nothing better to offer than torch.


def _split(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Primal and tangent."""
    return (None, None) if tensor is None else tuple(unpack_dual(tensor))


def _kept_or(call: Call | None, tangent: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    kept = None if call is None else call.kept(like=tangent)
    return compute() if kept is None else kept


def _dual(primal: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = make_dual(primal, tangent.to(primal.dtype))
    return dual


def _convolution(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """``ẏ = conv(ẋ, w) + conv(x, ẇ) + ḃ``."""

    def rule(
        call: Call | None, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        (x, dx), (w, dw), (b, db) = _split(input), _split(weight), _split(bias)
        assert x is not None and w is not None  # noqa: PT018
        if dx is None and dw is None:
            return NotImplemented
        if dx is None or dw is None:
            tangent = function(x, dw, db, *args, **kwargs) if dx is None else function(dx, w, db, *args, **kwargs)
        elif _pointwise(x, dx, w, args, kwargs):
            rows, rows_tangent = (tensor.permute(0, 2, 3, 1).flatten(0, 2) for tensor in (x, dx))
            flat = _matmul_tangent(rows, rows_tangent, w.flatten(1), dw.flatten(1), db)
            tangent = flat.view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)
        else:
            tangent = function(dx, w, db, *args, **kwargs)
            tangent += function(x, dw, None, *args, **kwargs)
        return _dual(_kept_or(call, tangent, lambda: function(x, w, b, *args, **kwargs)), tangent)

    return rule


def _pointwise(x: Tensor, dx: Tensor, w: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a convolution is a product of matrices as they lie in memory; worth using in half precision."""
    options = dict(zip(("stride", "padding", "dilation", "groups"), args, strict=False)) | dict(kwargs)
    plain = all(_is(options.get(name, value), value) for name, value in (("stride", 1), ("padding", 0), ("groups", 1)))
    return plain and x.ndim == 4 and w.shape[2:] == (1, 1) and x.dtype != torch.float32 and kernels.fits(x, dx)


def _is(option: Any, value: int) -> bool:
    return bool(option == value or option in ((value,), (value, value), [value, value]))


def _matmul_tangent(x: Tensor, dx: Tensor, w: Tensor, dw: Tensor, db: Tensor | None) -> Tensor:
    """``dx·wᵀ + x·dwᵀ + db`` for matrices, the second product added to the first as it is computed."""
    tangent = F.linear(dx, w, db)  # in autocast's precision, if that is on
    return tangent.addmm_(x.to(tangent.dtype), dw.to(tangent.dtype).T)


def _linear(call: Call | None, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """``ẏ = ẋ·wᵀ + x·ẇᵀ + ḃ``."""
    (x, dx), (w, dw), (b, db) = _split(input), _split(weight), _split(bias)
    assert x is not None and w is not None  # noqa: PT018
    if dx is None and dw is None:
        return NotImplemented
    if dx is None:
        tangent = F.linear(x, dw, db)  # type: ignore[arg-type]
    elif dw is None:
        tangent = F.linear(dx, w, db)
    else:
        rows, rows_tangent = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, dx))
        tangent = _matmul_tangent(rows, rows_tangent, w, dw, db).view(*x.shape[:-1], w.shape[0])
    return _dual(_kept_or(call, tangent, lambda: F.linear(x, w, b)), tangent)


def _batch_norm(
    call: Call | None,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """With ``x̂ = (x − μ)/σ`` and means over batch and pixels: ``ẏ = γ/σ (ẋ − mean(ẋ) − x̂ mean(x̂ẋ)) + γ̇x̂ + β̇``.

    In evaluation mode μ and σ are constants, and the means fall away.
    """
    (x, dx), (w, dw), (b, db) = _split(input), _split(weight), _split(bias)
    assert x is not None
    if dx is None:
        return NotImplemented
    if training:
        running_mean = running_var = None  # a tangent pass moves no statistics
    bounds = None if call is None else call.clamped
    primal = None if call is None else call.kept(like=x)
    if kernels.fits(x, dx):
        statistics = (running_mean, running_var)
        computed, tangent = kernels.batch_norm(x, dx, statistics, (w, dw), (b, db), eps, bounds, primal is None)
        return _dual(computed if primal is None else primal, tangent)

    if primal is None:
        primal = F.batch_norm(x, running_mean, running_var, w, b, training, momentum, eps)
        if bounds is not None:
            primal.clamp_(*bounds)
    shape = (1, -1, *[1] * (x.ndim - 2))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    x, dx = widened(x), widened(dx)
    if running_mean is None or running_var is None:
        variance, mean = torch.var_mean(x, dims, correction=0)
        centred = x - mean.view(shape)
        inverse = (variance + eps).rsqrt()
        mean_tangent = dx.mean(dims)
        along = inverse * (centred * dx).mean(dims)
    else:
        centred = x - running_mean.view(shape)
        inverse = (running_var + eps).rsqrt()
        mean_tangent = along = torch.zeros_like(inverse)
    slope = inverse if w is None else w * inverse
    mixing = inverse * ((0 if dw is None else dw) - slope * along)
    offset = (0 if db is None else db) - slope * mean_tangent
    tangent = torch.addcmul(offset.view(shape), dx, slope.view(shape)).addcmul_(centred, mixing.view(shape))
    if bounds is not None:
        tangent *= (primal > bounds[0]) & (primal < bounds[1])
    return _dual(primal, tangent)


def _layer_norm(
    call: Call | None,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """As BatchNorm, with means over the features of each row."""
    (x, dx), affine, shift = _split(input), _split(weight), _split(bias)
    assert x is not None
    if dx is None or len(normalized_shape) != 1 or not kernels.fits_rows(x, dx):
        return NotImplemented
    dtype = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
    return _dual(*kernels.layer_norm(x, dx, affine, shift, eps, dtype))


def _attention(
    call: Call | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """With ``P = softmax(S)``, ``S = qkᵀ·scale``: ``ȯ = Pv̇ + (P ⊙ Ṡ)v − rowsum(P ⊙ Ṡ) o``."""
    simple = attn_mask is None and dropout_p == 0.0 and not is_causal and not enable_gqa
    (q, dq), (k, dk), (v, dv) = _split(query), _split(key), _split(value)
    if q is None or k is None or v is None or dq is None or dk is None or dv is None:
        return NotImplemented
    if not simple or not kernels.fits_attention(q, k, v):
        return NotImplemented
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _dual(*kernels.attention((q, dq), (k, dk), (v, dv), scale))


def _clamp(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """An activation that clamps: ``ẏ = ẋ`` where it passes its input on, else 0."""

    def rule(call: Call | None, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        bounds = in_place_bounds(function, (input, *args), kwargs)
        x, dx = _split(input)
        assert x is not None
        if bounds is None or dx is None or not kernels.fits_flat(x, dx):
            return NotImplemented
        kernels.clamp_(x, dx, *bounds)
        return input

    return rule


def _add_(call: Call | None, input: Tensor, other: Any, *, alpha: float = 1) -> Any:
    """``ẋ += ẏ`` in place, with the activation that follows; torch's own rule makes a copy."""
    if not isinstance(other, Tensor) or alpha != 1:
        return NotImplemented
    (x, dx), (y, dy) = _split(input), _split(other)
    if x is None or dx is None or y is None or dy is None or x.shape != y.shape or x.dtype != y.dtype:
        return NotImplemented
    bounds = None if call is None else call.clamped
    if kernels.fits_flat(x, dx, y, dy):
        kernels.add_(x, dx, y, dy, bounds)
        return input
    x += y
    dx += dy
    if bounds is not None:
        dx *= (x > bounds[0]) & (x < bounds[1])
        x.clamp_(*bounds)
    return input


RULES: dict[Any, Callable[..., Any]] = {
    torch.conv1d: _convolution(torch.conv1d),
    torch.conv2d: _convolution(torch.conv2d),
    torch.conv3d: _convolution(torch.conv3d),
    F.linear: _linear,
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
    F.relu: _clamp(F.relu),
    F.relu6: _clamp(F.relu6),
    F.hardtanh: _clamp(F.hardtanh),
    torch.relu_: _clamp(torch.relu_),
    Tensor.relu_: _clamp(Tensor.relu_),
    Tensor.add_: _add_,
}
KEPT = {torch.conv1d, torch.conv2d, torch.conv3d, F.linear}
"""Operators whose output the graph of the forward pass holds too, as a rule: BatchNorm or an activation follows."""
CLAMPABLE = {F.batch_norm, Tensor.add_}
"""Operators that take over the activation which follows them in place."""
