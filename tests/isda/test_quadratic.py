"""The quadratic form of a diagonal Σ in chunks of classes: values and derivatives against the naive formula."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semaug import Diagonal
from semaug.isda import quadratic

NAMES = ["features", "bias", "variance", "weight", "other", "labels"]
sizes = {
    "seed": st.integers(0, 10**6),
    "n": st.integers(1, 6),
    "c": st.integers(2, 7),
    "d": st.integers(1, 6),
    "rows": st.integers(1, 9),
    "soft": st.booleans(),
    "bilinear": st.booleans(),
}


def in_chunks(rows, dimensions):
    """Compute in chunks of at most this many rows of the weight."""
    return mock.patch.object(quadratic, "_CHUNK", rows * dimensions)


def naive_form(features, bias, variance, weight, other, labels):
    """``a_i·v_j + b_j + Σ_d s_id (w_jd − w̄_id)(v_jd − v̄_id)`` with N×C×D numbers; soft labels are passed as logits."""
    other = weight if other is None else other
    if labels.is_floating_point():
        own, own_other = labels.softmax(1) @ weight, labels.softmax(1) @ other
    else:
        own, own_other = weight[labels], other[labels]
    product = (weight - own[:, None]) * (other - own_other[:, None])
    form = torch.einsum("nd,ncd->nc", variance, product)
    return form if features is None else form + features @ other.T + bias


def chunked_form(features, bias, variance, weight, other, labels):
    labels = labels.softmax(1) if labels.is_floating_point() else labels
    return quadratic.quadratic_form(features, bias, variance, weight, labels, other)


def form_problem(seed, n, c, d, soft, bilinear, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"features": (n, d), "bias": (c,), "variance": (n, d), "weight": (c, d), "other": (c, d)}
    tensors = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    tensors["other"] = tensors["other"] if bilinear else None
    labels = torch.randint(c, (n,), generator=generator)
    tensors["labels"] = torch.randn(n, c, generator=generator, dtype=dtype) if soft else labels
    return tensors


def differentiable(tensors):
    return [name for name, tensor in tensors.items() if tensor is not None and tensor.is_floating_point()]


def test_chunks_cover_all_classes_evenly():
    weight = torch.zeros(10, 3)
    for numbers, size in {1: 1, 3: 1, 6: 2, 9: 3, 12: 4, 15: 5, 18: 5, 29: 5, 30: 10, 1000: 10}.items():
        with mock.patch.object(quadratic, "_CHUNK", numbers):
            assert quadratic._chunk_size(weight) == size


@given(linear=st.booleans(), **sizes)
def test_form_equals_the_naive_formula(linear, rows, soft, bilinear, seed, n, c, d):
    p = form_problem(seed, n, c, d, soft, bilinear)
    p |= {} if linear else {"features": None, "bias": None}
    with in_chunks(rows, d):
        form = chunked_form(**p)
    torch.testing.assert_close(form, naive_form(**p), rtol=1e-12, atol=1e-12)
    if not soft and not linear:
        assert (form.gather(1, p["labels"][:, None]) == 0).all()


@given(wanted=st.sets(st.sampled_from(NAMES)), **sizes)
def test_gradients_equal_those_of_the_naive_formula(wanted, rows, soft, bilinear, seed, n, c, d):
    p = form_problem(seed, n, c, d, soft, bilinear)
    wanted = [name for name in wanted if name in differentiable(p)] or ["variance"]
    leaves = [p[name].requires_grad_() for name in wanted]
    outer = torch.linspace(-1, 2, n * c, dtype=torch.float64).view(n, c)
    expected = torch.autograd.grad(naive_form(**p), leaves, outer)
    with in_chunks(rows, d):
        torch.testing.assert_close(torch.autograd.grad(chunked_form(**p), leaves, outer), expected)


@given(moving=st.sets(st.sampled_from(NAMES)), **sizes)
def test_forward_mode_and_its_gradients_equal_those_of_the_naive_formula(moving, rows, soft, bilinear, seed, n, c, d):
    p = form_problem(seed, n, c, d, soft, bilinear)
    moving = [name for name in moving if name in differentiable(p)] or ["weight"]
    directions = form_problem(seed + 1, n, c, d, True, True)
    point, along = tuple(p[name] for name in moving), tuple(directions[name] for name in moving)

    def derivative(form):
        return torch.func.jvp(lambda *parts: form(**p | dict(zip(moving, parts, strict=True))), point, along)[1]

    # Reverse mode over forward mode, in the inputs that move and in those that do not.
    leaves = [p[name].requires_grad_() for name in differentiable(p)]
    outer = torch.linspace(-1, 2, n * c, dtype=torch.float64).view(n, c)
    options = {"allow_unused": True, "materialize_grads": True}
    expected = derivative(naive_form)
    with in_chunks(rows, d):
        result = derivative(chunked_form)
        torch.testing.assert_close(result, expected)
        if expected.requires_grad:
            gradients = torch.autograd.grad(result, leaves, outer, **options)
            torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, outer, **options))


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_first_and_second_derivatives_equal_finite_differences(soft, bilinear, rows):
    p = form_problem(0, 2, 5, 3, soft, bilinear)
    names = differentiable(p)
    leaves = [p[name].requires_grad_() for name in names]

    def form(*tensors):
        return chunked_form(**p | dict(zip(names, tensors, strict=True)))

    with in_chunks(rows, 3):
        assert torch.autograd.gradcheck(form, leaves, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(form, leaves)


@pytest.mark.parametrize("common", [0.0, 100.0])
def test_gradients_in_fp32_are_about_as_exact_as_those_of_autograd(common):
    p = form_problem(0, 16, 200, 64, False, False, torch.float32)
    p["weight"] += common
    outer = torch.randn(16, 200, generator=torch.Generator().manual_seed(1)).softmax(1)
    outer -= torch.nn.functional.one_hot(p["labels"], 200)
    names = ("features", "variance", "weight")

    def gradients(form, dtype):
        q = {name: part.to(dtype) if name in differentiable(p) else part for name, part in p.items()}
        leaves = [q[name].requires_grad_() for name in names]
        with in_chunks(30, 64):
            result = torch.autograd.grad(form(**q), leaves, outer.to(dtype))
        return [gradient.double() for gradient in result]

    def plain_form(**q):
        return quadratic._form(*q.values(), q["weight"].mean(0), None)

    ours, plain = gradients(chunked_form, torch.float32), gradients(plain_form, torch.float32)
    for exact, *found in zip(gradients(naive_form, torch.float64), ours, plain, strict=True):
        error, error_of_autograd = ((gradient - exact).norm() / exact.norm() for gradient in found)
        assert error < max(4 * error_of_autograd, 1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_samples():
    p = form_problem(0, 4, 7, 3, False, False)
    p["variance"] = p["variance"].abs()
    weight = p["weight"]

    def one(weight, variance, label):
        return Diagonal(variance[None]).quadratic(weight, label[None]).exp().sum()

    arguments = weight, p["variance"], p["labels"]
    expected = torch.stack([torch.func.grad(one)(weight, s, y) for s, y in zip(*arguments[1:], strict=True)])
    with in_chunks(3, 3):
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(one), (None, 0, 0))(*arguments), expected)
        weight.requires_grad_()
        (gradient,) = torch.autograd.grad(torch.func.vmap(one, (None, 0, 0))(*arguments).sum(), weight)
        torch.testing.assert_close(gradient, expected.sum(0))
