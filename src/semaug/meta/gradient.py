"""The meta-gradient ``∇_{θ_g} L_meta(θ̃_f(θ_g))`` by one of two engines. Both are exact and agree to rounding.

With ``v = ∇_θ̃ L_meta`` and ``d = (∂θ̃_f/∂∇L_train) ⊙ v`` the chain rule gives

    ``∇_{θ_g} L_meta = ∂/∂θ_g ⟨∇_{θ_f} L_train(θ_f; θ_g), d⟩``.

:mod:`semaug.meta.double_backward` differentiates the inner product through a second-order graph of the backbone.
:mod:`semaug.meta.jvp` replaces that graph by one forward-mode pass.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function

from semaug.meta.double_backward import double_backward
from semaug.meta.jvp import jvp
from semaug.meta.problem import TrainProblem

Engine = Literal["jvp", "double_backward"]


def meta_gradient(
    problem: TrainProblem, direction: Mapping[str, Tensor], parameters: Sequence[Tensor], engine: Engine = "jvp"
) -> list[Tensor]:
    """Compute ``∂/∂θ_g ⟨∇L_train, d⟩``.

    If an operator of the network has no forward-mode formula, the jvp engine warns once and double backward is used
    for this network from then on.

    Args:
        problem: L_train of one recorded pass.
        direction: d, by the names of the late parameters.
        parameters: The parameters θ_g.
        engine: ``"jvp"`` or ``"double_backward"``.

    Returns:
        One gradient for each parameter.
    """
    if engine == "jvp" and problem.network.forward_mode:
        try:
            return jvp(problem, direction, parameters)
        except NotImplementedError as error:
            problem.network.use_reverse_mode(f"{_unsupported(problem, error)} has no forward-mode formula")
    return double_backward(problem, direction, parameters)


def _unsupported(problem: TrainProblem, error: NotImplementedError) -> str:
    """Name the operators without a forward-mode formula: custom functions of the network, or torch's message."""
    with torch.enable_grad():
        point = {name: parameter.detach().requires_grad_() for name, parameter in problem.parameters.items()}
        with problem.features_at(point) as features:
            waiting, seen = [features.grad_fn], set()
    functions: set[type[Function]] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            functions.add(type(node)._forward_cls)
    names = sorted(function.__name__ for function in functions if function.jvp is Function.jvp)
    return ", ".join(names) or f"an operator of the network ({str(error).strip().splitlines()[0]})"
