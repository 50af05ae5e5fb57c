"""The loss at the ends of the range of its numbers: large strengths, variances and weights."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from references import FORMS, problem
from semaug import Covariance, Diagonal, Full, augmented_logits, isda_loss, strength
from semaug.isda.loss import isda_loss_along
from semaug.isda.precision import LARGEST_STRENGTH, LARGEST_TERM
from semaug.isda.quadratic import quadratic_form


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_does_not_change_ordinary_sizes(dtype: torch.dtype) -> None:
    p = problem("diagonal", n=6, c=9, d=17, dtype=dtype)
    for scale, size in itertools.product((0.0, 10.0, 1e4), (1.0, 1e4)):
        weight = size * p.weight
        unbounded = quadratic_form(p.features, p.bias, scale / 2 * p.covariance.diagonal(), weight, p.labels)
        assert torch.equal(augmented_logits(p.features, p.labels, weight, p.bias, p.covariance, scale), unbounded)


@pytest.mark.parametrize("form", FORMS)
def test_logits_at_a_large_strength_equal_the_formula(form: str) -> None:
    p = problem(form, n=6, c=9, d=5)
    difference = p.weight[None] - p.weight[p.labels][:, None]
    term = torch.einsum("ncd,nde,nce->nc", difference, torch.tensor(p.matrices), difference)
    expected = p.features @ p.weight.T + p.bias + 1e4 / 2 * term
    torch.testing.assert_close(augmented_logits(*p.inputs, 1e4), expected, rtol=1e-12, atol=1e-9)


def large(form: str, samples: int, dimensions: int) -> tuple[Covariance, Tensor]:
    """A Σ at the upper end of CovNet's range, or of features of size 100, and its tensor."""
    if form == "full":
        matrices = (1e4 * torch.eye(dimensions).repeat(samples, 1, 1)).requires_grad_()
        return Full(matrices), matrices
    variance = ((1 - torch.finfo().eps) * torch.ones(samples, dimensions)).requires_grad_()
    return Diagonal(variance), variance


@pytest.mark.parametrize("precision", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e3, 1e9, 1e15])
@pytest.mark.parametrize("scale", [1e4, LARGEST_STRENGTH])
@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_loss_and_gradients_are_finite_at_any_strength(
    form: str, scale: float, size: float, precision: torch.dtype
) -> None:
    labels = torch.tensor([0, 0, 3, 6])
    for smoothing in (0.0, 0.1):
        covariance, tensor = large(form, 4, 64)
        features = torch.randn(4, 64).to(precision).requires_grad_()
        weight, bias = (size * torch.randn(7, 64)).requires_grad_(), torch.zeros(7, requires_grad=True)
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = isda_loss(features, labels, weight, bias, covariance, scale, label_smoothing=smoothing)
        leaves: list[Any] = [weight, bias, tensor] + [features] * (precision != torch.float16)
        gradients = torch.autograd.grad(loss, leaves)
        assert 0 < loss.item() <= 1.1 * LARGEST_TERM
        assert loss.dtype == torch.float32
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert all(gradient.norm().isfinite() for gradient in gradients)


def test_a_strength_too_large_raises_an_error_and_a_nan_variance_gives_a_nan_loss() -> None:
    p = problem("diagonal", dtype=torch.float32)
    for too_large in (1.1 * LARGEST_STRENGTH, torch.tensor(1e13)):
        with pytest.raises(ValueError, match=r"strength must be at most 1e\+12, not 1\.?1?e\+1"):
            isda_loss(*p.inputs, too_large)
    with pytest.raises(ValueError, match=r"strength must be at most 1e\+12"):
        strength(1, 2, maximum=1e40)
    variance = p.covariance.diagonal().clone()
    variance[0, 0] = torch.nan
    assert isda_loss(*p.inputs[:4], Diagonal(variance), 1e4).isnan()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_closed_form_along_a_direction_respects_the_bound(smoothing: float) -> None:
    p = problem("diagonal", n=5, c=4, d=6)
    # Some variances are limited by the bound and some are not.
    variance = p.covariance.diagonal() * torch.logspace(-20, 10, 6, dtype=torch.float64)
    point = p.features, 1e3 * p.weight, p.bias, variance
    direction = [torch.randn_like(part) for part in point]

    def loss(features: Tensor, weight: Tensor, bias: Tensor, variance: Tensor) -> Tensor:
        covariance = Diagonal(variance)
        return isda_loss(features, p.labels, weight, bias, covariance, 1e10, label_smoothing=smoothing, validate=False)

    def along(*direction: Tensor | None) -> Tensor:
        features, weight, bias, variance = point
        inputs = features, p.labels, weight, bias, Diagonal(variance), 1e10
        return isda_loss_along(*inputs, direction=direction, label_smoothing=smoothing)

    expected = torch.func.jvp(loss, point, tuple(direction))[1]
    torch.testing.assert_close(along(*direction), expected, rtol=1e-10, atol=0)
    assert along(*direction) != along(*direction[:3], None)
    gradient = torch.autograd.functional.jacobian(lambda s: loss(*point[:3], s), variance)
    assert (gradient != 0).any(), "a variance below the bound changes the loss"
    assert (gradient[:, -1] == 0).all(), "a variance above the bound does not"
