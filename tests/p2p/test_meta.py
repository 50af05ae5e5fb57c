"""P2P-Net in the meta loop: the whole loss is differentiated, exactly."""

import copy

import pytest
import torch
from torch import Tensor

import semaug
from semaug.inference.classifier import as_composite
from semaug.network.models import build_model
from semaug.training.methods import METHODS, Augmentation, make_learner

CLASSES = 5


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(8, 3, 64, 64, generator=generator, dtype=torch.float64)
    return images, torch.randint(CLASSES, (8,), generator=generator)


def learner(method: str, model: torch.nn.Module, **settings: object) -> semaug.LearnableAugmentation:
    groups = model.parameter_groups(0.002)
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=5e-4)
    one = make_learner(method, Augmentation(**settings), model, optimizer)
    one.source.double()
    return one


@pytest.mark.parametrize("order", ["paper", "pipelined"])
@pytest.mark.parametrize("backbone", ["small", "torchvision/resnet18"])
def test_the_meta_gradient_of_the_whole_loss_is_exact(backbone: str, order: str) -> None:
    """Forward mode against double backward, in fp64, after steps that have moved everything."""
    torch.manual_seed(0)
    model = as_composite("p2p", build_model(backbone, CLASSES, 64), CLASSES).double()
    moved = []
    for engine in ("jvp", "double_backward"):
        torch.manual_seed(1)
        one = learner(
            "p2p+learnable", copy.deepcopy(model), engine=engine, order=order, interval=1, meta_lr=10.0, strength=5.0
        )
        for _ in range(2):
            metrics = one.step(*batch())
        assert metrics["rest_loss"] > 0
        assert metrics["meta_gradient_norm"] > 0
        moved.append({**one.network.model.state_dict(), **one.source.state_dict()})
    torch.testing.assert_close(*moved, rtol=1e-9, atol=1e-10)
    before = model.state_dict()
    assert all(not torch.equal(moved[0][name], before[name]) for name in ("head.weight", "alignment.templates"))


@pytest.mark.parametrize("method", ["p2p", "p2p+isda", "p2p+learnable"])
def test_the_settings_of_the_paper_are_the_defaults(method: str) -> None:
    torch.manual_seed(0)
    model = as_composite(METHODS[method].composite, build_model("torchvision/resnet18", CLASSES, 64), CLASSES).double()
    one = learner(method, model)
    assert one.algorithm.interval == 10
    assert one.max_strength == (0.0 if method == "p2p" else 5.0)
    assert one.network.head is model.head
    if method == "p2p+learnable":
        first = next(one.source.parameters())
        assert first.shape == (model.head.in_features // 2, model.head.in_features)
    rates = [group["lr"] for group in one.optimizer.param_groups]
    assert rates == [0.002, pytest.approx(0.0002)]
    assert one.step(*batch())["train_loss"].isfinite()
