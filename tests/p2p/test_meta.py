"""P2P-Net in the meta loop: the whole loss is differentiated, exactly."""

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

import semaug
from semaug import p2p
from semaug.network.models import SmallNet
from semaug.training.methods import Augmentation, make_learner

CLASSES = 5
BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "sequence": lambda: SmallNet(CLASSES, width=8),
    "timm": lambda: timm.create_model("resnet18", layers=(1, 1, 1, 1), channels=(8, 16, 32, 64), num_classes=CLASSES),
}


def batch(count: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(count, 3, 64, 64, generator=generator, dtype=torch.float64)
    return images, torch.randint(CLASSES, (count,), generator=generator)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_meta_gradient_of_the_whole_loss_is_exact(backbone: str, order: str) -> None:
    """Forward mode equals double backward in fp64, over two steps that change everything."""
    start = p2p.P2PNet(BACKBONES[backbone](), CLASSES).double()
    covnet = semaug.CovNet(start.head.in_features).double()
    states = []
    for engine in ("jvp", "double_backward"):
        torch.manual_seed(1)
        model, source = copy.deepcopy((start, covnet))
        optimizer = torch.optim.SGD(model.parameter_groups(0.002), momentum=0.9, weight_decay=5e-4)
        network = semaug.Network(model, head="head", composite=p2p.composite())
        meta_optimizer = torch.optim.SGD(source.parameters(), lr=10.0)
        learner = semaug.LearnableAugmentation(
            network, optimizer, source, meta_optimizer, strength=5.0, order=order, engine=engine
        )
        for _ in range(2):
            metrics = learner.step(*batch())
        assert metrics["rest_loss"] > 0
        assert metrics["meta_gradient_norm"] > 0
        states.append({**model.state_dict(), **source.state_dict()})
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-10)
    before = {**start.state_dict(), **covnet.state_dict()}
    assert all(not torch.equal(states[0][name], before[name]) for name in ("head.weight", "alignment.templates"))
    assert max(float((states[0][name] - value).abs().max()) for name, value in covnet.state_dict().items()) > 1e-4


@pytest.mark.parametrize("method", ["p2p", "p2p+isda", "p2p+learnable"])
def test_the_settings_of_the_paper_are_the_defaults(method: str) -> None:
    model = p2p.P2PNet(SmallNet(CLASSES, width=8), CLASSES).double()
    optimizer = torch.optim.SGD(model.parameter_groups(0.002), momentum=0.9, weight_decay=5e-4)
    learner = make_learner(method, Augmentation(5.0), model, optimizer)
    learner.source.double()
    assert learner.algorithm.interval == 10
    assert learner.strength == (0.0 if method == "p2p" else 5.0)
    assert learner.network.head is model.head
    if method == "p2p+learnable":
        first = next(learner.source.parameters())
        assert first.shape == (model.head.in_features // 2, model.head.in_features)
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    assert rates == [0.002, pytest.approx(0.0002)]
    assert learner.step(*batch(8))["train_loss"].isfinite()
