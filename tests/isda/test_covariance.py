"""The forms of Σ: quadratic form, draws and variances, against dense matrices."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import references
from references import FORMS, problem
from semaug import Diagonal, Full

forms = pytest.mark.parametrize("form", FORMS)
sizes = {"seed": st.integers(0, 10**6), "n": st.integers(1, 6), "c": st.integers(2, 7), "d": st.integers(1, 6)}


# The quadratic form


@given(form=st.sampled_from(FORMS), soft=st.booleans(), **sizes)
def test_quadratic_equals_the_naive_formula(form, soft, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    labels = p.probabilities if soft else p.labels
    expected = references.quadratic(p.weight, labels, p.matrices)
    np.testing.assert_allclose(p.covariance.quadratic(p.weight, labels).numpy(), expected, rtol=1e-12, atol=1e-12)


@given(form=st.sampled_from(FORMS), soft=st.booleans(), **sizes)
def test_quadratic_in_fp32_is_not_negative_beyond_rounding(form, soft, seed, n, c, d):
    p = problem(form, seed, n, c, d, torch.float32)
    assert p.covariance.quadratic(p.weight, p.probabilities if soft else p.labels).min() >= -1e-4


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quadratic_of_the_own_class_is_exactly_zero(form, dtype):
    p = problem(form, n=50, c=7, d=33, dtype=dtype)
    quadratic = p.covariance.quadratic(p.weight, p.labels)
    own = torch.zeros_like(quadratic, dtype=torch.bool).scatter(1, p.labels[:, None], True)
    assert (quadratic[own] == 0).all()
    assert (quadratic[~own] > 0).sum() > 250


@given(form=st.sampled_from(FORMS), **sizes)
def test_quadratic_is_symmetric_in_own_and_other_class(form, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    table = torch.stack([p.covariance.quadratic(p.weight, torch.full((n,), own)) for own in range(c)])  # own, i, other
    torch.testing.assert_close(table, table.transpose(0, 2), rtol=1e-12, atol=1e-12)


@given(form=st.sampled_from(FORMS), soft=st.booleans(), **sizes)
def test_quadratic_ignores_a_vector_added_to_every_weight_row(form, soft, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    labels = p.probabilities if soft else p.labels
    moved = p.weight + torch.linspace(-3, 5, d, dtype=torch.float64)
    expected = p.covariance.quadratic(p.weight, labels)
    torch.testing.assert_close(p.covariance.quadratic(moved, labels), expected, rtol=1e-12, atol=1e-11)


@given(form=st.sampled_from(FORMS), scale=st.floats(0.1, 10), **sizes)
def test_quadratic_grows_with_the_square_of_the_weight(form, scale, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    expected = scale**2 * p.covariance.quadratic(p.weight, p.labels)
    torch.testing.assert_close(p.covariance.quadratic(scale * p.weight, p.labels), expected, rtol=1e-11, atol=1e-11)


@forms
def test_quadratic_of_one_hot_labels_equals_that_of_class_indices(form):
    p = problem(form)
    one_hot = torch.nn.functional.one_hot(p.labels, 5).double()
    expected = p.covariance.quadratic(p.weight, p.labels)
    torch.testing.assert_close(p.covariance.quadratic(p.weight, one_hot), expected, rtol=1e-12, atol=1e-12)


def test_a_full_covariance_with_diagonal_matrices_equals_the_diagonal_form():
    p = problem("diagonal")
    full = Full(torch.diag_embed(p.covariance.variance))
    expected = p.covariance.quadratic(p.weight, p.labels)
    torch.testing.assert_close(full.quadratic(p.weight, p.labels), expected, rtol=1e-12, atol=1e-12)


@forms
def test_quadratic_in_bf16_is_computed_in_fp32(form):
    p = problem(form, dtype=torch.bfloat16)
    tensors = {
        name: value.float() if value.is_floating_point() else value
        for name, value in vars(p.covariance).items()
        if value is not None
    }
    result = p.covariance.quadratic(p.weight, p.labels)
    assert result.dtype == torch.float32
    assert torch.equal(result, type(p.covariance)(**tensors).quadratic(p.weight.float(), p.labels))


def test_a_large_vector_common_to_all_classes_costs_no_precision():
    weight, labels = torch.randn(6, 32), torch.tensor([0, 5, 2])
    form = Diagonal(torch.rand(3, 32))
    exact = Diagonal(form.variance.double()).quadratic(weight.double(), labels)
    common = 100 * torch.randn(32)
    shifted = (weight + common).double() - common.double()  # what fp32 keeps of the weight itself
    exact_shifted = Diagonal(form.variance.double()).quadratic(shifted, labels)
    torch.testing.assert_close(form.quadratic(weight, labels).double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(form.quadratic(weight + common, labels).double(), exact_shifted, rtol=1e-4, atol=1e-4)


# Draws and variances


@forms
@pytest.mark.parametrize("strength", [1.0, 2.5])
def test_draws_have_the_stated_mean_and_covariance(form, strength):
    count = 100_000
    p = problem(form, n=3)
    draws = p.covariance.sample(p.features, count, strength, torch.Generator().manual_seed(1))
    assert draws.shape == (count, 3, 3)
    for i, stated in enumerate(strength * p.matrices):
        variances = np.diag(stated)
        sample = draws[:, i].numpy()
        assert (np.abs(sample.mean(0) - p.features[i].numpy()) <= 5 * np.sqrt(variances / count)).all()
        standard_error = np.sqrt((np.outer(variances, variances) + stated**2) / count)
        assert (np.abs(np.cov(sample.T) - stated) <= 5 * standard_error).all()
        # The threshold is sharp enough to reject a wrong scale.
        assert (np.abs(np.cov(sample.T) - 1.1 * stated) > 5 * standard_error).any()


@forms
def test_draws_of_different_samples_are_independent(form):
    count = 100_000
    p = problem(form, n=2)
    draws = p.covariance.sample(p.features, count, generator=torch.Generator().manual_seed(1)) - p.features
    scale = draws.square().mean(0).sqrt()
    correlation = torch.einsum("md,me->de", draws[:, 0] / scale[0], draws[:, 1] / scale[1]) / count
    assert correlation.abs().max() < 5 / count**0.5


@forms
def test_draws_repeat_with_the_generator_and_equal_the_features_at_strength_zero(form):
    p = problem(form)
    before = p.features.clone()
    first, again = (p.covariance.sample(p.features, 2, 1.5, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(p.covariance.sample(p.features, 2, 0.0), p.features.expand(2, -1, -1))
    assert torch.equal(p.features, before), "sampling must not change the features"


def test_draws_of_a_singular_matrix_stay_in_its_range():
    direction = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    form = Full(torch.outer(direction, direction)[None])
    draws = form.sample(torch.zeros(1, 3, dtype=torch.float64), 100)[:, 0]
    along = draws @ direction / direction.square().sum()
    torch.testing.assert_close(draws, along[:, None] * direction, rtol=0, atol=1e-6)
    assert along.std() > 0.5


@given(form=st.sampled_from(FORMS), **sizes)
def test_diagonal_returns_the_variances(form, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    expected = np.diagonal(p.matrices, axis1=1, axis2=2)
    np.testing.assert_allclose(p.covariance.diagonal().numpy(), expected, rtol=1e-12)


# Errors


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Diagonal(torch.ones(3)), r"variance must have shape N×D, not \(3,\)"),
        (lambda: Diagonal(torch.ones(2, 3, 1)), r"variance must have shape N×D, not \(2, 3, 1\)"),
        (lambda: Full(torch.ones(3, 3)), r"matrices must have shape K×D×D, not \(3, 3\)"),
        (lambda: Full(torch.ones(2, 3, 4)), r"matrices must have shape K×D×D, not \(2, 3, 4\)"),
    ],
)
def test_wrong_shapes_raise_an_error(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "form",
    [
        Diagonal(torch.ones(2, 4)),
        Diagonal(torch.ones(3, 5)),
        Full(torch.eye(4)[None]),
        Full(torch.eye(4)[None], torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_a_covariance_of_another_batch_or_dimension_raises_an_error(form):
    with pytest.raises(ValueError, match="does not fit 3 labels and a head of 4 dimensions"):
        form.quadratic(torch.randn(6, 4), torch.tensor([0, 5, 2]))
