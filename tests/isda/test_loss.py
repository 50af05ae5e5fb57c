"""The ISDA loss against naive formulas, Monte Carlo and cross-entropy; its derivatives, precision and errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import references
from references import FORMS, problem
from semaug import Diagonal, Full, augmented_logits, isda_loss, sampled_loss
from semaug.isda.loss import isda_loss_along

forms = pytest.mark.parametrize("form", FORMS)
sizes = {"seed": st.integers(0, 10**6), "n": st.integers(1, 6), "c": st.integers(2, 7), "d": st.integers(1, 6)}


# The value of the loss


@given(form=st.sampled_from(FORMS), scale=st.floats(0, 10), **sizes)
def test_loss_equals_the_naive_formula(form, scale, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    expected = references.losses(p, p.labels, scale)
    result = isda_loss(*p.inputs, scale, reduction="none").numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


@given(form=st.sampled_from(FORMS), scale=st.floats(0, 10), smoothing=st.floats(0, 1), soft=st.booleans(), **sizes)
def test_soft_and_smoothed_loss_equals_the_naive_formula(form, scale, smoothing, soft, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    labels = p.probabilities if soft else p.labels
    expected = references.losses(p, labels, scale, smoothing)
    inputs = p.soft_inputs if soft else p.inputs
    result = isda_loss(*inputs, scale, label_smoothing=smoothing, reduction="none").numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


@forms
def test_augmented_logits_equal_the_naive_formula(form):
    p = problem(form)
    plain = p.features.numpy() @ p.weight.numpy().T + p.bias.numpy()
    for labels in (p.labels, p.probabilities):
        expected = plain + 1.7 / 2 * references.quadratic(p.weight, labels, p.matrices)
        result = augmented_logits(p.features, labels, p.weight, p.bias, p.covariance, 1.7)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-12)


@forms
@pytest.mark.parametrize("soft", [False, True])
def test_no_bias_is_a_bias_of_zero(form, soft):
    p = problem(form)
    features, labels, weight, bias, covariance = p.soft_inputs if soft else p.inputs
    expected = isda_loss(features, labels, weight, torch.zeros_like(bias), covariance, 2.0)
    result = isda_loss(features, labels, weight, None, covariance, 2.0)
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("soft", [False, True])
def test_reductions_are_the_mean_the_sum_and_the_losses(soft, smoothing):
    p = problem("diagonal", n=6)
    inputs = p.soft_inputs if soft else p.inputs
    expected = references.losses(p, inputs[1], 1.5, smoothing)
    for reduction, value in {"mean": expected.mean(), "sum": expected.sum(), "none": expected}.items():
        result = isda_loss(*inputs, 1.5, label_smoothing=smoothing, reduction=reduction)
        np.testing.assert_allclose(result.numpy(), value, rtol=1e-12)
    assert torch.equal(isda_loss(*inputs, 1.5), isda_loss(*inputs, 1.5, reduction="mean"))


@given(form=st.sampled_from(FORMS), smoothing=st.floats(0, 1), soft=st.booleans(), **sizes)
def test_loss_is_the_cross_entropy_without_augmentation(form, smoothing, soft, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    labels = p.probabilities if soft else p.labels
    for reduction in ("mean", "sum", "none"):
        options = {"label_smoothing": smoothing, "reduction": reduction}
        expected = F.cross_entropy(F.linear(p.features, p.weight, p.bias), labels, **options)
        for covariance, scale in ((p.covariance, 0.0), (None, 3.0)):
            result = isda_loss(p.features, labels, p.weight, p.bias, covariance, scale, **options)
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@forms
def test_loss_of_one_hot_labels_equals_that_of_class_indices(form):
    p = problem(form)
    one_hot = F.one_hot(p.labels, 5).double()
    result = isda_loss(p.features, one_hot, p.weight, p.bias, p.covariance, 2.0)
    torch.testing.assert_close(result, isda_loss(*p.inputs, 2.0), rtol=1e-12, atol=0)


@given(form=st.sampled_from(FORMS), soft=st.booleans(), low=st.floats(0, 5), more=st.floats(0.1, 5), **sizes)
def test_loss_does_not_fall_as_strength_grows(form, soft, low, more, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    inputs = p.soft_inputs if soft else p.inputs
    rise = isda_loss(*inputs, low + more, reduction="none") - isda_loss(*inputs, low, reduction="none")
    assert rise.min() >= -1e-10
    assert rise.max() > 0


def test_strength_may_be_a_tensor_and_is_differentiable():
    p = problem("full")
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    loss = isda_loss(*p.inputs, scale)
    assert torch.equal(loss, isda_loss(*p.inputs, 1.3))
    (slope,) = torch.autograd.grad(loss, scale)
    rise = isda_loss(*p.inputs, 1.3 + 1e-6) - isda_loss(*p.inputs, 1.3 - 1e-6)
    assert float(slope) == pytest.approx(float(rise) / 2e-6, rel=1e-6)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_augmented_logit_of_the_own_class_equals_the_plain_logit_bitwise(form, dtype):
    p = problem(form, n=50, c=7, d=33, dtype=dtype)
    own = p.labels[:, None]
    augmented, plain = augmented_logits(*p.inputs, 7.3), F.linear(p.features, p.weight, p.bias)
    assert torch.equal(augmented.gather(1, own), plain.gather(1, own))
    assert (augmented > plain).sum() > 250
    assert torch.equal(augmented_logits(*p.inputs[:4], None, 7.3), plain)


# The upper bound


def expected_cross_entropy(p, labels, scale, smoothing=0.0, count=2000):
    """The mean over draws of the cross-entropy of each sample, and its standard error."""
    draws = p.covariance.sample(p.features, count, scale, torch.Generator().manual_seed(3))
    logits = F.linear(draws, p.weight, p.bias).flatten(0, 1)
    targets = labels.repeat(count, *[1] * (labels.ndim - 1))
    values = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none").view(count, -1)
    inputs = p.features, labels, p.weight, p.bias, p.covariance, scale, count
    options = {"generator": torch.Generator().manual_seed(3), "label_smoothing": smoothing, "reduction": "none"}
    return sampled_loss(*inputs, **options), values.std(0) / count**0.5


@forms
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_of_draws_is_their_mean_cross_entropy(form, soft, smoothing):
    p = problem(form, n=3)
    inputs = p.soft_inputs if soft else p.inputs
    drawn = p.covariance.sample(p.features, 5, 1.5, torch.Generator().manual_seed(3))
    options = {"label_smoothing": smoothing, "reduction": "none"}
    each = [F.cross_entropy(F.linear(features, p.weight, p.bias), inputs[1], **options) for features in drawn]
    expected = torch.stack(each).mean(0)
    for reduction, value in {"mean": expected.mean(), "sum": expected.sum(), "none": expected}.items():
        options = {"label_smoothing": smoothing, "reduction": reduction}
        result = sampled_loss(*inputs, 1.5, 5, generator=torch.Generator().manual_seed(3), **options)
        torch.testing.assert_close(result, value, rtol=1e-12, atol=1e-12)
    plain = isda_loss(*inputs[:4], None, label_smoothing=smoothing)
    torch.testing.assert_close(sampled_loss(*inputs, 0.0, 2, label_smoothing=smoothing), plain, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="draws must be at least 1, not 0"):
        sampled_loss(*inputs, 1.5, 0)


@settings(max_examples=80)
@given(
    form=st.sampled_from(FORMS),
    scale=st.floats(0.01, 10),
    smoothing=st.sampled_from([0.0, 0.1, 0.7]),
    soft=st.booleans(),
    **sizes,
)
def test_loss_bounds_the_expected_cross_entropy_from_above(form, scale, smoothing, soft, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    inputs = p.soft_inputs if soft else p.inputs
    mean, error = expected_cross_entropy(p, inputs[1], scale, smoothing)
    bound = isda_loss(*inputs, scale, label_smoothing=smoothing, reduction="none")
    assert (bound >= mean - 4 * error - 1e-12).all()


def test_cross_entropy_of_augmented_logits_is_no_bound_for_soft_labels():
    p = problem("diagonal", n=1, c=2)
    p.features, p.probabilities = torch.zeros_like(p.features), torch.full_like(p.probabilities, 0.5)
    p.bias = torch.zeros_like(p.bias)
    mean, error = expected_cross_entropy(p, p.probabilities, 5.0)
    tempting = F.cross_entropy(augmented_logits(*p.soft_inputs, 5.0), p.probabilities)
    assert tempting < mean - 20 * error
    assert isda_loss(*p.soft_inputs, 5.0) > mean


# Derivatives


def differentiable(form):
    """The loss as a function of (features, weight, bias, *tensors of the covariance), and these as leaves."""
    p = problem(form, n=3, c=4)
    index = getattr(p.covariance, "index", None)
    parts = [tensor for tensor in vars(p.covariance).values() if tensor is not None and tensor is not index]
    extra = () if index is None else (index,)

    def loss(features, weight, bias, *parts, labels, **options):
        return isda_loss(features, labels, weight, bias, type(p.covariance)(*parts, *extra), 0.7, **options)

    return p, loss, [tensor.clone().requires_grad_() for tensor in (p.features, p.weight, p.bias, *parts)]


@forms
@pytest.mark.parametrize("kind", ["hard", "soft", "smoothed"])
def test_first_and_second_derivatives_equal_finite_differences(form, kind):
    p, loss, leaves = differentiable(form)
    labels = p.probabilities if kind == "soft" else p.labels
    smoothing = 0.2 if kind == "smoothed" else 0.0

    def function(*tensors):
        return loss(*tensors, labels=labels, label_smoothing=smoothing)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@forms
def test_gradients_equal_those_of_the_naive_formula(form):
    p, loss, leaves = differentiable(form)
    gradients = torch.autograd.grad(loss(*leaves, labels=p.labels), leaves)[:3]
    features, weight, bias = leaves[:3]
    naive = references.naive_loss(features, p.labels, weight, bias, torch.tensor(p.matrices), 0.7)
    for gradient, expected in zip(gradients, torch.autograd.grad(naive, leaves[:3]), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)


def test_gradient_in_the_variance_equals_that_of_the_naive_formula():
    p, loss, leaves = differentiable("diagonal")
    matrices = torch.tensor(p.matrices, requires_grad=True)
    naive = references.naive_loss(p.features, p.labels, p.weight, p.bias, matrices, 0.7)
    expected = torch.autograd.grad(naive, matrices)[0].diagonal(dim1=1, dim2=2)
    gradient = torch.autograd.grad(loss(*leaves, labels=p.labels), leaves[3])[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)


@forms
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_reverse_mode_over_forward_mode_equals_double_backward(form, smoothing):
    p, loss, leaves = differentiable(form)
    head, parts = leaves[:3], leaves[3:]
    directions = [torch.randn_like(leaf) for leaf in head]

    def at(*head):
        return loss(*head, *parts, labels=p.labels, label_smoothing=smoothing)

    gradients = torch.autograd.grad(at(*head), head, create_graph=True)
    slope = sum((gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True))
    along = torch.func.jvp(at, tuple(leaf.detach() for leaf in head), tuple(directions))[1]
    torch.testing.assert_close(along, slope)
    torch.testing.assert_close(torch.autograd.grad(along, parts), torch.autograd.grad(slope, parts))


@forms
def test_a_compiled_loss_has_the_same_values_and_gradients(form):
    p, loss, leaves = differentiable(form)

    def hard_and_soft(*tensors):
        return loss(*tensors, labels=p.labels), loss(*tensors, labels=p.probabilities)

    expected = hard_and_soft(*leaves)
    fullgraph = form != "full by index"  # which reads the values of the index
    result = torch.compile(hard_and_soft, backend="aot_eager", fullgraph=fullgraph)(*leaves)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for value, wanted in zip(result, expected, strict=True):
        gradients = [torch.autograd.grad(each, leaves, retain_graph=True) for each in (value, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


# Precision


@forms
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["hard", "soft", "smoothed"])
def test_loss_is_computed_in_fp32_inside_autocast(form, weights, kind):
    p = problem(form, n=8, c=6, d=16, dtype=torch.float32)
    features, weight, bias = p.features.bfloat16(), p.weight.to(weights), p.bias.to(weights)
    labels = p.probabilities if kind == "soft" else p.labels
    smoothing = 0.1 if kind == "smoothed" else 0.0
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(features, weight).dtype == torch.bfloat16
        loss = isda_loss(features, labels, weight, bias, p.covariance, 3.0, label_smoothing=smoothing)
        logits = augmented_logits(features, labels, weight, bias, p.covariance, 3.0)
    p.features, p.weight, p.bias = features.float(), weight.float(), bias.float()
    inputs = p.features, labels, p.weight, p.bias, p.covariance, 3.0
    assert loss.dtype == logits.dtype == torch.float32
    assert torch.equal(loss, isda_loss(*inputs, label_smoothing=smoothing))
    assert torch.equal(logits, augmented_logits(*inputs))
    assert float(loss) == pytest.approx(references.losses(p, labels, 3.0, smoothing).mean(), rel=1e-5)


def test_gradients_inside_autocast_have_the_type_of_their_inputs():
    p = problem("diagonal", dtype=torch.float32)
    features, weight = p.features.bfloat16().requires_grad_(), p.weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = isda_loss(features, p.labels, weight, p.bias, p.covariance)
    loss.backward()
    rounded = features.detach().float()
    expected = torch.autograd.grad(isda_loss(rounded, p.labels, weight, p.bias, p.covariance), weight)[0]
    assert features.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad, expected)


def test_a_backward_pass_inside_autocast_is_computed_in_fp32():
    p = problem("diagonal", n=8, c=6, d=16, dtype=torch.float32)
    leaves = [p.features.requires_grad_(), p.weight.requires_grad_(), p.bias.requires_grad_()]
    expected = torch.autograd.grad(isda_loss(*p.inputs), leaves)
    directions = tuple(torch.randn_like(leaf) for leaf in leaves)

    def along():
        head = tuple(leaf.detach() for leaf in leaves)
        return torch.func.jvp(lambda a, w, b: isda_loss(a, p.labels, w, b, p.covariance), head, directions)[1]

    slope = along()
    with torch.autocast("cpu", torch.bfloat16):
        quadratic = p.covariance.quadratic(p.weight, p.labels)
        inside = torch.autograd.grad(quadratic, p.weight, torch.ones_like(quadratic))[0]
        gradients = torch.autograd.grad(isda_loss(*p.inputs), leaves)
        assert torch.equal(along(), slope)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    quadratic = p.covariance.quadratic(p.weight, p.labels)
    assert torch.equal(inside, torch.autograd.grad(quadratic, p.weight, torch.ones_like(quadratic))[0])


# Errors


def changed(tensor, value, *index):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


WRONG = {  # the problem has N = 4, C = 5, D = 3
    "features of one dimension": (lambda p: {"features": p.features[0]}, r"features must have shape \(N, D\)"),
    "features of three dimensions": (lambda p: {"features": p.features[None]}, r"features must have shape \(N, D\)"),
    "an empty batch": (lambda p: {"features": p.features[:0], "labels": p.labels[:0]}, "the batch is empty"),
    "weight of other width": (lambda p: {"weight": p.weight[:, :2]}, r"weight must have shape \(5, 3\), not \(5, 2\)"),
    "weight of one dimension": (lambda p: {"weight": p.weight[0]}, r"weight must have shape \(3, 3\), not \(3,\)"),
    "weight of no dimension": (lambda p: {"weight": p.weight[0, 0]}, r"weight must have shape \(3,\), not \(\)"),
    "bias of other length": (lambda p: {"bias": p.bias[:4]}, r"bias must have shape \(5,\), not \(4,\)"),
    "bias of two dimensions": (lambda p: {"bias": p.bias[None]}, r"bias must have shape \(5,\)"),
    "labels of other length": (lambda p: {"labels": p.labels[:3]}, r"class indices must have shape \(4,\)"),
    "labels of two dimensions": (lambda p: {"labels": p.labels[:, None]}, r"class indices must have shape \(4,\)"),
    "soft labels of other width": (
        lambda p: {"labels": p.probabilities[:, :4]},
        r"probabilities must have shape \(4, 5\)",
    ),
    "soft labels of other length": (
        lambda p: {"labels": p.probabilities[:3]},
        r"probabilities must have shape \(4, 5\)",
    ),
    "class indices as floats": (
        lambda p: {"labels": p.labels.double()},
        r"must be int64, not torch\.float64; probabilities have shape \(4, 5\)",
    ),
    "label too large": (lambda p: {"labels": changed(p.labels, 5, 1)}, r"labels must lie in 0 … 4, found .* … 5"),
    "label negative": (lambda p: {"labels": changed(p.labels, -1, 1)}, r"labels must lie in 0 … 4, found -1"),
    "label to ignore": (lambda p: {"labels": changed(p.labels, -100, 0)}, r"labels must lie in 0 … 4, found -100"),
    "labels in int32": (lambda p: {"labels": p.labels.int()}, "must be int64, not torch.int32"),
    "labels in bool": (lambda p: {"labels": p.labels > 2}, "must be int64, not torch.bool"),
    "soft labels of sum 2": (lambda p: {"labels": 2 * p.probabilities}, "soft labels must be probabilities.* sum of 1"),
    "soft labels negative": (
        lambda p: {"labels": changed(p.probabilities, torch.tensor([1.5, -0.5, 0, 0, 0]), 2)},
        "soft labels must be probabilities: not negative",
    ),
    "soft labels NaN": (lambda p: {"labels": changed(p.probabilities, math.nan, 0, 0)}, "must be probabilities"),
    "features NaN": (lambda p: {"features": changed(p.features, math.nan, 2, 1)}, r"NaN or infinite in row 2 \(1 of 4"),
    "features infinite": (lambda p: {"features": changed(p.features, math.inf, 1)}, r"NaN or infinite in row 1"),
    "features of minus infinity": (lambda p: {"features": changed(p.features, -math.inf, 0, 0)}, "NaN or infinite"),
    "a negative variance": (
        lambda p: {"covariance": Diagonal(-p.covariance.diagonal())},
        "the variances of Σ must not be negative",
    ),
    "strength negative": (lambda p: {"strength": -0.1}, "strength must be a finite number ≥ 0, not -0.1"),
    "strength NaN": (lambda p: {"strength": math.nan}, "strength must be a finite number ≥ 0, not nan"),
    "strength infinite": (lambda p: {"strength": math.inf}, "strength must be a finite number ≥ 0, not inf"),
    "strength a negative tensor": (lambda p: {"strength": torch.tensor(-1.0)}, "strength must be a finite number ≥ 0"),
    "strength a NaN tensor": (lambda p: {"strength": torch.tensor(math.nan)}, "strength must be a finite number ≥ 0"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("function", ["logits", "loss", "smoothed loss"])
def test_wrong_inputs_raise_a_clear_error(case, function):
    p = problem("diagonal")
    inputs = dict(zip(("features", "labels", "weight", "bias", "covariance"), p.inputs, strict=True))
    change, message = WRONG[case]
    function, options = {
        "logits": (augmented_logits, {}),
        "loss": (isda_loss, {}),
        "smoothed loss": (isda_loss, {"label_smoothing": 0.1}),
    }[function]
    with pytest.raises(ValueError, match=message) as caught:
        function(**(inputs | change(p) | options))
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": -0.1}, r"label_smoothing must lie in \[0, 1\], not -0.1"),
        ({"label_smoothing": 1.1}, r"label_smoothing must lie in \[0, 1\], not 1.1"),
        ({"label_smoothing": math.nan}, r"label_smoothing must lie in \[0, 1\], not nan"),
        ({"reduction": "average"}, "reduction must be 'mean', 'sum' or 'none', not 'average'"),
        ({"reduction": None}, "reduction must be 'mean', 'sum' or 'none', not None"),
    ],
)
def test_wrong_options_raise_a_clear_error(options, message, soft):
    p = problem("diagonal")
    with pytest.raises(ValueError, match=message):
        isda_loss(*(p.soft_inputs if soft else p.inputs), **options)


@pytest.mark.parametrize("function", [augmented_logits, isda_loss])
def test_without_validation_only_shapes_are_checked(function):
    p = problem("diagonal")
    features = changed(p.features, math.nan, 0)
    assert function(features, *p.inputs[1:], validate=False).isnan().any()
    with pytest.raises(ValueError, match="features must have shape"):
        function(features[0], *p.inputs[1:], validate=False)
    with pytest.raises(ValueError, match="the batch is empty"):
        function(features[:0], p.labels[:0], *p.inputs[2:], validate=False)
    with pytest.raises(ValueError, match=r"variances \(4, 3\) do not match features \(2, 3\)"):
        function(features[:2], p.labels[:2], *p.inputs[2:], validate=False)


def test_validation_changes_no_value():
    p = problem("full")
    for inputs in (p.inputs, p.soft_inputs):
        assert torch.equal(isda_loss(*inputs, 2.0), isda_loss(*inputs, 2.0, validate=False))


def test_a_full_covariance_shared_by_index_equals_its_copies():
    p = problem("full by index", n=6)
    copies = Full(p.covariance.matrices[p.covariance.index])
    expected = isda_loss(*p.inputs[:4], copies, 2.0, reduction="none")
    torch.testing.assert_close(isda_loss(*p.inputs, 2.0, reduction="none"), expected, rtol=1e-13, atol=1e-13)


def test_mismatched_types_raise_a_clear_error():
    features, labels, weight = torch.randn(3, 4), torch.tensor([0, 1, 1]), torch.randn(2, 4)
    with pytest.raises(ValueError, match="features of torch.float64 do not match a head of torch.float32"):
        isda_loss(features.double(), labels, weight, None, None)
    with pytest.raises(ValueError, match="features of torch.int64"):
        isda_loss(features.long(), labels, weight, None, None)
    with pytest.raises(ValueError, match="a head of torch.int64"):
        isda_loss(features, labels, weight.long(), None, None)
    with pytest.raises(ValueError, match="strength must be a single number"):
        isda_loss(features, labels, weight, None, None, torch.ones(2))


def test_soft_labels_may_be_in_half_precision():
    labels = torch.rand(50, 7).softmax(1).bfloat16()
    assert isda_loss(torch.randn(50, 4), labels, torch.randn(7, 4), None, None).isfinite()


@pytest.mark.parametrize("labels_of", ["index", "soft", "smoothed"])
@pytest.mark.parametrize("moving", [(1, 1, 1, 1), (1, 1, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_along_a_direction_equals_forward_mode_and_so_does_its_gradient(labels_of, moving, bias):
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n, c, d = 5, 7, 4
    primals = [numbers(n, d), numbers(c, d), numbers(c), numbers(n, d).exp().requires_grad_()]
    tangents = [numbers(*p.shape) * on for p, on in zip(primals, moving, strict=True)]
    labels = torch.randint(c, (n,), generator=generator) if labels_of != "soft" else numbers(n, c).softmax(1)
    smoothing = 0.2 if labels_of == "smoothed" else 0.0

    def loss(features, weight, offset, variance):
        offset = offset if bias else None
        return isda_loss(features, labels, weight, offset, Diagonal(variance), 1.7, label_smoothing=smoothing)

    expected = torch.func.jvp(loss, tuple(primals), tuple(tangents))[1]
    direction = [t if on else None for t, on in zip(tangents, moving, strict=True)]
    if not bias:
        primals[2] = direction[2] = None
    result = isda_loss_along(
        *primals[:1], labels, *primals[1:3], Diagonal(primals[3]), 1.7, direction=direction, label_smoothing=smoothing
    )
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)
    gradients = [torch.autograd.grad(v, primals[3], allow_unused=True)[0] for v in (result, expected)]
    gradients = [torch.zeros_like(primals[3]) if g is None else g for g in gradients]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
