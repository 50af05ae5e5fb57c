"""Numbers at the ends of their range, and batches that hold hardly anything: finite results, or a clear sentence."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import semaug
from photos import photo_folder
from references import FORMS, problem
from semaug import ClassCovariance, Constant, CovNet, Diagonal, Full, LowRank, augmented_logits, isda_loss, strength
from semaug.inference.runs import read_metrics
from semaug.isda.covariance import Covariance
from semaug.isda.loss import isda_loss_along
from semaug.isda.precision import LARGEST_STRENGTH, LARGEST_TERM
from semaug.isda.quadratic import augmented
from semaug.isda.sources import ModulatedClassCovariance, Source
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train
from semaug.util.errors import SemaugError
from tiny import TinyNet

ORDERS = ("paper", "pipelined")
ENGINES = ("jvp", "double_backward")
WAYS: list[tuple[str, Any]] = [*itertools.product(ORDERS, ENGINES)]


# Large strengths, variances and weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ordinary_sizes_are_left_as_they_are_to_the_bit(dtype: torch.dtype) -> None:
    p = problem("diagonal", n=6, c=9, d=17, dtype=dtype)
    for scale, size in itertools.product((0.0, 10.0, 1e4), (1.0, 1e4)):
        weight = size * p.weight
        unbounded = augmented(p.features, p.bias, scale / 2 * p.covariance.diagonal(), weight, p.labels)
        assert torch.equal(augmented_logits(p.features, p.labels, weight, p.bias, p.covariance, scale), unbounded)


@pytest.mark.parametrize("form", FORMS)
def test_at_a_large_strength_logits_are_those_of_the_formula(form: str) -> None:
    p = problem(form, n=6, c=9, d=5)
    difference = p.weight[None] - p.weight[p.labels][:, None]
    term = torch.einsum("ncd,nde,nce->nc", difference, torch.tensor(p.matrices), difference)
    expected = p.features @ p.weight.T + p.bias + 1e4 / 2 * term
    torch.testing.assert_close(augmented_logits(*p.inputs, 1e4), expected, rtol=1e-12, atol=1e-9)


def large(form: str, samples: int, dimensions: int) -> tuple[Covariance, list[Tensor]]:
    """A Σ at the upper end of CovNet's range, or that of features of size 100, with the tensors it is made of."""
    ones = torch.ones(samples, dimensions)
    parts = [(1 - torch.finfo().eps) * ones]
    if form == "low rank":
        parts.append(ones[:, None].repeat(1, 2, 1) / 2**0.5)
    if form == "full":
        parts = [1e4 * torch.eye(dimensions).repeat(samples, 1, 1)]
    parts = [part.requires_grad_() for part in parts]
    kinds: dict[str, Any] = {"diagonal": Diagonal, "low rank": LowRank, "full": Full}
    return kinds[form](*parts), parts


@pytest.mark.parametrize("precision", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e3, 1e9, 1e15])
@pytest.mark.parametrize("scale", [1e4, LARGEST_STRENGTH])
@pytest.mark.parametrize("form", ["diagonal", "low rank", "full"])
def test_loss_and_gradients_are_finite_at_any_strength(
    form: str, scale: float, size: float, precision: torch.dtype
) -> None:
    labels = torch.tensor([0, 0, 3, 6])
    for smoothing in (0.0, 0.1):
        covariance, parts = large(form, 4, 64)
        features = torch.randn(4, 64).to(precision).requires_grad_()
        weight, bias = (size * torch.randn(7, 64)).requires_grad_(), torch.zeros(7, requires_grad=True)
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = isda_loss(features, labels, weight, bias, covariance, scale, label_smoothing=smoothing)
        leaves = [weight, bias, *parts] + [features] * (precision != torch.float16)
        gradients = torch.autograd.grad(loss, leaves)
        assert 0 < loss.item() <= 1.1 * LARGEST_TERM
        assert loss.dtype == torch.float32
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert all(gradient.norm().isfinite() for gradient in gradients)


def test_a_strength_too_large_is_refused_and_a_variance_that_is_nan_is_not_hidden() -> None:
    p = problem("diagonal", dtype=torch.float32)
    for too_large in (1.1 * LARGEST_STRENGTH, torch.tensor(1e13)):
        with pytest.raises(ValueError, match=r"strength must be at most 1e\+12, not 1\.?1?e\+1"):
            isda_loss(*p.inputs, too_large)
    with pytest.raises(ValueError, match=r"strength must be at most 1e\+12"):
        strength(1, 2, maximum=1e40)
    broken = p.covariance.diagonal().clone()
    broken[0, 0] = torch.nan
    assert isda_loss(*p.inputs[:4], Diagonal(broken), 1e4).isnan()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_closed_form_along_a_direction_knows_of_the_bound(smoothing: float) -> None:
    p = problem("diagonal", n=5, c=4, d=6)
    # Some variances are held by the bound and some are not.
    variance = p.covariance.diagonal() * torch.logspace(-20, 10, 6, dtype=torch.float64)
    point = p.features, 1e3 * p.weight, p.bias, variance
    direction = [torch.randn_like(part) for part in point]

    def loss(features: Tensor, weight: Tensor, bias: Tensor, variance: Tensor) -> Tensor:
        covariance = Diagonal(variance)
        return isda_loss(features, p.labels, weight, bias, covariance, 1e10, label_smoothing=smoothing, validate=False)

    expected = torch.func.jvp(loss, point, tuple(direction))[1]
    found = isda_loss_along(
        *point[:1], p.labels, *point[1:3], Diagonal(variance), 1e10, direction=direction, label_smoothing=smoothing
    )
    without = isda_loss_along(
        *point[:1], p.labels, *point[1:3], Diagonal(variance), 1e10,
        direction=[*direction[:3], None], label_smoothing=smoothing,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert found != without
    gradient = torch.autograd.functional.jacobian(lambda s: loss(*point[:3], s), variance)
    assert (gradient != 0).any(), "what is not held moves the loss"
    assert (gradient[:, -1] == 0).all(), "what is held does not"


def learner(
    source: Source | None, order: Any, engine: Any = "jvp", model: nn.Module | None = None, **options: Any
) -> semaug.LearnableAugmentation:
    model = TinyNet() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return semaug.LearnableAugmentation(model, optimizer, source, order=order, engine=engine, **options)


def all_finite(learner: semaug.LearnableAugmentation, *found: dict[str, Tensor]) -> bool:
    states = [learner.network.model.state_dict(), learner.source.state_dict(), *found]
    return all(bool(value.isfinite().all()) for state in states for value in state.values())


def saturated(dtype: torch.dtype = torch.float32, **options: Any) -> semaug.LearnableAugmentation:
    """A learner at the largest strength, with large weights: the bound holds some of its variances, and some not."""
    model = TinyNet(drop=0.0).to(dtype)
    with torch.no_grad():
        model.fc.weight.mul_(1e4 / model.fc.weight.abs().max())
        source = CovNet(6).to(dtype)
        source.layers.output.bias.copy_(torch.linspace(-8, 4, 6))
    held = LARGEST_STRENGTH / 2 * source.layers.output.bias.sigmoid() > LARGEST_TERM / (4 * 6 * 1e8)
    assert 0 < held.sum() < 6
    return learner(source, model=model, strength=LARGEST_STRENGTH, clip_norm=1.0, **options)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.parametrize(("order", "engine"), WAYS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_the_meta_loop_stays_finite_at_the_largest_strength(order: str, engine: str, autocast: Any) -> None:
    scaler = GradScaler("cpu") if autocast == torch.float16 else None
    taught = saturated(order=order, engine=engine, autocast=autocast, scaler=scaler)
    for _ in range(6):
        with torch.backends.mkldnn.flags(enabled=False):  # whose second derivatives in bf16 crash on some processors
            found = taught.step(torch.randn(8, 3, 9, 9), torch.arange(8) % 4)
        assert found["train_loss"] > 1e12
        assert all_finite(taught, {} if scaler else found)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_engines_agree_at_the_largest_strength(order: str, dtype: torch.dtype) -> None:
    images, labels = torch.randn(8, 3, 9, 9, dtype=dtype), torch.arange(8) % 4
    norms = []
    for engine in ENGINES:
        torch.manual_seed(3)
        norms.append(saturated(dtype, order=order, engine=engine).step(images, labels)["meta_gradient_norm"])
    assert norms[0] > 0
    torch.testing.assert_close(*norms, rtol=1e-9 if dtype == torch.float64 else 1e-2, atol=0)


# Batches that hold hardly anything


def sources() -> dict[str, Source]:
    return {
        "constant": Constant(0.5),
        "classwise": ClassCovariance(4, 6),
        "full": ClassCovariance(4, 6, form="full"),
        "covnet": CovNet(6),
        "low rank": CovNet(6, rank=2),
        "fixed trace": CovNet(6, fixed_trace=0.5),
        "modulated": ModulatedClassCovariance(4, 6),
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
def test_batches_that_hold_hardly_anything_are_trained_on(source: str, order: str, labels: list[int]) -> None:
    for engine in ENGINES if list(sources()[source].parameters()) else ENGINES[:1]:
        taught = learner(sources()[source], order, engine, strength=10.0)
        before = [parameter.detach().clone() for parameter in taught.network.model.parameters()]
        for _ in range(4):
            found = taught.step(torch.randn(len(labels), 3, 9, 9), torch.tensor(labels))
            assert found["train_loss"] > 0
            assert all_finite(taught, found)
        after = list(taught.network.model.parameters())
        assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", ["classwise", "full", "modulated"])
def test_a_class_seen_once_or_never_is_not_augmented(source: str, order: str) -> None:
    taught = learner(sources()[source], order, strength=10.0)
    found = taught.step(torch.randn(4, 3, 9, 9), torch.tensor([0, 1, 2, 3]))
    assert found["variance_mean"] == 0
    assert found["augmentation_share"] == 0
    assert taught.step(torch.randn(4, 3, 9, 9), torch.tensor([0, 1, 2, 3]))["variance_mean"] > 0
    labels = torch.tensor([0, 3])
    fresh = sources()[source]
    fresh.update(torch.randn(1, 6), labels[:1])
    assert torch.equal(fresh(torch.randn(2, 6), labels).diagonal(), torch.zeros(2, 6))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos"), species=3, train=4, test=1, size=36)


def config(photos: Path, output: Path, **options: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "method": "learnable",
        "model": "small",
        "pretrained": False,
        "epochs": 2,
        "resize": 36,
        "crop": 32,
        "lr": 0.01,
    }
    settings |= {"val_per_class": 1, "workers": 0, "cache": None, "device": "cpu"}
    return TrainConfig(data=str(photos), output=output, **{**settings, **options})


def test_half_batches_of_one_image_are_trained_on_even_where_one_is_left_over(photos: Path, tmp_path: Path) -> None:
    rows = read_metrics(train(config(photos, tmp_path / "run", batch_size=1)))  # 9 images: 2, 2, 2 and 3
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(0 < row["train_loss"] < 1e3 for row in rows)


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 4, "micro_batch": 1}])
def test_one_value_per_channel_is_told_in_one_sentence(photos: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(SemaugError, match="BatchNorm has nothing to average over .* larger --batch-size"):
        train(config(photos, tmp_path / "run", model="resnet18", **options))


def test_a_single_class_is_refused_before_training(photos: Path, tmp_path: Path) -> None:
    first = min((photos / "train").iterdir())
    shutil.copytree(first, tmp_path / "photos" / first.name)
    with pytest.raises(SemaugError, match="has a single class; there is nothing to tell apart"):
        train(config(tmp_path / "photos", tmp_path / "run", batch_size=2))


def test_a_strength_out_of_range_is_told_in_one_sentence(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SemaugError, match=r"strength must be at most 1e\+12, not 1e\+13"):
        train(config(photos, tmp_path / "run", batch_size=4, augmentation=Augmentation(strength=1e13)))


@pytest.mark.parametrize("method", ["constant", "isda", "learnable"])
def test_training_at_the_largest_strength_is_finite(photos: Path, tmp_path: Path, method: Any) -> None:
    augmentation = Augmentation(strength=LARGEST_STRENGTH)
    rows = read_metrics(
        train(config(photos, tmp_path / "run", method=method, batch_size=4, augmentation=augmentation, clip_norm=1.0))
    )
    assert rows[1]["strength"] == LARGEST_STRENGTH / 2
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in rows)
