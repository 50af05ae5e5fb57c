"""The fast engine: one forward-mode pass of the late blocks, then reverse mode on the head and CovNet alone.

``⟨∇L, d⟩`` is the derivative of L_train *along* d, and θ_g enters L_train only at the head. So

    ``⟨∇L, d⟩ = Σ_i ⟨∂L/∂a_i, ȧ_i⟩ + ⟨∂L/∂W, d_W⟩ + ⟨∂L/∂b, d_b⟩``,   ``ȧ_i = J(x_i)·d_backbone``:

a forward-mode pass gives ȧ (N, D), and the rest is a small reverse-mode problem. The result is exact.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.nn.attention import SDPBackend, sdpa_kernel

from semaug.meta.problem import TrainProblem, global_norm
from semaug.network.tangents import TangentRules, without_jit_warning


def jvp(problem: TrainProblem, direction: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Compute ``∂/∂θ_g ⟨∇L_train, d⟩`` without a second-order graph."""
    weight, bias = problem.network.head_parameters(problem.parameters)
    head = [weight] if bias is None else [weight, bias]
    d_head = [
        direction[name].view_as(part) if name in direction else torch.zeros_like(part)
        for name, part in zip(problem.head_names(), head, strict=False)
    ]
    d_features = _features_tangent(problem, direction)

    def loss(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return problem.loss(features, weight, bias)

    with torch.enable_grad():
        along = None
        if problem.loss_along is not None:
            along = problem.loss_along(d_features, d_head[0], d_head[1] if len(d_head) > 1 else None)
        if along is None:
            primals = (problem.features.detach(), *(part.detach() for part in head))
            along = torch.func.jvp(loss, primals, (d_features, *d_head))[1]
        return list(torch.autograd.grad(problem.weight * along, parameters, materialize_grads=True))


def _features_tangent(problem: TrainProblem, direction: Mapping[str, Tensor]) -> Tensor:
    """``ȧ``, the derivative of the features along the direction, by forward mode without any graph."""
    names = [name for name in problem.parameters if name not in problem.head_names()]
    if not names:  # only the head is late: the features do not move
        return torch.zeros_like(problem.features)
    primals, tangents = [problem.parameters[n].detach() for n in names], [direction[n] for n in names]
    scale = None
    if problem.autocast == torch.float16:
        # The pass is linear in the direction. Scaled to the size of the parameters it stays in the range of fp16.
        scale = global_norm(primals) / global_norm(tangents).clamp_min(1e-30)
        tangents = list(torch._foreach_mul(tangents, scale))
    with without_jit_warning(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), dual_level():
        dual = {name: make_dual(*pair) for name, *pair in zip(names, primals, tangents, strict=True)}
        with TangentRules(problem.tape.late), problem.features_at(dual) as features:
            tangent: Tensor | None = unpack_dual(features).tangent
        if tangent is None:
            raise RuntimeError(
                "the network dropped its forward-mode tangent (inference mode, reentrant checkpointing or a detach "
                "inside it); use engine='double_backward'"
            )
        tangent = tangent.to(problem.features.dtype)
        return tangent if scale is None else tangent / scale
