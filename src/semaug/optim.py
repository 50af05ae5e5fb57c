"""One optimiser step as a function of the gradient, without touching the optimiser: the pseudo update's rule.

The meta-gradient needs two things of the step ``θ̃ = u(θ, ∇L)``: where it goes, and its derivative ``∂θ̃/∂∇L``. The
rules below act on each element by itself, so this derivative, the *sensitivity*, is one number per element, or one
per parameter (for SGD: −lr, or −lr·(1 + momentum) with Nesterov; momentum and weight decay are constants).
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

Step = tuple[Tensor, Tensor | float]
"""The parameter after the step, and the derivative of the step in the gradient."""


@torch.no_grad()
def pseudo_step(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Step]:
    """Where one step of `optimizer` would take each of its `parameters`, and how that depends on the gradient.

    SGD, Adam and AdamW follow their own rule, with their momentum and weight decay. For every other optimiser the
    step is ``θ − lr·∇L``, said once in a warning. The optimiser's state is read and not written.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    rule = _rule(optimizer)
    return [
        rule(parameter.detach(), gradient, groups[parameter], optimizer.state.get(parameter, {}))
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]


_warned: set[type] = set()


def _rule(optimizer: Optimizer) -> Any:
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


def _signed(gradient: Tensor, group: dict[str, Any]) -> tuple[Tensor, float]:
    return (-gradient, -1.0) if group.get("maximize") else (gradient, 1.0)


def _plain(parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Step:
    gradient, sign = _signed(gradient, group)
    return parameter - group["lr"] * gradient, -group["lr"] * sign


def _sgd(parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Step:
    gradient, sensitivity = _signed(gradient, group)
    if group["weight_decay"]:
        gradient = gradient + group["weight_decay"] * parameter
    if group["momentum"]:
        update, share = gradient, 1.0
        if state.get("momentum_buffer") is not None:  # the first step takes the gradient itself, undamped
            share = 1.0 - group["dampening"]
            update = group["momentum"] * state["momentum_buffer"] + share * gradient
        if group["nesterov"]:
            update, share = gradient + group["momentum"] * update, 1.0 + group["momentum"] * share
        gradient, sensitivity = update, sensitivity * share
    return parameter - group["lr"] * gradient, -group["lr"] * sensitivity


def _adam(parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Step:
    gradient, sign = _signed(gradient, group)
    if group["weight_decay"]:
        if group.get("decoupled_weight_decay"):
            parameter = parameter * (1 - group["lr"] * group["weight_decay"])
        else:
            gradient = gradient + group["weight_decay"] * parameter
    beta1, beta2 = group["betas"]
    step = float(state.get("step", 0)) + 1
    first = beta1 * state.get("exp_avg", torch.zeros_like(gradient)) + (1 - beta1) * gradient
    second = beta2 * state.get("exp_avg_sq", torch.zeros_like(gradient)) + (1 - beta2) * gradient.square()
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    root = second.sqrt() / math.sqrt(bias2)
    scale = root + group["eps"]
    update = first / bias1 / scale
    # d(root)/dg = (1 − β2) g / (bias2 · root), taken as 0 where the root is 0 (no gradient has been seen there yet).
    root_slope = torch.where(root > 0, (1 - beta2) / bias2 * gradient / root, 0.0)
    slope = (1 - beta1) / bias1 / scale - update / scale * root_slope
    return parameter - group["lr"] * update, -group["lr"] * sign * slope
