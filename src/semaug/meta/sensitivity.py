"""One optimiser step as a function of the gradient, without touching the optimiser.

The pseudo update ``θ̃ = u(θ, ∇L)`` follows the rule of f's optimiser. The meta-gradient needs where it leads and its
derivative ``∂θ̃/∂∇L``. The rules below act on each element by itself, so this derivative, the *sensitivity*, is one
number per element, or one per parameter (for SGD: −lr, or −lr·(1 + momentum) with Nesterov; momentum buffer and weight
decay are constants).
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from semaug.util import devices

Sensitivity = Tensor | float
"""The derivative of a step in the gradient, elementwise. Parameters may share it if it is one number."""

Step = tuple[Tensor, Sensitivity]
"""The parameter after the step, and the sensitivity of the step."""


@torch.no_grad()
def pseudo_step(
    optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor], move: bool = True
) -> list[Step]:
    """Compute where one optimiser step would lead, and how that depends on the gradient.

    SGD, Adam and AdamW follow their own rule, with momentum and weight decay, also inside the wrappers of Lightning and
    Accelerate. For every other optimiser the step is ``θ − lr·∇L``, with a warning. The optimiser's state is only read.

    Args:
        optimizer: The optimiser.
        parameters: Some of its parameters.
        gradients: Their gradients.
        move: False to compute the sensitivities alone; the parameters are then returned as they are.
    """
    optimizer = _unwrapped(optimizer)
    rule = _rule(optimizer)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    alike: dict[Any, list[int]] = {}  # parameters that take the same step, computed together
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        key = (id(groups[parameter]), state.get("momentum_buffer") is None, _step_count(state.get("step")))
        alike.setdefault(key, []).append(index)
    steps: dict[int, Step] = {}
    for indices in alike.values():
        own = [parameters[i] for i in indices]
        states = [optimizer.state.get(parameter, {}) for parameter in own]
        taken = rule([p.detach() for p in own], [gradients[i] for i in indices], groups[own[0]], states, move)
        steps |= zip(indices, taken, strict=True)
    return [steps[index] for index in range(len(parameters))]


def clipped(slopes: Sequence[Sensitivity], factor: Tensor | float) -> list[Sensitivity]:
    """Multiply sensitivities by the factor by which the gradient was clipped (1.0 if it was not)."""
    if not isinstance(factor, Tensor):
        return list(slopes)
    products = {id(slope): factor * slope for slope in {id(slope): slope for slope in slopes}.values()}
    return [products[id(slope)] for slope in slopes]


def direction_of(gradient: Mapping[str, Tensor], sensitivity: Mapping[str, Sensitivity]) -> dict[str, Tensor]:
    """Multiply each gradient by its sensitivity, both by name; in few kernels where the sensitivities are numbers."""
    slopes = [sensitivity[name] for name in gradient]
    numbers = [slope for slope in slopes if not isinstance(slope, Tensor)]
    if len(numbers) == len(slopes):
        return dict(zip(gradient, torch._foreach_mul(list(gradient.values()), numbers), strict=True))
    products: dict[str, Tensor] = {}
    for shared in {id(slope): slope for slope in slopes}.values():
        names = [name for name, slope in zip(gradient, slopes, strict=True) if slope is shared]
        if isinstance(shared, Tensor) and shared.ndim > 0:
            products |= {name: shared * gradient[name] for name in names}
        else:
            products |= zip(names, torch._foreach_mul([gradient[name] for name in names], shared), strict=True)
    return {name: products[name] for name in gradient}


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimiser inside a training framework's wrapper."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _is_remote(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor that the host would have to wait for."""
    return isinstance(value, Tensor) and devices.has_graphs(value.device)


_steps_before: Any = WeakIdKeyDictionary()


def _step_count(count: Tensor | float | None) -> float | None:
    """The count of an optimiser's steps; None if it does not count. Only the first time the host waits for a GPU.

    Each step changes the tensor once, which torch counts on the host. A CUDA graph that is replayed changes the tensors
    of all parameters, uncounted, so what this returns serves to compare parameters only.
    """
    if not _is_remote(count):
        return None if count is None else float(count)
    if count not in _steps_before:
        _steps_before[count] = float(count) - count._version
    return float(_steps_before[count]) + count._version


_warned: set[type] = set()
Rule = Callable[[list[Tensor], list[Tensor], dict[str, Any], list[dict[str, Any]], bool], Iterable[Step]]
"""Parameters, gradients, settings of their group, their states, whether to move the parameters → their steps."""


def _rule(optimizer: Optimizer) -> Rule:
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    if type(optimizer) is SGD:
        return _sgd
    if type(optimizer) in (Adam, AdamW) and not amsgrad:
        return _adam
    if type(optimizer) not in _warned:
        _warned.add(type(optimizer))
        name = type(optimizer).__name__ + (" with amsgrad" if amsgrad else "")
        warnings.warn(f"semaug: the pseudo update under {name} is a plain gradient step, θ − lr·∇L", stacklevel=3)
    return _plain


def _plain(
    parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any], states: list[dict[str, Any]], move: bool
) -> Iterable[Step]:
    slope = _rate(group) if group.get("maximize") else -_rate(group)
    points = _add_scaled(parameters, gradients, slope) if move else parameters
    return ((point, slope) for point in points)


def _rate(group: dict[str, Any]) -> Sensitivity:
    """The learning rate: a tensor on a GPU, or a number."""
    rate: Sensitivity = group["lr"]
    return rate if _is_remote(rate) else float(rate)


def _add_scaled(tensors: list[Tensor], others: list[Tensor], factor: Sensitivity) -> list[Tensor]:
    """``tensors + factor · others``."""
    if isinstance(factor, Tensor):
        return list(torch._foreach_add(torch._foreach_mul(others, factor), tensors))
    return list(torch._foreach_add(tensors, others, alpha=factor))


def _sgd(
    parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any], states: list[dict[str, Any]], move: bool
) -> Iterable[Step]:
    """The step is a sum: ``by_gradient·(±∇L + decay·θ) + by_buffer·buffer``."""
    rate, momentum, decay = _rate(group), group["momentum"], group["weight_decay"]
    buffers = [state["momentum_buffer"] for state in states if momentum and state.get("momentum_buffer") is not None]
    share = 1.0 - group["dampening"] if buffers else 1.0  # the first step takes the gradient itself, undamped
    by_gradient, by_buffer = -rate * share, -rate * momentum
    if group["nesterov"]:
        by_gradient, by_buffer = -rate * (1 + momentum * share), -rate * momentum**2
    slope = -by_gradient if group["maximize"] else by_gradient
    if not move:
        return ((parameter, slope) for parameter in parameters)
    points = _add_scaled(parameters, gradients, slope)
    if decay:
        points = _add_scaled(points, parameters, by_gradient * decay)
    if buffers:
        points = _add_scaled(points, buffers, by_buffer)
    return ((point, slope) for point in points)


def _adam(
    parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any], states: list[dict[str, Any]], move: bool
) -> Iterable[Step]:
    sign, rate, dtype = 1.0, _rate(group), gradients[0].dtype
    if group["maximize"]:
        gradients, sign = list(torch._foreach_neg(gradients)), -1.0
    if group["weight_decay"]:
        if group.get("decoupled_weight_decay"):
            parameters = list(torch._foreach_mul(parameters, 1 - rate * group["weight_decay"]))
        else:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
    beta1, beta2 = group["betas"]
    step = states[0].get("step", 0)
    if _is_remote(step):
        bias1, bias2 = (1 - beta ** (step.double() + 1) for beta in (beta1, beta2))  # in fp32, 1 − β would lose digits
    else:
        bias1, bias2 = 1 - beta1 ** (float(step) + 1), 1 - beta2 ** (float(step) + 1)

    def fitting(factor: Any) -> Any:
        """A number on a GPU in the gradient's precision, for which torch has faster kernels."""
        return factor.to(dtype) if isinstance(factor, Tensor) and dtype == torch.float32 else factor

    first = torch._foreach_mul(gradients, 1 - beta1)
    second = torch._foreach_mul(torch._foreach_mul(gradients, gradients), 1 - beta2)
    if states[0]:
        torch._foreach_add_(first, [state["exp_avg"] for state in states], alpha=beta1)
        torch._foreach_add_(second, [state["exp_avg_sq"] for state in states], alpha=beta2)
    roots = torch._foreach_div(torch._foreach_sqrt(second), fitting(bias2**0.5))
    scales = torch._foreach_add(roots, group["eps"])
    updates = torch._foreach_div(torch._foreach_div(first, fitting(bias1)), scales)
    # d(root)/dg = (1 − β2) g / (bias2 · root), which is 0 where the root is 0 (no gradient has been seen there yet).
    tiny = torch.finfo(gradients[0].dtype).tiny
    slopes = torch._foreach_div(gradients, torch._foreach_clamp_min(roots, tiny))
    torch._foreach_mul_(slopes, updates)
    torch._foreach_mul_(slopes, fitting(-(1 - beta2) / bias2))
    offset = fitting((1 - beta1) / bias1)
    if isinstance(offset, Tensor):  # _foreach_add_ would read it on the host
        for slope in slopes:
            slope.add_(offset)
    else:
        torch._foreach_add_(slopes, offset)
    torch._foreach_div_(slopes, scales)
    torch._foreach_mul_(slopes, -rate * sign)
    points = torch._foreach_sub(parameters, torch._foreach_mul(updates, rate)) if move else parameters
    return zip(points, slopes, strict=True)
