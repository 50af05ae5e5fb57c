"""The ISDA loss against naive formulas, Monte Carlo and cross-entropy; its gradients, memory, precision and errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import references
from references import FORMS, problem
from semaug import Diagonal, Full, LowRank, augmented_logits, isda_loss, strength
from semaug.isda import loss as functional
from semaug.isda import quadratic as chunked

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
    features, labels, weight, bias, form = p.soft_inputs if soft else p.inputs
    expected = isda_loss(features, labels, weight, torch.zeros_like(bias), form, 2.0)
    torch.testing.assert_close(isda_loss(features, labels, weight, None, form, 2.0), expected, rtol=1e-14, atol=0)


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
        for form, scale in ((p.covariance, 0.0), (None, 3.0)):
            result = isda_loss(p.features, labels, p.weight, p.bias, form, scale, **options)
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@forms
def test_loss_of_one_hot_labels_is_that_of_the_class_indices(form):
    p = problem(form)
    one_hot = F.one_hot(p.labels, 5).double()
    result = isda_loss(p.features, one_hot, p.weight, p.bias, p.covariance, 2.0)
    torch.testing.assert_close(result, isda_loss(*p.inputs, 2.0), rtol=1e-12, atol=0)


@given(form=st.sampled_from(FORMS), soft=st.booleans(), low=st.floats(0, 5), more=st.floats(0.1, 5), **sizes)
def test_loss_does_not_fall_as_strength_grows(form, soft, low, more, seed, n, c, d):
    p = problem(form, seed, n, c, d)
    inputs = p.soft_inputs if soft else p.inputs
    rise = isda_loss(*inputs, low + more, reduction="none") - isda_loss(*inputs, low, reduction="none")
    assert rise.min() >= -1e-12
    assert rise.max() > 0


def test_strength_may_be_a_tensor_and_is_differentiable():
    p = problem("low rank")
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    loss = isda_loss(*p.inputs, scale)
    assert torch.equal(loss, isda_loss(*p.inputs, 1.3))
    (slope,) = torch.autograd.grad(loss, scale)
    rise = isda_loss(*p.inputs, 1.3 + 1e-6) - isda_loss(*p.inputs, 1.3 - 1e-6)
    assert float(slope) == pytest.approx(float(rise) / 2e-6, rel=1e-6)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_augmented_logit_of_the_own_class_is_bitwise_the_plain_logit(form, dtype):
    p = problem(form, n=50, c=7, d=33, dtype=dtype)
    own = p.labels[:, None]
    augmented, plain = augmented_logits(*p.inputs, 7.3), F.linear(p.features, p.weight, p.bias)
    assert torch.equal(augmented.gather(1, own), plain.gather(1, own))
    assert (augmented > plain).sum() > 250
    assert torch.equal(augmented_logits(*p.inputs[:4], None, 7.3), plain)


# The upper bound


def expected_cross_entropy(p, labels, scale, smoothing=0.0, count=4000):
    """The mean over draws of the cross-entropy of each sample, and its standard error."""
    draws = p.covariance.sample(p.features, count, scale, torch.Generator().manual_seed(3))
    logits = F.linear(draws, p.weight, p.bias).flatten(0, 1)
    targets = labels.repeat(count, *[1] * (labels.ndim - 1))
    values = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none").view(count, -1)
    return values.mean(0), values.std(0) / count**0.5


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
def test_first_and_second_derivatives_are_right(form, kind):
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
@pytest.mark.parametrize("soft", [False, True])
def test_a_compiled_loss_has_the_same_value_and_gradients(form, soft):
    p, loss, leaves = differentiable(form)

    def function(*tensors):
        return loss(*tensors, labels=p.probabilities if soft else p.labels)

    expected = function(*leaves)
    fullgraph = form != "full by index"  # which reads the index
    result = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)(*leaves)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(value, leaves) for value in (result, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


# Memory


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest output of any operator, and how many operators ran."""

    def __init__(self):
        super().__init__()
        self.largest = self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operators += 1
        self.largest = max([self.largest, *(leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf))])
        return out


def large_problem(rank, n, c, d):
    """fp32 leaves of the loss, diagonal for rank 0."""
    leaves = [torch.randn(n, d), torch.randn(c, d) / d**0.5, torch.zeros(c), torch.rand(n, d)]
    leaves += [torch.randn(n, rank, d) / d] if rank else []
    return torch.randint(c, (n,)), [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rank", [0, 4])
def test_no_tensor_of_the_loss_is_much_larger_than_its_inputs_and_logits(rank, smoothing):
    n, c, d = 64, 10_000, 512
    labels, leaves = large_problem(rank, n, c, d)
    features, weight, bias, *parts = leaves
    with LargestTensor() as record:
        form = LowRank(*parts) if rank else Diagonal(*parts)
        loss = isda_loss(features, labels, weight, bias, form, label_smoothing=smoothing)
        forward = record.operators
        loss.backward()
    assert all(leaf.grad is not None for leaf in leaves)
    assert forward > 5
    assert record.operators > forward + 5
    assert c * d <= record.largest < 4 * max(n * c, c * d, n * d)
    assert record.largest < min(n * c * d, n * d * d)


class LargeAllocations(TorchDispatchMode):
    """Counts the results of operators that lie in new memory of more than so many numbers in fp32."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.found = numbers, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {memory(leaf).data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        made = [memory(leaf) for leaf in tree_leaves(out) if torch.is_tensor(leaf)]
        self.found += [func for new in made if new.nbytes() > 4 * self.numbers and new.data_ptr() not in given]
        return out


def memory(tensor):
    return tensor.untyped_storage()


@pytest.fixture
def many_classes(monkeypatch):
    """A problem of which no operator may have a result of more than 2·N·C numbers, the gradient of the weight aside."""
    n, c, d = 16, 4096, 256
    monkeypatch.setattr(chunked, "_CHUNK", 2 * n * c)
    assert 2 * n * c == c * d / 8
    return (*large_problem(0, n, c, d), LargeAllocations(2 * n * c))


def test_forward_and_backward_make_nothing_large_but_the_gradient_of_the_weight(many_classes):
    labels, (features, weight, bias, variance), record = many_classes
    with record:
        isda_loss(features, labels, weight.detach(), bias, Diagonal(variance)).backward()
        loss = isda_loss(features, labels, weight, bias, Diagonal(variance))
        assert record.found == []
        gradient = torch.autograd.grad(loss, (features, weight, bias, variance))[1]
    assert record.found == [torch.ops.aten.new_empty.default]
    assert gradient.shape == weight.shape


def test_soft_labels_make_nothing_large_but_the_gradient_of_the_weight(many_classes):
    labels, (_, weight, _, variance), record = many_classes
    labels = F.one_hot(labels, 4096) * 0.9 + 0.1 / 4096
    with record:
        quadratic = Diagonal(variance).quadratic(weight, labels)
        assert record.found == []
        torch.autograd.grad(quadratic.sum(), (weight, variance))
    assert record.found == [torch.ops.aten.new_empty.default]


def test_the_head_of_the_meta_gradient_makes_nothing_large(many_classes):
    labels, (features, weight, bias, variance), record = many_classes

    def loss(features, weight, bias):
        return isda_loss(features, labels, weight, bias, Diagonal(variance))

    head = tuple(part.detach() for part in (features, weight, bias))
    directions = tuple(torch.randn_like(part) for part in head)
    with record:
        along = torch.func.jvp(loss, head, directions)[1]
        (gradient,) = torch.autograd.grad(along, variance)
    assert record.found == []
    assert gradient.norm() > 0


def test_the_graph_keeps_nothing_large_but_the_weight(many_classes):
    labels, (features, weight, bias, variance), _ = many_classes
    kept = {}

    def keep(tensor):
        kept[memory(tensor).data_ptr()] = memory(tensor).nbytes() / 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        isda_loss(features, labels, weight, bias, Diagonal(variance))
    assert kept.pop(memory(weight).data_ptr()) == weight.numel()
    assert sum(kept.values()) < 2 * 16 * 4096


def test_the_record_of_large_allocations_sees_new_memory_and_that_alone():
    with LargeAllocations(99) as record:
        large = torch.zeros(10, 10)
        large.T.add_(1)[2:].expand(3, 8, 10)
        large[:5] + large[5:]
        large.sum(0, keepdim=True).expand(1000, 10)
        assert record.found == [torch.ops.aten.zeros.default]
        large.T + 1
    assert len(record.found) == 2


def test_the_record_of_memory_catches_the_naive_formula():
    n, c, d = 16, 100, 32
    labels, (features, weight, bias, variance) = large_problem(0, n, c, d)
    with LargestTensor() as record:
        references.naive_loss(features, labels, weight, bias, torch.diag_embed(variance), 1.0)
    assert record.largest >= max(n * c * d, n * d * d)
    assert record.largest >= 4 * max(n * c, c * d, n * d)


def test_the_record_of_memory_sees_the_backward_pass():
    class LargeBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(1000, 3).clone().mean(0)

    x = torch.ones(3, requires_grad=True)
    with LargestTensor() as record:
        loss = LargeBackward.apply(x)
        assert record.largest <= 3
        loss.backward()
    assert record.largest == 3000


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


def test_gradients_inside_autocast_keep_the_type_of_their_inputs():
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
        found = torch.autograd.grad(isda_loss(*p.inputs), leaves)
        assert torch.equal(along(), slope)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    quadratic = p.covariance.quadratic(p.weight, p.labels)
    assert torch.equal(inside, torch.autograd.grad(quadratic, p.weight, torch.ones_like(quadratic))[0])


# The schedule


@given(total=st.floats(1e-3, 1e6), share=st.floats(0, 1), maximum=st.floats(0, 100), power=st.floats(0, 5))
def test_strength_is_the_share_of_training_to_the_power_times_the_maximum(total, share, maximum, power):
    step = min(share * total, total)
    expected = maximum * float(np.power(step / total, power))
    assert strength(step, total, maximum, power) == pytest.approx(expected, rel=1e-12)
    assert 0 <= strength(step, total, maximum, power) <= maximum


@given(steps=st.tuples(st.integers(0, 1000), st.integers(0, 1000)), power=st.floats(0, 5))
def test_strength_never_falls_during_training(steps, power):
    early, late = sorted(steps)
    assert strength(early, 1000, power=power) <= strength(late, 1000, power=power)


def test_strength_starts_at_zero_and_ends_at_the_maximum():
    for power in (0.5, 1.0, 3.0):
        assert strength(0, 90, 7.5, power) == 0.0
        assert strength(90, 90, 7.5, power) == 7.5
    assert strength(45, 90) == 5.0
    assert strength(45, 90, 8.0, 2.0) == 2.0
    assert isinstance(strength(1, 2, 3), float)


def test_strength_of_power_zero_is_constant():
    assert {strength(step, 10, 2.5, 0) for step in range(11)} == {2.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 10), "0 ≤ step ≤ total"),
        ((11, 10), "0 ≤ step ≤ total"),
        ((0, 0), "total > 0"),
        ((0, -5), "total > 0"),
        ((math.nan, 10), "0 ≤ step ≤ total"),
        ((1, 10, -1.0), "maximum ≥ 0"),
        ((1, 10, math.nan), "finite maximum"),
        ((1, 10, math.inf), "finite maximum"),
        ((1, 10, 1.0, -0.5), "power ≥ 0"),
    ],
)
def test_strength_refuses_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        strength(*arguments)


# Errors


def changed(tensor, value, *index):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


WRONG = {  # the problem has N = 4, C = 5, D = 3
    "features of one dimension": (lambda p: {"features": p.features[0]}, r"features must have shape \(N, D\)"),
    "features of three dimensions": (lambda p: {"features": p.features[None]}, r"features must have shape \(N, D\)"),
    "weight of other width": (lambda p: {"weight": p.weight[:, :2]}, r"weight must have shape \(C, 3\)"),
    "weight of one dimension": (lambda p: {"weight": p.weight[0]}, r"weight must have shape \(C, 3\)"),
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
    "class indices as floats": (lambda p: {"labels": p.labels.double()}, r"probabilities must have shape \(4, 5\)"),
    "label too large": (lambda p: {"labels": changed(p.labels, 5, 1)}, r"labels must lie in 0 … 4, found .* … 5"),
    "label negative": (lambda p: {"labels": changed(p.labels, -1, 1)}, r"labels must lie in 0 … 4, found -1"),
    "label to ignore": (lambda p: {"labels": changed(p.labels, -100, 0)}, r"labels must lie in 0 … 4, found -100"),
    "labels in int32": (lambda p: {"labels": p.labels.int()}, "must be int64, not torch.int32"),
    "labels in bool": (lambda p: {"labels": p.labels > 2}, "must be int64, not torch.bool"),
    "soft labels of sum 2": (lambda p: {"labels": 2 * p.probabilities}, "soft labels must be probabilities.* sum 1"),
    "soft labels negative": (
        lambda p: {"labels": changed(p.probabilities, torch.tensor([1.5, -0.5, 0, 0, 0]), 2)},
        "soft labels must be probabilities: not negative",
    ),
    "soft labels NaN": (lambda p: {"labels": changed(p.probabilities, math.nan, 0, 0)}, "must be probabilities"),
    "features NaN": (lambda p: {"features": changed(p.features, math.nan, 2, 1)}, r"NaN or infinite in row 2 \(1 of 4"),
    "features infinite": (lambda p: {"features": changed(p.features, math.inf, 1)}, r"NaN or infinite in row 1"),
    "features of minus infinity": (lambda p: {"features": changed(p.features, -math.inf, 0, 0)}, "NaN or infinite"),
    "strength negative": (lambda p: {"strength": -0.1}, "strength must be a finite number ≥ 0, not -0.1"),
    "strength NaN": (lambda p: {"strength": math.nan}, "strength must be a finite number ≥ 0, not nan"),
    "strength infinite": (lambda p: {"strength": math.inf}, "strength must be a finite number ≥ 0, not inf"),
    "strength a negative tensor": (lambda p: {"strength": torch.tensor(-1.0)}, "strength must be finite and ≥ 0"),
    "strength a NaN tensor": (lambda p: {"strength": torch.tensor(math.nan)}, "strength must be finite and ≥ 0"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("function", ["logits", "loss", "smoothed loss"])
def test_wrong_inputs_raise_one_clear_error(case, function):
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
def test_wrong_options_raise_one_clear_error(options, message, soft):
    p = problem("diagonal")
    with pytest.raises(ValueError, match=message):
        isda_loss(*(p.soft_inputs if soft else p.inputs), **options)


@pytest.mark.parametrize("function", [augmented_logits, isda_loss])
def test_without_validation_values_are_not_read_but_shapes_are(function):
    p = problem("diagonal")
    features = changed(p.features, math.nan, 0)
    assert function(features, *p.inputs[1:], validate=False).isnan().any()
    with pytest.raises(ValueError, match="features must have shape"):
        function(features[0], *p.inputs[1:], validate=False)


def test_validation_changes_no_value():
    p = problem("full")
    for inputs in (p.inputs, p.soft_inputs):
        assert torch.equal(isda_loss(*inputs, 2.0), isda_loss(*inputs, 2.0, validate=False))


def test_a_full_covariance_shared_by_index_equals_its_copies():
    p = problem("full by index", n=6)
    copies = Full(p.covariance.matrices[p.covariance.index])
    expected = isda_loss(*p.inputs[:4], copies, 2.0, reduction="none")
    torch.testing.assert_close(isda_loss(*p.inputs, 2.0, reduction="none"), expected, rtol=1e-13, atol=1e-13)


def test_mismatched_kinds_of_input_raise_one_clear_error():
    features, labels, weight = torch.randn(3, 4), torch.tensor([0, 1, 1]), torch.randn(2, 4)
    with pytest.raises(ValueError, match="features of torch.float64 do not go with a head of torch.float32"):
        isda_loss(features.double(), labels, weight, None, None)
    with pytest.raises(ValueError, match="features of torch.int64"):
        isda_loss(features.long(), labels, weight, None, None)
    with pytest.raises(ValueError, match="strength must be a single number"):
        isda_loss(features, labels, weight, None, None, torch.ones(2))
    with pytest.raises(ValueError, match="finite power"):
        strength(1, 2, 3.0, math.nan)


def test_soft_labels_in_half_precision_are_taken():
    labels = torch.rand(50, 7).softmax(1).bfloat16()
    assert isda_loss(torch.randn(50, 4), labels, torch.randn(7, 4), None, None).isfinite()


@pytest.mark.parametrize("labels_of", ["index", "soft", "smoothed"])
@pytest.mark.parametrize("moving", [(1, 1, 1, 1), (1, 1, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_along_a_direction_is_forward_mode_and_can_be_differentiated(labels_of, moving, bias):
    """Against torch's forward mode through the loss, and reverse mode over it for the gradient in the variance."""
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
    found = functional.isda_loss_along(
        *primals[:1], labels, *primals[1:3], Diagonal(primals[3]), 1.7, direction=direction, label_smoothing=smoothing
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    gradients = [torch.autograd.grad(v, primals[3], allow_unused=True)[0] for v in (found, expected)]
    gradients = [torch.zeros_like(primals[3]) if g is None else g for g in gradients]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
