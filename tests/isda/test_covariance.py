"""The quadratic form, the draws and the variances of each form of covariance."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import references
from references import FORMS, problem
from semaug import Diagonal, Full, LowRank
from semaug.isda import quadratic as chunked

forms = pytest.mark.parametrize("form", FORMS)
sizes = {"seed": st.integers(0, 10**6), "n": st.integers(1, 6), "c": st.integers(2, 7), "d": st.integers(1, 6)}


@given(form=st.sampled_from(FORMS), soft=st.booleans(), **sizes)
def test_quadratic_equals_the_naive_formula(form, soft, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    labels = p.probabilities if soft else p.labels
    expected = references.quadratic(p.weight, labels, p.matrices)
    np.testing.assert_allclose(p.covariance.quadratic(p.weight, labels).numpy(), expected, rtol=1e-12, atol=1e-12)


@given(form=st.sampled_from(FORMS), soft=st.booleans(), **sizes)
def test_quadratic_is_not_negative_beyond_rounding(form, soft, seed, n, c, d):
    p = problem(form, seed, n, c, d, torch.float32)
    assert p.covariance.quadratic(p.weight, p.probabilities if soft else p.labels).min() >= -1e-5


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
def test_quadratic_does_not_see_a_vector_added_to_every_weight_row(form, soft, seed, n, c, d):
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
def test_quadratic_of_one_hot_labels_is_that_of_the_class_indices(form):
    p = problem(form)
    one_hot = torch.nn.functional.one_hot(p.labels, 5).double()
    expected = p.covariance.quadratic(p.weight, p.labels)
    torch.testing.assert_close(p.covariance.quadratic(p.weight, one_hot), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("like", [Diagonal, LowRank, Full], ids=lambda form: form.__name__)
def test_the_forms_agree_on_a_diagonal_covariance(like):
    p = problem("diagonal")
    variance = p.covariance.variance
    same = {
        Diagonal: lambda: LowRank(variance, torch.zeros(4, 2, 3, dtype=torch.float64)),
        LowRank: lambda: LowRank(torch.zeros_like(variance), torch.diag_embed(variance.sqrt())),
        Full: lambda: Full(torch.diag_embed(variance)),
    }[like]()
    expected = p.covariance.quadratic(p.weight, p.labels)
    torch.testing.assert_close(same.quadratic(p.weight, p.labels), expected, rtol=1e-12, atol=1e-12)


@forms
@pytest.mark.parametrize("strength", [1.0, 2.5])
def test_draws_have_the_mean_and_covariance_claimed(form, strength):
    count = 100_000
    p = problem(form, n=3)
    draws = p.covariance.sample(p.features, count, strength, torch.Generator().manual_seed(1))
    assert draws.shape == (count, 3, 3)
    for i, claimed in enumerate(strength * p.matrices):
        variances = np.diag(claimed)
        sample = draws[:, i].numpy()
        assert (np.abs(sample.mean(0) - p.features[i].numpy()) <= 5 * np.sqrt(variances / count)).all()
        standard_error = np.sqrt((np.outer(variances, variances) + claimed**2) / count)
        assert (np.abs(np.cov(sample.T) - claimed) <= 5 * standard_error).all()
        # The threshold is sharp enough to reject a wrong scale.
        assert (np.abs(np.cov(sample.T) - 1.1 * claimed) > 5 * standard_error).any()


@forms
def test_draws_of_different_samples_are_independent(form):
    p = problem(form, n=2)
    draws = p.covariance.sample(p.features, 100_000, generator=torch.Generator().manual_seed(1)) - p.features
    scale = draws.square().mean(0).sqrt()
    correlation = torch.einsum("md,me->de", draws[:, 0] / scale[0], draws[:, 1] / scale[1]) / 100_000
    assert correlation.abs().max() < 5 / 100_000**0.5


@forms
def test_draws_repeat_with_the_generator_and_are_the_features_at_strength_zero(form):
    p = problem(form)
    first, again = (p.covariance.sample(p.features, 2, 1.5, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(p.covariance.sample(p.features, 2, 0.0), p.features.expand(2, -1, -1))


def test_draws_of_a_singular_matrix_stay_in_its_range():
    direction = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    form = Full(torch.outer(direction, direction)[None])
    draws = form.sample(torch.zeros(1, 3, dtype=torch.float64), 100)[:, 0]
    along = draws @ direction / direction.square().sum()
    torch.testing.assert_close(draws, along[:, None] * direction, rtol=0, atol=1e-6)
    assert along.std() > 0.5


@forms
def test_drawing_leaves_the_features_alone(form):
    p = problem(form)
    before = p.features.clone()
    p.covariance.sample(p.features, 3)
    assert torch.equal(p.features, before)


@given(form=st.sampled_from(FORMS), **sizes)
def test_diagonal_gives_the_variances(form, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    expected = np.diagonal(p.matrices, axis1=1, axis2=2)
    np.testing.assert_allclose(p.covariance.diagonal().numpy(), expected, rtol=1e-12)


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


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Diagonal(torch.ones(3)), r"variance must have shape N×D, not \(3,\)"),
        (lambda: LowRank(torch.ones(2, 3, 1), torch.ones(2, 1, 3)), "variance must have shape N×D"),
        (lambda: LowRank(torch.ones(2, 3), torch.ones(2, 3)), "factors must have shape N×rank×D"),
        (lambda: Full(torch.ones(3, 3)), "matrices must have shape K×D×D"),
        (lambda: Full(torch.ones(2, 3, 4)), "matrices must be square"),
    ],
)
def test_wrong_shapes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "form",
    [
        Diagonal(torch.ones(2, 4)),
        Diagonal(torch.ones(3, 5)),
        LowRank(torch.ones(3, 4), torch.ones(2, 1, 4)),
        Full(torch.eye(4)[None]),
        Full(torch.eye(4)[None], torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_a_covariance_of_another_batch_or_dimension_is_refused(form):
    with pytest.raises(ValueError, match="does not fit 3 labels and a head of 4 dimensions"):
        form.quadratic(torch.randn(6, 4), torch.tensor([0, 5, 2]))


def test_a_large_vector_common_to_all_classes_costs_no_precision():
    weight, labels = torch.randn(6, 32), torch.tensor([0, 5, 2])
    form = Diagonal(torch.rand(3, 32))
    exact = Diagonal(form.variance.double()).quadratic(weight.double(), labels)
    common = 100 * torch.randn(32)
    shifted = (weight + common).double() - common.double()  # what fp32 keeps of the weight itself
    exact_shifted = Diagonal(form.variance.double()).quadratic(shifted, labels)
    torch.testing.assert_close(form.quadratic(weight, labels).double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(form.quadratic(weight + common, labels).double(), exact_shifted, rtol=1e-4, atol=1e-4)


# The diagonal form in chunks of classes


def in_chunks(rows, dimensions):
    """Work off the weight in chunks of at most so many rows."""
    return mock.patch.object(chunked, "_CHUNK", rows * dimensions)


def naive_form(features, bias, variance, left, right, labels):
    """``a_i·v_j + b_j + Σ_d s_id (u_jd − ū_id)(v_jd − v̄_id)`` with N×C×D numbers held; soft labels come as logits."""
    right = left if right is None else right
    if labels.is_floating_point():
        left_own, right_own = labels.softmax(1) @ left, labels.softmax(1) @ right
    else:
        left_own, right_own = left[labels], right[labels]
    product = (left - left_own[:, None]) * (right - right_own[:, None])
    form = torch.einsum("nd,ncd->nc", variance, product)
    return form if features is None else form + features @ right.T + bias


def form_problem(seed, n, c, d, soft, bilinear, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"features": (n, d), "bias": (c,), "variance": (n, d), "left": (c, d), "right": (c, d)}
    tensors = {name: torch.randn(size, generator=generator, dtype=dtype) for name, size in sizes.items()}
    tensors["right"] = tensors["right"] if bilinear else None
    labels = torch.randint(c, (n,), generator=generator)
    tensors["labels"] = torch.randn(n, c, generator=generator, dtype=dtype) if soft else labels
    return tensors


def chunked_form(features, bias, variance, left, right, labels):
    labels = labels.softmax(1) if labels.is_floating_point() else labels
    centres = (None if part is None else part.detach().mean(0) for part in (left, right))
    return chunked._Form.apply(features, bias, variance, left, right, labels, *centres)


many_sizes = sizes | {"rows": st.integers(1, 9), "soft": st.booleans(), "bilinear": st.booleans()}


def test_chunks_cover_all_classes_evenly():
    weight = torch.zeros(10, 3)
    for numbers, size in {1: 1, 3: 1, 6: 2, 9: 3, 12: 4, 15: 5, 18: 5, 29: 5, 30: 10, 1000: 10}.items():
        with mock.patch.object(chunked, "_CHUNK", numbers):
            assert chunked._chunk_size(weight) == size


@given(linear=st.booleans(), **many_sizes)
def test_form_in_chunks_equals_the_naive_formula(linear, rows, soft, bilinear, seed, n, c, d):
    p = form_problem(seed, n, c, d, soft, bilinear)
    p |= {} if linear else {"features": None, "bias": None}
    with in_chunks(rows, d):
        form = chunked_form(**p)
    torch.testing.assert_close(form, naive_form(**p), rtol=1e-12, atol=1e-12)
    if not soft and not linear:
        assert (form.gather(1, p["labels"][:, None]) == 0).all()


@given(wanted=st.sets(st.sampled_from(["features", "bias", "variance", "left", "right", "labels"])), **many_sizes)
def test_gradients_in_chunks_equal_those_of_the_naive_formula(wanted, rows, soft, bilinear, seed, n, c, d):
    p = form_problem(seed, n, c, d, soft, bilinear)
    wanted = [name for name in wanted if p[name] is not None and p[name].is_floating_point()] or ["variance"]
    leaves = [p[name].requires_grad_() for name in wanted]
    outer = torch.linspace(-1, 2, n * c, dtype=torch.float64).view(n, c)
    expected = torch.autograd.grad(naive_form(**p), leaves, outer)
    with in_chunks(rows, d):
        torch.testing.assert_close(torch.autograd.grad(chunked_form(**p), leaves, outer), expected)


@given(names=st.sets(st.sampled_from(["features", "bias", "variance", "left", "right", "labels"])), **many_sizes)
def test_derivative_along_a_direction_in_chunks_equals_that_of_the_naive_formula(
    names, rows, soft, bilinear, seed, n, c, d
):
    p = form_problem(seed, n, c, d, soft, bilinear)
    names = [name for name in names if p[name] is not None and p[name].is_floating_point()] or ["left"]
    directions = form_problem(seed + 1, n, c, d, True, True)
    point, along = tuple(p[name] for name in names), tuple(directions[name] for name in names)

    def derivative(form):
        return torch.func.jvp(lambda *parts: form(**p | dict(zip(names, parts, strict=True))), point, along)[1]

    # Reverse mode over forward mode, as the meta-gradient has it, in what does not move and what does.
    leaves = [leaf.requires_grad_() for leaf in p.values() if leaf is not None and leaf.is_floating_point()]
    outer = torch.linspace(-1, 2, n * c, dtype=torch.float64).view(n, c)
    options = {"allow_unused": True, "materialize_grads": True}
    expected = derivative(naive_form)
    with in_chunks(rows, d):
        result = derivative(chunked_form)
        torch.testing.assert_close(result, expected)
        if expected.requires_grad:
            found = torch.autograd.grad(result, leaves, outer, **options)
            torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, outer, **options))


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_derivatives_in_chunks_of_first_and_second_order_are_right(soft, bilinear, rows):
    p = form_problem(0, 2, 5, 3, soft, bilinear)
    names = [name for name, tensor in p.items() if tensor is not None and tensor.is_floating_point()]
    leaves = [p[name].requires_grad_() for name in names]

    def form(*tensors):
        return chunked_form(**p | dict(zip(names, tensors, strict=True)))

    with in_chunks(rows, 3):
        assert torch.autograd.gradcheck(form, leaves, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(form, leaves)


@pytest.mark.parametrize("common", [0.0, 100.0])
def test_gradients_in_fp32_are_no_worse_than_those_of_autograd(common):
    p = form_problem(0, 16, 200, 64, False, False, torch.float32)
    p["left"] += common
    exact, lean, plain = ({} for _ in range(3))
    outer = torch.randn(16, 200, generator=torch.Generator().manual_seed(1)).softmax(1)
    outer -= torch.nn.functional.one_hot(p["labels"], 200)
    names = ("features", "variance", "left")
    for found, form, dtype in (
        (exact, naive_form, torch.float64),
        (lean, chunked_form, torch.float32),
        (plain, lambda **q: chunked._form(*q.values(), q["left"].mean(0), None), torch.float32),
    ):
        q = {name: part.to(dtype) if part is not None and name != "labels" else part for name, part in p.items()}
        leaves = [q[name].requires_grad_() for name in names]
        with in_chunks(30, 64):
            gradients = torch.autograd.grad(form(**q), leaves, outer.to(dtype))
        found |= zip(names, (gradient.double() for gradient in gradients), strict=True)
    for name in names:
        error, allowed = ((found[name] - exact[name]).norm() / exact[name].norm() for found in (lean, plain))
        assert error < max(2 * allowed, 1e-6)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_loss_may_be_mapped_over_samples():
    p = form_problem(0, 4, 7, 3, False, False)
    p["variance"] = p["variance"].abs()
    weight = p["left"]

    def one(weight, variance, label):
        return Diagonal(variance[None]).quadratic(weight, label[None]).exp().sum()

    arguments = weight, p["variance"], p["labels"]
    expected = torch.stack([torch.func.grad(one)(weight, s, y) for s, y in zip(*arguments[1:], strict=True)])
    with in_chunks(3, 3):
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(one), (None, 0, 0))(*arguments), expected)
        weight.requires_grad_()
        (gradient,) = torch.autograd.grad(torch.func.vmap(one, (None, 0, 0))(*arguments).sum(), weight)
        torch.testing.assert_close(gradient, expected.sum(0))
