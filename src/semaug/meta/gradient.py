"""The meta-gradient ``∇_{θ_g} L_meta(θ̃(θ_g))``: two engines for the same number.

With the pseudo update ``θ̃ = u(θ_f, ∇_{θ_f} L_train(θ_f; θ_g))``, the gradient ``v = ∇_θ̃ L_meta`` at its end and the
direction ``d = (∂θ̃/∂∇L) ⊙ v`` (for SGD −α·v), the chain rule says

    ∇_{θ_g} L_meta = ∂/∂θ_g ⟨∇_{θ_f} L_train(θ_f; θ_g), d⟩ .

:func:`double_backward` differentiates that inner product as it stands, through a second-order graph of the backbone.
:func:`jvp` sees that it is the derivative of L_train *along* d, and that θ_g enters L_train only at the head:

    ⟨∇L, d⟩ = Σ_i ⟨∂L/∂a_i, ȧ_i⟩ + ⟨∂L/∂W, d_W⟩ + ⟨∂L/∂b, d_b⟩ ,   ȧ_i = J(x_i)·d_backbone ,

so one forward-mode pass through the late blocks gives ȧ (N, D), and what is left is a small problem on the head.
Both are exact; they agree to rounding.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.nn.attention import SDPBackend, sdpa_kernel

from semaug.network.network import Network, Tape
from semaug.network.tangents import TangentRules

Engine = Literal["jvp", "double_backward"]
HeadLoss = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""L_train as a function of features (N, D), head weight (C, D) and bias (C,); θ_g enters through its closure."""

HeadLossAlong = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
"""Its derivative along a direction of features, weight and bias, to be differentiated in θ_g; None if it has to be
found by forward mode after all."""


@dataclass
class TrainProblem:
    """``L_train(θ_f; θ_g)`` of one recorded half batch, as a function of the late parameters."""

    network: Network
    tape: Tape
    parameters: dict[str, Tensor]  # the late ones, the head's among them, at the point of the pseudo update
    features: Tensor  # at that point, in fp32 or fp64
    loss: HeadLoss
    autocast: torch.dtype | None = None
    loss_along: HeadLossAlong | None = None  # a closed form, where there is one
    weight: float = 1.0  # of this loss in the whole one, a sum over parts of the batch and over ranks

    def features_at(self, parameters: Mapping[str, Tensor]) -> Tensor:
        device = self.features.device.type
        # A cached half-precision copy of a weight would lose its tangent or belong to another graph.
        cast = torch.autocast(device, self.autocast, cache_enabled=False) if self.autocast else nullcontext()
        with cast:
            return self.network.replay(parameters, self.tape)


def meta_gradient(
    problem: TrainProblem, direction: Mapping[str, Tensor], parameters: Sequence[Tensor], engine: Engine = "jvp"
) -> list[Tensor]:
    """``∂/∂θ_g ⟨∇L_train, direction⟩`` for the CovNet `parameters`.

    Where an operator of the network has no forward-mode formula, the jvp engine warns once, naming it, and double
    backward takes over.
    """
    if engine == "double_backward":
        return double_backward(problem, direction, parameters)
    if engine != "jvp":
        raise ValueError(f"engine must be 'jvp' or 'double_backward', not {engine!r}")
    try:
        return jvp(problem, direction, parameters)
    except NotImplementedError as error:
        operator = _operator(error)
        if operator is None:
            raise
        if operator not in _without_formula:
            _without_formula.add(operator)
            warnings.warn(
                f"semaug: {operator} has no forward-mode formula; double backward computes the meta-gradient instead "
                "(the same result, at a higher cost)",
                stacklevel=2,
            )
        return double_backward(problem, direction, parameters)


_without_formula: set[str] = set()


def _operator(error: NotImplementedError) -> str | None:
    """The operator whose forward-mode formula an error says is missing, or None if it is another error."""
    found = re.search(r"forward AD with (\S+) that does not support it", str(error))
    if found:
        return found[1]
    if "implement the jvp function" not in str(error):
        return None
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    # torch's message does not say which custom function it is; the context that it was called with does.
    context = frame.tb_frame.f_locals.get("ctx") if frame else None
    return type(context).__name__.removesuffix("Backward") if context is not None else "a custom autograd.Function"


def jvp(problem: TrainProblem, direction: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """One forward-mode pass of the late blocks, then reverse mode on the head and CovNet alone."""
    weight, bias = problem.network.head_parameters(problem.parameters)
    head = (weight,) if bias is None else (weight, bias)
    d_head = _head_direction(problem, direction, head)
    features_dot = _features_tangent(problem, direction)

    def loss(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return problem.loss(features, weight, bias)

    with torch.enable_grad():
        along = None
        if problem.loss_along is not None:
            along = problem.loss_along(features_dot, d_head[0], d_head[1] if len(d_head) > 1 else None)
        if along is None:
            primals = (problem.features.detach(), *(part.detach() for part in head))
            along = torch.func.jvp(loss, primals, (features_dot, *d_head))[1]
        return _gradients(problem.weight * along, parameters)


def _features_tangent(problem: TrainProblem, direction: Mapping[str, Tensor]) -> Tensor:
    """``ȧ``: the derivative of the features along the direction, by forward mode and without any graph."""
    head = {f"{problem.network.head_name}.{part}" for part in ("weight", "bias")}
    names = [name for name in problem.parameters if name not in head]
    if not names:  # only the head is late: the features do not move
        return torch.zeros_like(problem.features)
    primals, tangents = [problem.parameters[n].detach() for n in names], [direction[n] for n in names]
    scale = None
    if problem.autocast == torch.float16:
        # The pass is linear in the direction; scaled to the parameters' own size it stays in the range of fp16.
        scale = global_norm(primals) / global_norm(tangents).clamp_min(1e-30)
        tangents = list(torch._foreach_mul(tangents, scale))
    with _quiet_first_time(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), dual_level():
        dual = {name: make_dual(*pair) for name, *pair in zip(names, primals, tangents, strict=True)}
        with TangentRules(problem.tape.late):
            features = problem.features_at(dual)
        tangent: Tensor | None = unpack_dual(features).tangent
        if tangent is None:
            raise RuntimeError(
                "the network dropped its forward-mode tangent (inference mode, reentrant checkpointing or a detach "
                "inside it); use engine='double_backward'"
            )
        tangent = tangent.to(problem.features.dtype)
        return tangent if scale is None else tangent / scale


_formulas_loaded = False


@contextmanager
def _quiet_first_time() -> Iterator[None]:
    """Hide torch's warning about itself: its forward mode first compiles formulas by a means that it deprecates."""
    global _formulas_loaded
    if _formulas_loaded:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
        yield
    _formulas_loaded = True


def double_backward(
    problem: TrainProblem, direction: Mapping[str, Tensor], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """The reference: a second-order graph through the late blocks."""
    point = {name: parameter.detach().requires_grad_() for name, parameter in problem.parameters.items()}
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative either
        features = problem.features_at(point).to(problem.features.dtype)
        # Weighted here and not in the end: BatchNorm over all ranks mixes the losses of all.
        loss = problem.weight * problem.loss(features, *problem.network.head_parameters(point))
        gradients = torch.autograd.grad(loss, list(point.values()), create_graph=True, materialize_grads=True)
        along = torch.stack(
            [(gradient * direction[name]).sum() for name, gradient in zip(point, gradients, strict=True)]
        ).sum()
        return _gradients(along, parameters)


def _head_direction(problem: TrainProblem, direction: Mapping[str, Tensor], head: Sequence[Tensor]) -> list[Tensor]:
    names = [f"{problem.network.head_name}.{part}" for part in ("weight", "bias")]
    return [
        direction[name].view_as(part) if name in direction else torch.zeros_like(part)
        for name, part in zip(names, head, strict=False)
    ]


def _gradients(value: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(value, parameters, materialize_grads=True))


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements of several tensors."""
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors])
    return torch.stack(norms).square().sum().sqrt()
