"""The reference engine: a second-order graph through the late blocks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from semaug.meta.problem import TrainProblem


def double_backward(
    problem: TrainProblem, direction: Mapping[str, Tensor], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Compute ``∂/∂θ_g ⟨∇L_train, d⟩`` by differentiating the inner product as it stands."""
    point = {name: parameter.detach().requires_grad_() for name, parameter in problem.parameters.items()}
    # Fused attention has no second derivative.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), problem.features_at(point) as late_features:
        features = late_features.to(problem.features.dtype)
        # The weight belongs here and not at the end: BatchNorm over all ranks mixes the losses of all ranks.
        loss = problem.weight * problem.loss(features, *problem.network.head_parameters(point))
        gradients = torch.autograd.grad(loss, list(point.values()), create_graph=True, materialize_grads=True)
        along = torch.stack(
            [(gradient * direction[name]).sum() for name, gradient in zip(point, gradients, strict=True)]
        ).sum()
        return list(torch.autograd.grad(along, parameters, materialize_grads=True))
