"""The learner at the largest strength, and on batches with very few images or classes."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from semaug import ClassCovariance, Constant, CovNet, LearnableAugmentation, Source
from semaug.isda.precision import LARGEST_STRENGTH, LARGEST_TERM
from tiny import TinyNet

ORDERS = ("paper", "pipelined")
ENGINES = ("jvp", "double_backward")
WAYS: list[tuple[Any, Any]] = [*itertools.product(ORDERS, ENGINES)]


def learner_of(
    source: Source | None, order: Any, engine: Any = "jvp", model: nn.Module | None = None, **options: Any
) -> LearnableAugmentation:
    model = TinyNet() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return LearnableAugmentation(
        model, optimizer, source, order=order, engine=engine, **{"strength": 10.0, "frozen_blocks": 0, **options}
    )


def all_finite(learner: LearnableAugmentation, metrics: dict[str, Tensor]) -> bool:
    states = [learner.network.model.state_dict(), learner.source.state_dict(), metrics]
    return all(bool(value.isfinite().all()) for state in states for value in state.values())


# The largest strength


def saturated(dtype: torch.dtype = torch.float32, **options: Any) -> LearnableAugmentation:
    """A learner at the largest strength, with large weights: the bound limits some of its variances, but not all."""
    model = TinyNet(drop=0.0).to(dtype)
    with torch.no_grad():
        model.fc.weight.mul_(1e4 / model.fc.weight.abs().max())
        source = CovNet(6).to(dtype)
        bias = source.layers.get_submodule("output").bias
        bias.copy_(torch.linspace(-8, 4, 6))
    limited = LARGEST_STRENGTH / 2 * bias.sigmoid() > LARGEST_TERM / (4 * 6 * 1e8)
    assert 0 < limited.sum() < 6
    return learner_of(source, model=model, strength=LARGEST_STRENGTH, clip_norm=1.0, **options)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.parametrize(("order", "engine"), WAYS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_the_meta_loop_stays_finite_at_the_largest_strength(order: str, engine: str, autocast: Any) -> None:
    scaler = GradScaler("cpu") if autocast == torch.float16 else None
    learner = saturated(order=order, engine=engine, autocast=autocast, scaler=scaler)
    for _ in range(3):
        with torch.backends.mkldnn.flags(enabled=False):  # whose second derivatives in bf16 crash on some processors
            metrics = learner.step(torch.randn(8, 3, 9, 9), torch.arange(8) % 4)
        assert metrics["train_loss"] > 1e12
        assert all_finite(learner, {} if scaler else metrics)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.float64, 1e-9)])
def test_both_engines_agree_at_the_largest_strength(order: str, dtype: torch.dtype, tolerance: float) -> None:
    images, labels = torch.randn(8, 3, 9, 9, dtype=dtype), torch.arange(8) % 4
    norms = []
    for engine in ENGINES:
        torch.manual_seed(3)
        learner = saturated(dtype, order=order, engine=engine)
        norms.append(learner.step(images, labels)["meta_gradient_norm"])
    assert norms[0] > 0
    torch.testing.assert_close(*norms, rtol=tolerance, atol=0)


# Batches with very few images or classes


def sources() -> dict[str, Source]:
    return {
        "constant": Constant(0.5),
        "classwise": ClassCovariance(4, 6),
        "full": ClassCovariance(4, 6, form="full"),
        "shrunk": ClassCovariance(4, 6, sharing="shrunk"),
        "neighbours": ClassCovariance(4, 6, sharing="neighbours"),
        "covnet": CovNet(6),
        "fixed trace": CovNet(6, fixed_trace=0.5),
    }


BATCHES = {
    "one class only": [2] * 6,
    "a class seen once": [0, 0, 0, 1, 0, 0],
    "a meta half without a class": [0, 1, 0, 2, 2, 3],
    "halves of one image": [1, 3],
    "halves of two images and of one": [1, 1, 0],
}


@pytest.mark.parametrize("labels", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", sources())
def test_training_on_batches_with_few_images_or_classes(source: str, order: str, labels: list[int]) -> None:
    for engine in ENGINES if list(sources()[source].parameters()) else ENGINES[:1]:
        learner = learner_of(sources()[source], order, engine, strength=10.0)
        before = [parameter.detach().clone() for parameter in learner.network.model.parameters()]
        for _ in range(2):
            metrics = learner.step(torch.randn(len(labels), 3, 9, 9), torch.tensor(labels))
            assert metrics["train_loss"] > 0
            assert all_finite(learner, metrics)
        after = list(learner.network.model.parameters())
        assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", ["classwise", "full"])
def test_a_class_seen_once_or_never_is_not_augmented(source: str, order: str) -> None:
    learner = learner_of(sources()[source], order, strength=10.0)
    metrics = learner.step(torch.randn(4, 3, 9, 9), torch.tensor([0, 1, 2, 3]))
    assert metrics["variance_mean"] == 0
    assert metrics["augmentation_share"] == 0
    assert learner.step(torch.randn(4, 3, 9, 9), torch.tensor([0, 1, 2, 3]))["variance_mean"] > 0
    labels = torch.tensor([0, 3])
    fresh = sources()[source]
    fresh.update(torch.randn(1, 6), labels[:1])
    assert torch.equal(fresh(torch.randn(2, 6), labels).diagonal(), torch.zeros(2, 6))
