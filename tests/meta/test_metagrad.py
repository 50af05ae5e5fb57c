"""The forward-mode engine against double backward, on real architectures in fp64."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

import semaug
from semaug.meta.double_backward import double_backward
from semaug.meta.gradient import meta_gradient
from semaug.meta.jvp import jvp
from semaug.meta.losses import TrainLoss, meta_loss
from semaug.meta.problem import TrainProblem, global_norm
from semaug.meta.updates import MicroBatch
from semaug.network.network import Network

# Networks of each kind, some of them narrow, with BatchNorm in training mode, dropout and drop path. Images are large
# enough for 16 values or more per channel under every BatchNorm: with fewer, rounding decides at the kinks of ReLU.
ARCHITECTURES: dict[str, tuple[int, int, dict[str, Any]]] = {  # name in timm → images of a half batch, pixels, options
    "resnet18": (4, 64, {"channels": (16, 32, 64, 128)}),
    "resnet50": (4, 64, {"layers": (1, 2, 2, 1), "channels": (16, 32, 64, 128)}),
    "densenet121": (4, 64, {"block_config": (2, 3, 3, 2), "growth_rate": 16, "drop_path_rate": None}),
    "efficientnet_b0": (4, 64, {}),
    "mobilenetv2_050": (8, 64, {}),
    "regnetx_002": (4, 64, {}),
    "vit_tiny_patch16_224": (4, 32, {"img_size": 32}),
    "convnext_atto": (4, 32, {}),
    "swin_tiny_patch4_window7_224": (
        4, 32, {"img_size": 32, "window_size": 2, "depths": (2, 2, 2), "embed_dim": 24, "num_heads": (1, 2, 4)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_jvp_equals_double_backward(name: str) -> None:
    """For the whole direction, and for its backbone part alone, which is the smaller one."""
    half, pixels, options = ARCHITECTURES[name]
    model = timm.create_model(name, num_classes=5, drop_rate=0.2, **{"drop_path_rate": 0.2, **options}).double()
    blocks = sum(block.name != "stem" for block in Network(model).blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=1e-4)
    images = torch.randn(2 * half, 3, pixels, pixels, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 4, 3, 3, 0, 1]).repeat(half // 4)
    for frozen in (0, blocks // 2, blocks):
        network = Network(model, frozen_blocks=frozen)
        covnet = semaug.CovNet(network.feature_dim).double()
        learner = semaug.LearnableAugmentation(network, optimizer, covnet, strength=3.0)
        if frozen == 0:
            learner.step(images, labels)  # fills the momentum buffers

        part = MicroBatch(images[:half], labels[:half])
        point, pseudo = learner.algorithm.pseudo_update([part])
        point = {key: parameter.requires_grad_() for key, parameter in point.items()}
        meta_features = network.forward_at(point, images[half:])
        loss = meta_loss(meta_features, labels[half:], *network.head_parameters(point))
        gradients = torch.autograd.grad(loss, list(point.values()))
        direction = {key: pseudo.sensitivity[key] * value for key, value in zip(point, gradients, strict=True)}
        features = part.features.detach()
        loss_of_head = TrainLoss(covnet, part.labels, 3.0, features, 0.0)
        problem = TrainProblem(network, part.tape, pseudo.parameters, features, loss_of_head)

        parameters = list(covnet.parameters())
        in_head = {key for key in direction if key.startswith(f"{network.head_name}.")}
        backbone = {key: torch.zeros_like(value) if key in in_head else value for key, value in direction.items()}
        for along in (direction, backbone) if len(in_head) < len(direction) else (direction,):
            ours = jvp(problem, along, parameters)
            reference = double_backward(problem, along, parameters)
            error = global_norm([a - b for a, b in zip(ours, reference, strict=True)]) / global_norm(reference)
            assert global_norm(reference) > 0
            assert error < 1e-9, f"{name} with {frozen} of {blocks} blocks frozen: relative error {error:.1e}"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 12)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2))[:, None].chunk(3, dim=-1)
        return self.fc(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


def problem_of(model: nn.Module, images: torch.Tensor) -> tuple[TrainProblem, dict[str, torch.Tensor], semaug.CovNet]:
    network = Network(model)
    labels = torch.arange(len(images)) % network.num_classes
    covnet = semaug.CovNet(network.feature_dim).to(images.dtype)
    features, tape = network.forward(images)
    constant = features.detach()

    def loss(features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return semaug.isda_loss(features, labels, weight, bias, covnet(constant, labels), 2.0, validate=False)

    parameters = {name: parameter.detach() for name, parameter in network.late_parameters().items()}
    direction = {name: torch.randn_like(value) for name, value in parameters.items()}
    return TrainProblem(network, tape, parameters, constant, loss), direction, covnet


def test_fused_attention_is_replaced_only_where_it_has_no_formula() -> None:
    problem, direction, covnet = problem_of(Attention(), torch.randn(4, 3, 4, 4))
    ours = meta_gradient(problem, direction, list(covnet.parameters()))
    reference = meta_gradient(problem, direction, list(covnet.parameters()), "double_backward")
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


def test_meta_gradient_is_linear_in_the_direction_at_any_scale() -> None:
    """The pass is scaled internally, so that directions far below half precision's range lose nothing."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    problem, direction, covnet = problem_of(model, torch.randn(4, 3, 2, 2, dtype=torch.float64))
    parameters = list(covnet.parameters())
    once = jvp(problem, direction, parameters)
    tiny = jvp(problem, {name: 1e-12 * value for name, value in direction.items()}, parameters)
    torch.testing.assert_close([1e12 * value for value in tiny], once, rtol=1e-9, atol=0)
    none = jvp(problem, {name: 0 * value for name, value in direction.items()}, parameters)
    assert all(not value.any() for value in none)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x.flatten(1)).detach())


def test_a_lost_tangent_is_an_error_not_a_zero() -> None:
    problem, direction, covnet = problem_of(Detached(), torch.randn(4, 3, 2, 2))
    with pytest.raises(RuntimeError, match="dropped its forward-mode tangent"):
        jvp(problem, direction, list(covnet.parameters()))
