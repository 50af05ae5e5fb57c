"""Fast forward-mode rules for the operators in which a network's tangent pass spends its time.

torch can push a tangent through nearly every operator, but slowly: its formula for BatchNorm makes some twenty passes
over the activations. Under :class:`TangentRules`, convolutions, linear layers, BatchNorm, LayerNorm, attention and
in-place activations on dual tensors follow the closed forms below; every other operator keeps torch's formula. Both
give the same result up to rounding. On a GPU the rules use fused kernels (:mod:`semaug.network.kernels`).
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from semaug.isda.precision import widened
from semaug.network import kernels
from semaug.network.recording import OperatorCall, OperatorRecord, in_place_bounds, is_recorded


class TangentRules(TorchFunctionMode):
    """Mode in which dual tensors follow this module's rules; for passes without gradient only.

    Args:
        record: A record of the same pass. Its stored outputs are reused, and BatchNorm and additions are fused with
            the activations that follow them. None if there is no record.
    """

    def __init__(self, record: OperatorRecord | None = None) -> None:
        super().__init__()
        self._calls = iter(record.calls if record is not None else ())
        self._activated: Tensor | None = None  # an output to which the next activation was applied already

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **kwargs)
        activated, self._activated = self._activated, None
        if activated is not None and args and args[0] is activated:
            return activated
        call = self._next_call(func) if is_recorded(func, args) else None
        output = NotImplemented if torch.is_grad_enabled() else rule(call, *args, **kwargs)
        if output is NotImplemented:
            return func(*args, **kwargs)
        if call is not None and call.bounds is not None:
            self._activated = output
        return output

    def _next_call(self, func: Any) -> OperatorCall | None:
        """The record of this call; None from the first call that differs from the recorded pass."""
        call = next(self._calls, None)
        if call is not None and call.function is not func:
            self._calls, call = iter(()), None
        return call


# Each rule takes the record of its call and the operator's own arguments. It returns a dual tensor, or NotImplemented
# where torch's formula should be used.


def _unpack(tensor: Tensor | None) -> tuple[Any, Any]:
    """Primal and tangent; None where missing."""
    return (None, None) if tensor is None else tuple(unpack_dual(tensor))


def _dual(primal: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = make_dual(primal, tangent.to(primal.dtype))
    return dual


def _bilinear(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A convolution or linear layer f: ``ẏ = f(ẋ, w) + f(x, ẇ) + ḃ``."""

    def rule(
        call: OperatorCall | None, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        (x, dx), (w, dw), (b, db) = _unpack(input), _unpack(weight), _unpack(bias)
        if dx is None and dw is None:
            return NotImplemented
        if dx is None or dw is None:
            tangent = function(x, dw, db, *args, **kwargs) if dx is None else function(dx, w, db, *args, **kwargs)
        elif function is F.linear:
            rows, rows_tangent = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, dx))
            tangent = _matmul_tangent(rows, rows_tangent, w, dw, db).view(*x.shape[:-1], w.shape[0])
        elif _is_matrix_product(x, dx, w, args, kwargs):
            rows, rows_tangent = (tensor.permute(0, 2, 3, 1).flatten(0, 2) for tensor in (x, dx))
            flat = _matmul_tangent(rows, rows_tangent, w.flatten(1), dw.flatten(1), db)
            tangent = flat.view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)
        else:
            tangent = function(dx, w, db, *args, **kwargs)
            tangent += function(x, dw, None, *args, **kwargs)
        primal = None if call is None else call.reusable(like=tangent)
        return _dual(function(x, w, b, *args, **kwargs) if primal is None else primal, tangent)

    return rule


def _is_matrix_product(x: Tensor, dx: Tensor, w: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a convolution multiplies matrices without any copy; faster in half precision only."""
    options = {"stride": 1, "padding": 0, "groups": 1}
    options |= dict(zip(("stride", "padding", "dilation", "groups"), args, strict=False)) | dict(kwargs)
    plain = all(
        options[name] in (value, (value,), (value, value), [value, value])
        for name, value in (("stride", 1), ("padding", 0), ("groups", 1))
    )
    return plain and x.ndim == 4 and w.shape[2:] == (1, 1) and x.dtype != torch.float32 and kernels.channels_last(x, dx)


def _matmul_tangent(x: Tensor, dx: Tensor, w: Tensor, dw: Tensor, db: Tensor | None) -> Tensor:
    """``dx·wᵀ + x·dwᵀ + db`` for matrices, without a temporary for the second product."""
    tangent = F.linear(dx, w, db)  # in autocast's precision, if that is on
    return tangent.addmm_(x.to(tangent.dtype), dw.to(tangent.dtype).T)


def _batch_norm(
    call: OperatorCall | None,
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

    In evaluation mode μ and σ are constants, and both means are 0.
    """
    (x, dx), (w, dw), (b, db) = _unpack(input), _unpack(weight), _unpack(bias)
    if dx is None:
        return NotImplemented
    if training:
        running_mean = running_var = None  # a tangent pass leaves the running statistics unchanged
    bounds = None if call is None else call.bounds
    primal = None if call is None else call.reusable(like=x)
    fused = kernels.batch_norm((x, dx), (running_mean, running_var), (w, dw), (b, db), eps, bounds, primal is None)
    if fused is not None:
        return _dual(fused[0] if primal is None else primal, fused[1])

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
    call: OperatorCall | None,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """As BatchNorm, with means over the features of each row."""
    x, dx = _unpack(input)
    if dx is None or len(normalized_shape) != 1:
        return NotImplemented
    dtype = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
    fused = kernels.layer_norm((x, dx), _unpack(weight), _unpack(bias), eps, dtype)
    return NotImplemented if fused is None else _dual(*fused)


def _attention(
    call: OperatorCall | None,
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
    q, k, v = _unpack(query), _unpack(key), _unpack(value)
    plain = attn_mask is None and dropout_p == 0.0 and not is_causal and not enable_gqa
    if not plain or any(tangent is None for _, tangent in (q, k, v)):
        return NotImplemented
    fused = kernels.attention(q, k, v, query.shape[-1] ** -0.5 if scale is None else scale)
    return NotImplemented if fused is None else _dual(*fused)


def _clamp(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A clamping activation: ``ẏ = ẋ`` inside its bounds, else 0."""

    def rule(call: OperatorCall | None, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        bounds = in_place_bounds(function, (input, *args), kwargs)
        x, dx = _unpack(input)
        if bounds is None or dx is None or not kernels.add_clamp_((x, dx), None, bounds):
            return NotImplemented
        return input

    return rule


def _add_(call: OperatorCall | None, input: Tensor, other: Any, *, alpha: float = 1) -> Any:
    """``ẋ += ẏ`` in place, with the activation that follows; torch's own rule makes a copy."""
    if not isinstance(other, Tensor) or alpha != 1:
        return NotImplemented
    (x, dx), (y, dy) = _unpack(input), _unpack(other)
    if dx is None or dy is None or x.shape != y.shape or x.dtype != y.dtype:
        return NotImplemented
    bounds = None if call is None else call.bounds
    if kernels.add_clamp_((x, dx), (y, dy), bounds):
        return input
    x += y
    dx += dy
    if bounds is not None:
        dx *= (x > bounds[0]) & (x < bounds[1])
        x.clamp_(*bounds)
    return input


_RULES: dict[Any, Callable[..., Any]] = {
    **{function: _bilinear(function) for function in (torch.conv1d, torch.conv2d, torch.conv3d, F.linear)},
    **{function: _clamp(function) for function in (F.relu, F.relu6, F.hardtanh, torch.relu_, Tensor.relu_)},
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
    Tensor.add_: _add_,
}


_formulas_compiled = False


@contextmanager
def without_jit_warning() -> Iterator[None]:
    """Hide torch's warning about itself: forward mode compiles its formulas with the deprecated torch.jit, once."""
    global _formulas_compiled
    if _formulas_compiled:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
        yield
    _formulas_compiled = True
