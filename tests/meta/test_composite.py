"""A model with several losses in the meta loop: the head to augment, and the rest of the loss."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import semaug
from algorithm1 import Literal
from semaug.network.network import Composite, Network

CLASSES, WIDTH = 4, 6


class Outputs(NamedTuple):
    logits: Tensor  # of the head that is augmented
    auxiliary: Tensor
    parts: Tensor  # of the same head, on crops
    feature: Tensor


class Several(nn.Module):
    """A body with BatchNorm and dropout; one head for the image and, by another name, its middle; an auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(5, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.Tanh(), nn.Dropout(0.3))
        self.auxiliary = nn.Linear(5, CLASSES)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.part_head = self.head
        self.register_buffer("template", torch.zeros(WIDTH))

    def feature(self, images: Tensor) -> tuple[Tensor, Tensor]:
        early = self.stem(images)
        return early, self.body(early).mean((2, 3))

    def run_head(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.feature(images)[1])
        return logits

    def forward(self, images: Tensor) -> Outputs:
        early, feature = self.feature(images)
        logits = self.head(feature)
        middle = self.feature(images[:, :, 1:-1, 1:-1])[1]
        return Outputs(logits, self.auxiliary(early.mean((2, 3))), self.part_head(middle), feature)

    def update(self, outputs: Outputs) -> None:
        self.template.lerp_(outputs.feature.mean(0), 0.1)


def rest(outputs: Outputs, labels: Tensor) -> Tensor:
    return 0.7 * F.cross_entropy(outputs.auxiliary, labels) + F.cross_entropy(
        outputs.parts, labels, label_smoothing=0.2
    )


def composite(short: bool) -> Composite:
    return Composite(
        run=lambda model, images: model(images),
        logits=lambda outputs: outputs.logits,
        rest=lambda model, outputs, labels: rest(outputs, labels),
        run_head=(lambda model, images: model.run_head(images)) if short else None,
        after=lambda model, outputs: model.update(outputs),
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def make(order: str, short: bool = True, **options: Any) -> tuple[semaug.LearnableAugmentation, Literal]:
    torch.manual_seed(0)
    model = Several().double()
    covnet = semaug.CovNet(WIDTH, width=5).double()
    plain = nn.Sequential(copy.deepcopy(covnet.layers), nn.Sigmoid())
    literal = Literal(
        copy.deepcopy(model),
        "head",
        plain,
        [name for name, _ in model.named_parameters()],
        lr=0.05,
        meta_lr=5.0,
        strength=2.0,
        momentum=0.9,
        rest=rest,
        short=short,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    network = Network(model, head="head", composite=composite(short))
    meta_optimizer = torch.optim.SGD(covnet.parameters(), lr=5.0)
    return (
        semaug.LearnableAugmentation(network, optimizer, covnet, meta_optimizer, strength=2.0, order=order, **options),
        literal,
    )


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("engine", ["jvp", "double_backward"])
@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_half_steps_equal_algorithm_1_on_the_whole_loss(order: str, engine: str, short: bool) -> None:
    """The training loss is the whole one; the meta loss is that of the head, as in the paper."""
    learner, literal = make(order, short, engine=engine)
    start = copy.deepcopy(learner.source.state_dict())
    torch.manual_seed(3)
    for images, labels in batches(4):
        learner.step(images, labels)
    torch.manual_seed(3)
    for images, labels in batches(4):
        halves = list(zip(images.chunk(2), labels.chunk(2), strict=True))
        for own, other in ((0, 1), (1, 0)):
            if order == "paper":
                literal.paper_half_step(*halves[own], *halves[other])
            else:
                literal.pipelined_half_step(*halves[own])
    close = {"rtol": 1e-9, "atol": 1e-11}
    for (name, mine), theirs in zip(learner.network.model.named_parameters(), literal.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **close, msg=lambda text, name=name: f"{name}: {text}")
    for mine, theirs in zip(learner.source.parameters(), literal.covnet.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    assert max(float((v - start[n]).abs().max()) for n, v in learner.source.state_dict().items()) > 1e-4


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_statistics_of_the_models_own_move_once_for_each_half_batch(order: str) -> None:
    learner, _ = make(order)
    model = learner.network.model
    calls: list[Tensor] = []
    update = model.update
    model.update = lambda outputs: (calls.append(outputs.feature), update(outputs))
    metrics = learner.step(*batches(1)[0])
    assert [len(feature) for feature in calls] == [4, 4]
    assert model.template.abs().sum() > 0
    assert not model.template.requires_grad
    assert metrics["rest_loss"] > 0


def test_micro_batches_take_the_rest_along() -> None:
    """Without BatchNorm and dropout, a half batch in pieces is the same half batch."""
    states = []
    for micro_batch in (None, 2):
        learner, _ = make("paper", micro_batch=micro_batch)
        learner.network.model.eval()
        for images, labels in batches(2):
            learner.step(images, labels)
        states.append(
            {n: p.detach() for n, p in learner.network.model.named_parameters()} | learner.source.state_dict()
        )
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-11)


def test_nothing_of_the_rest_is_held_after_a_step() -> None:
    learner, _ = make("pipelined")
    learner.step(*batches(1)[0])
    assert learner.algorithm.last_real is not None
    assert all(part.tape is not None and part.tape.rest is None for part in learner.algorithm.last_real.batch)


def test_compiling_a_composite_model_is_refused() -> None:
    with pytest.raises(ValueError, match="composite"):
        Network(Several(), head="head", composite=composite(True), compile="inductor")
