"""The covariance sources against NumPy: statistics of classes, the covariance network, and their combinations."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import references
from semaug import (
    ClassCovariance,
    Constant,
    CovNet,
    Diagonal,
    Full,
    LowRank,
    ModulatedClassCovariance,
    Source,
    isda_loss,
)

CLASSES = 4
forms = pytest.mark.parametrize("form", ["diagonal", "full"])
seeds = st.integers(0, 10**6)


def labelled(seed, count, d, classes=CLASSES):
    """Features whose mean and spread differ from class to class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=count)
    features = rng.normal(size=(count, d)) * (1 + labels)[:, None] + 3 * labels[:, None]
    return torch.tensor(features), torch.tensor(labels)


def by_numpy(features, labels, form, classes=CLASSES):
    """``np.var`` or ``np.cov`` of each class; 0 for classes without samples."""
    features, labels = features.double().numpy(), labels.numpy()
    d = features.shape[1]
    out = np.zeros((classes, d) if form == "diagonal" else (classes, d, d))
    for label in np.unique(labels):
        members = features[labels == label]
        out[label] = members.var(0) if form == "diagonal" else np.cov(members.T, bias=True).reshape(d, d)
    return out


def seen(features, labels, form, sizes):
    """An estimate in fp64 that has seen the features in batches of these sizes, and the rest as the last batch."""
    source = ClassCovariance(CLASSES, features.shape[1], form).double()
    sizes = [*sizes, len(features) - sum(sizes)]
    for batch, batch_labels in zip(features.split(sizes), labels.split(sizes), strict=True):
        source.update(batch, batch_labels)
    return source


def assert_equal_to_numpy(source, features, labels):
    expected = by_numpy(features, labels, source.form, source.num_classes)
    np.testing.assert_allclose(source.covariance().numpy(), expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_array_equal(source.count.numpy(), np.bincount(labels.numpy(), minlength=source.num_classes))
    for label in labels.unique():
        np.testing.assert_allclose(source.mean[label].numpy(), features[labels == label].numpy().mean(0), atol=1e-11)


# Class-wise statistics


@given(form=st.sampled_from(["diagonal", "full"]), seed=seeds, d=st.integers(1, 5), sizes=st.lists(st.integers(0, 9)))
def test_class_covariance_equals_numpy_under_any_batching(form, seed, d, sizes):
    features, labels = labelled(seed, sum(sizes) + 5, d)
    assert_equal_to_numpy(seen(features, labels, form, sizes), features, labels)


@given(form=st.sampled_from(["diagonal", "full"]), seed=seeds, first=st.integers(0, 20), second=st.integers(0, 20))
def test_merged_estimates_equal_numpy_on_the_samples_of_both(form, seed, first, second):
    features, labels = labelled(seed, first + second, 3)
    one = seen(features[:first], labels[:first], form, [])
    two = seen(features[first:], labels[first:], form, [])
    before = {name: tensor.clone() for name, tensor in two.state_dict().items()}
    one.merge(two)
    assert_equal_to_numpy(one, features, labels)
    assert all(torch.equal(tensor, before[name]) for name, tensor in two.state_dict().items())


@forms
def test_classes_never_seen_or_seen_once_have_covariance_zero(form):
    source = ClassCovariance(3, 2, form)
    source.update(torch.randn(5, 2), torch.tensor([0, 0, 0, 0, 1]))
    covariance = source.covariance()
    assert (covariance[1:] == 0).all()
    assert (covariance[0] != 0).all()
    assert source.count.tolist() == [4, 1, 0]


@forms
def test_every_sample_has_the_covariance_of_its_class(form):
    features, labels = labelled(0, 40, 3)
    source = seen(features, labels, form, [10, 20])
    wanted = torch.tensor([3, 0, 0, 2])
    covariance = source(torch.zeros(4, 3), wanted)
    expected = by_numpy(features, labels, form)[wanted.numpy()]
    if form == "diagonal":
        assert isinstance(covariance, Diagonal)
        np.testing.assert_allclose(covariance.variance.numpy(), expected, rtol=1e-12)
    else:
        assert isinstance(covariance, Full)
        np.testing.assert_allclose(covariance.matrices[covariance.index].numpy(), expected, rtol=1e-12, atol=1e-12)


@forms
def test_statistics_in_fp32_stand_a_mean_far_from_zero_where_the_naive_formula_fails(form):
    rng = np.random.default_rng(0)
    features = torch.tensor(1e4 + 1e-2 * rng.normal(size=(640, 4)), dtype=torch.float32)
    source = ClassCovariance(2, 4, form)
    for batch in features.split(32):
        source.update(batch, torch.zeros(len(batch), dtype=torch.int64))
    variance = source.covariance()[0]
    variance = variance if form == "diagonal" else variance.diagonal()
    naive = features.square().mean(0) - features.mean(0).square()
    expected = features.double().numpy().var(0)
    assert variance.dtype == torch.float32
    assert np.abs(variance.numpy() / expected - 1).max() < 0.1
    assert np.abs(naive.numpy() / expected - 1).min() > 0.5


@forms
def test_statistics_are_saved_and_restored(form):
    features, labels = labelled(1, 30, 3)
    source = seen(features[:20], labels[:20], form, [])
    restored = ClassCovariance(CLASSES, 3, form).double()
    restored.load_state_dict(source.state_dict())
    assert torch.equal(restored.covariance(), source.covariance())
    restored.update(features[20:], labels[20:])
    assert_equal_to_numpy(restored, features, labels)


@forms
def test_statistics_are_no_parameters_and_keep_no_graph(form):
    source = ClassCovariance(2, 3, form)
    source.update(torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 0, 1]))
    assert list(source.parameters()) == []
    assert not source.covariance().requires_grad


def test_statistics_take_bf16_features_inside_autocast_in_fp32():
    features, labels = labelled(2, 50, 3)
    features = features.bfloat16()
    source = ClassCovariance(CLASSES, 3, "full")
    with torch.autocast("cpu", torch.bfloat16):
        source.update(features, labels)
    np.testing.assert_allclose(source.covariance().numpy(), by_numpy(features, labels, "full"), rtol=1e-4, atol=1e-5)


class LargestMade(TorchDispatchMode):
    """Sees how many numbers the largest tensor has that operators make, apart from those that are there already."""

    def __init__(self, *there: torch.Tensor) -> None:
        super().__init__()
        self.there = {tensor.data_ptr() for tensor in there}
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.data_ptr() not in self.there:
                self.numbers = max(self.numbers, made.numel())
        return result


def test_an_update_makes_no_tensor_of_the_size_of_the_statistics():
    """Of 10 000 classes it looks at those in the batch."""
    classes, dimensions = 10_000, 16
    rng = np.random.default_rng(0)
    features = torch.tensor(rng.normal(size=(50, dimensions)))
    labels = torch.tensor(rng.choice([0, 17, 5000, 9999], size=50))
    source = ClassCovariance(classes, dimensions).double()
    for rows in (slice(20), slice(20, 50)):
        with LargestMade(source.count, source.mean, source.deviation) as made:
            source.update(features[rows], labels[rows])
        assert made.numbers <= classes
    for label in labels.unique():
        expected = features[labels == label].numpy().var(0)
        np.testing.assert_allclose(source.covariance()[label].numpy(), expected, rtol=1e-10)
    assert float(source.count.sum()) == 50
    assert int(source.deviation.any(1).sum()) == 4


PROCESS = """
import sys, torch
from torch import distributed as dist
from semaug import ClassCovariance, ModulatedClassCovariance

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
sources = {form: ClassCovariance(4, 3, form).double() for form in ("diagonal", "full")}
sources["modulated"] = ModulatedClassCovariance(4, 3).double()
for features, labels in torch.load(f"{folder}/batches.pt")[rank::2]:
    for source in sources.values():
        source.update(features, labels)
sources["modulated"] = sources["modulated"].classwise
torch.save({name: source.state_dict() for name, source in sources.items()}, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def test_two_processes_that_see_half_the_batches_each_have_the_statistics_of_all(tmp_path: Path):
    features, labels = labelled(3, 60, 3)
    labels[labels == 2] = 1
    labels[:30:10] = 2  # a class that not every batch has
    batches = list(zip(features.split(10), labels.split(10), strict=True))
    torch.save(batches, tmp_path / "batches.pt")
    (tmp_path / "process.py").write_text(PROCESS)
    command = [sys.executable, str(tmp_path / "process.py"), str(tmp_path)]
    processes = [
        subprocess.Popen(
            [*command, str(rank)], env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, form in (("diagonal", "diagonal"), ("full", "full"), ("modulated", "diagonal")):
        assert all(torch.equal(tensor, states[1][name][key]) for key, tensor in states[0][name].items())
        source = ClassCovariance(CLASSES, 3, form).double()
        source.load_state_dict(states[0][name])
        assert_equal_to_numpy(source, features, labels)


# The constant


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_gives_its_value_times_the_identity(dtype):
    source = Constant(0.3)
    source.update(torch.ones(2, 5, dtype=dtype), torch.zeros(2, dtype=torch.int64))
    covariance = source(torch.randn(2, 5, dtype=dtype), torch.tensor([0, 1]))
    assert isinstance(covariance, Diagonal)
    assert torch.equal(covariance.variance, torch.full((2, 5), 0.3, dtype=dtype))
    assert list(source.parameters()) == list(source.buffers()) == []


def test_constant_adds_half_its_value_times_the_squared_distance_of_weights():
    p = references.problem("diagonal")
    result = Constant(0.3)(p.features, p.labels).quadratic(p.weight, p.labels)
    distance = torch.cdist(p.weight[p.labels], p.weight, compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(result, 0.3 * distance.square(), rtol=1e-12, atol=1e-12)


def test_constant_is_in_fp32_for_bf16_features():
    assert Constant()(torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([0, 1])).diagonal().dtype == torch.float32


# The covariance network


@pytest.mark.parametrize(
    ("depth", "width", "flops", "parameters"),
    [
        (1, 256, "2.10", "1.05"),
        (1, 512, "4.19", "2.10"),
        (1, 1024, "8.39", "4.20"),
        (1, 2048, "16.78", "8.39"),
        (2, 512, "4.72", "2.36"),
        (3, 512, "5.24", "2.63"),
        (4, 512, "5.77", "2.89"),
    ],
)
def test_covnet_has_the_cost_of_the_papers_table(depth, width, flops, parameters):
    with torch.device("meta"):
        source = CovNet(2048, width, depth)
    assert f"{source.flops / 1e6:.2f}" == flops
    assert f"{source.num_parameters / 1e6:.2f}" == parameters
    assert source.num_parameters == sum(tensor.numel() for tensor in source.state_dict().values())


def test_covnet_has_one_hidden_layer_of_a_quarter_of_the_dimensions_by_default():
    shapes = [tuple(tensor.shape) for tensor in CovNet(40).state_dict().values()]
    assert shapes == [(10, 40), (10,), (40, 10), (40,)]
    assert CovNet(3).layers.output.in_features == 1


@given(seed=seeds, d=st.integers(1, 9), width=st.integers(1, 7), depth=st.integers(1, 4), scale=st.floats(0.1, 5))
def test_covnet_is_the_sigmoid_of_a_perceptron(seed, d, width, depth, scale):
    torch.manual_seed(seed)
    source, features = randomised(CovNet(d, width, depth), scale), torch.randn(5, d, dtype=torch.float64)
    covariance = source(features, torch.zeros(5, dtype=torch.int64))
    assert isinstance(covariance, Diagonal)
    expected = expit(references.perceptron(source.layers, features))
    np.testing.assert_allclose(covariance.variance.detach().numpy(), expected, rtol=1e-12, atol=1e-15)
    assert (covariance.variance >= 0).all()
    assert (covariance.variance <= 1).all()


@given(seed=seeds, rank=st.integers(1, 3), fixed_trace=st.sampled_from([None, 0.4]))
def test_covnet_with_directions_is_the_low_rank_covariance_of_a_perceptron(seed, rank, fixed_trace):
    torch.manual_seed(seed)
    d = 4
    source = randomised(CovNet(d, 5, rank=rank, fixed_trace=fixed_trace), 0.5)
    features = torch.randn(3, d, dtype=torch.float64)
    outputs = references.perceptron(source.layers, features).reshape(3, 1 + rank, d)
    for matrix, output in zip(dense(source(features, torch.zeros(3, dtype=torch.int64))), outputs, strict=True):
        variance = expit(output[0]) if fixed_trace is None else np.logaddexp(0, output[0]) + 1e-6
        expected = np.diag(variance) + sum(np.outer(u, u) for u in np.tanh(output[1:])) / rank
        expected *= 1 if fixed_trace is None else fixed_trace * d / np.trace(expected)
        np.testing.assert_allclose(matrix, expected, rtol=1e-11, atol=1e-13)


def randomised(source: Source, scale: float) -> Source:
    """The source in fp64 with a random change of every parameter."""
    source = source.double()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += scale * torch.randn_like(parameter)
    return source


def dense(covariance):
    """The matrices of a diagonal or low-rank covariance."""
    matrices = [np.diag(row) for row in covariance.variance.detach().numpy()]
    if isinstance(covariance, LowRank):
        factors = covariance.factors.detach().numpy()
        matrices = [matrix + u.T @ u for matrix, u in zip(matrices, factors, strict=True)]
    return np.stack(matrices)


@given(seed=seeds, rank=st.integers(0, 3), trace=st.floats(0.01, 10), scale=st.floats(0, 3))
def test_fixed_trace_holds_for_every_sample_and_any_parameters(seed, rank, trace, scale):
    torch.manual_seed(seed)
    source = randomised(CovNet(6, rank=rank, fixed_trace=trace), scale)
    matrices = dense(source(torch.randn(8, 6, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)))
    np.testing.assert_allclose(np.trace(matrices, axis1=1, axis2=2) / 6, trace, rtol=1e-12)
    if scale > 0.1:
        assert np.ptp(np.diagonal(matrices, axis1=1, axis2=2)) > 1e-3 * trace


@given(seed=seeds, rank=st.integers(0, 3), trace=st.sampled_from([None, 0.5]), scale=st.floats(0, 3))
def test_covnet_is_positive_semi_definite(seed, rank, trace, scale):
    torch.manual_seed(seed)
    source = randomised(CovNet(5, rank=rank, fixed_trace=trace), scale)
    covariance = source(torch.randn(4, 5, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    assert (covariance.variance >= 0).all()
    assert np.linalg.eigvalsh(dense(covariance)).min() >= -1e-12


@pytest.mark.parametrize("dim", [2, 7, 64, 512])
@pytest.mark.parametrize("trace", [0.3, 0.5, 1.0])
def test_fixed_trace_starts_at_the_same_variance_everywhere(dim, trace):
    variance = CovNet(dim, fixed_trace=trace)(torch.randn(6, dim), torch.zeros(6, dtype=torch.int64)).diagonal()
    assert len(variance.unique()) == 1
    rounding = 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(variance, torch.full_like(variance, trace), rtol=rounding, atol=0)


@pytest.mark.parametrize("trace", [None, 0.5])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_gradients_reach_variances_and_every_direction_at_initialisation(rank, trace):
    p = references.problem("diagonal", n=8, d=8)
    source = CovNet(8, rank=rank, fixed_trace=trace).double()
    isda_loss(*p.inputs[:4], source(p.features, p.labels)).backward()
    blocks = source.layers.output.weight.grad.view(1 + rank, -1)
    assert (blocks.abs().amax(1) > 1e-8).all()
    hidden = source.layers.hidden[0].weight.grad
    # With a fixed trace and no directions the last layer starts at zero and hides the one before.
    assert (hidden.abs().max() > 1e-8) == (rank > 0 or trace is None)


def test_covnet_takes_bf16_features_inside_autocast_in_fp32():
    source, features = CovNet(8, rank=1), torch.randn(4, 8).bfloat16()
    labels = torch.zeros(4, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        covariance = source(features, labels)
    expected = source(features.float(), labels)
    assert covariance.variance.dtype == covariance.factors.dtype == torch.float32
    assert torch.equal(covariance.variance, expected.variance)
    assert torch.equal(covariance.factors, expected.factors)


def test_covnet_keeps_no_statistics():
    source = CovNet(4)
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    source.update(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())


# Class-wise variance with a learned factor


@pytest.mark.parametrize("keep_trace", [False, True])
def test_modulated_covariance_starts_bitwise_as_the_class_covariance(keep_trace):
    features, labels = torch.randn(30, 6), torch.randint(CLASSES, (30,))
    modulated, plain = ModulatedClassCovariance(CLASSES, 6, keep_trace=keep_trace), ClassCovariance(CLASSES, 6)
    for batch in (slice(0, 10), slice(10, 30)):
        modulated.update(features[batch], labels[batch])
        plain.update(features[batch], labels[batch])
    assert (plain.covariance() > 0).any()
    assert torch.equal(modulated(features, labels).variance, plain(features, labels).variance)


@given(seed=seeds, depth=st.integers(1, 3), scale=st.floats(0, 1))
def test_modulated_covariance_is_the_numpy_variance_times_a_factor_between_0_and_2(seed, depth, scale):
    features, labels = labelled(seed, 60, 5)
    torch.manual_seed(seed)
    source = randomised(ModulatedClassCovariance(CLASSES, 5, 4, depth), scale)
    for batch in (slice(0, 13), slice(13, 60)):
        source.update(features[batch], labels[batch])
    classwise = by_numpy(features, labels, "diagonal")[labels.numpy()]
    # Features far from zero would saturate the sigmoid.
    inputs = torch.randn(60, 5, dtype=torch.float64)
    factor = 2 * expit(references.perceptron(source.layers, inputs))
    variance = source(inputs, labels).variance.detach().numpy()
    np.testing.assert_allclose(variance, classwise * factor, rtol=1e-10, atol=1e-12)
    assert (variance[classwise > 0] > 0).all()
    assert (variance <= 2 * classwise * (1 + 1e-12)).all()


@given(seed=seeds, scale=st.floats(0, 1))
def test_a_kept_trace_is_that_of_the_class_and_the_shape_that_of_the_factor(seed, scale):
    features, labels = labelled(seed, 40, 5)
    torch.manual_seed(seed)
    source = randomised(ModulatedClassCovariance(CLASSES, 5, 4, keep_trace=True), scale)
    source.update(features, labels)
    classwise = by_numpy(features, labels, "diagonal")[labels.numpy()]
    inputs = torch.randn(40, 5, dtype=torch.float64)
    product = classwise * expit(references.perceptron(source.layers, inputs))
    known = classwise.sum(1) > 0
    variance = source(inputs, labels).variance.detach().numpy()
    np.testing.assert_allclose(variance.sum(1), classwise.sum(1), rtol=1e-9, atol=1e-12)
    shape = product[known] / product[known].sum(1, keepdims=True)
    np.testing.assert_allclose(variance[known] / variance[known].sum(1, keepdims=True), shape, rtol=1e-9, atol=1e-12)


def test_a_kept_trace_of_an_unseen_class_is_zero_with_finite_gradients():
    source = ModulatedClassCovariance(3, 4, keep_trace=True)
    variance = source(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])).variance
    assert (variance == 0).all()
    variance.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in source.parameters())


@pytest.mark.parametrize("keep_trace", [False, True])
def test_gradients_reach_the_parameters_of_the_modulated_covariance(keep_trace):
    p = references.problem("diagonal", n=12, c=3, d=8)
    source = ModulatedClassCovariance(3, 8, keep_trace=keep_trace).double()
    source.update(p.features, p.labels)
    optimiser = torch.optim.SGD(source.parameters(), 0.1)
    for _ in range(2):  # the last layer starts at zero, so the one before it has a gradient from the second step on
        optimiser.zero_grad()
        isda_loss(*p.inputs[:4], source(p.features, p.labels)).backward()
        assert (source.layers.output.weight.grad.abs() > 0).any()
        optimiser.step()
    assert all((parameter.grad.abs() > 0).any() for parameter in source.parameters())


# Errors


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Constant(-0.1), "constant variance must be a finite number ≥ 0, not -0.1"),
        (lambda: Constant(math.nan), "finite number ≥ 0, not nan"),
        (lambda: CovNet(4, fixed_trace=math.nan), "fixed_trace positive"),
        (lambda: ClassCovariance(4, 3, "low rank"), "form must be 'diagonal' or 'full', not 'low rank'"),
        (lambda: ClassCovariance(1, 3), "at least 2 classes"),
        (lambda: ClassCovariance(4, 0), "1 feature dimension"),
        (lambda: ModulatedClassCovariance(1, 3), "at least 2 classes"),
        (lambda: ModulatedClassCovariance(4, 3, width=0), "width and depth must be positive"),
        (lambda: CovNet(8, width=0), "width and depth must be positive"),
        (lambda: CovNet(8, depth=0), "width and depth must be positive"),
        (lambda: CovNet(0), "inputs, width and depth must be positive"),
        (lambda: CovNet(8, rank=-1), "rank must be ≥ 0"),
        (lambda: CovNet(8, fixed_trace=0.0), "fixed_trace positive"),
        (lambda: CovNet(8, fixed_trace=-math.inf), "fixed_trace positive"),
    ],
)
def test_wrong_arguments_raise_one_clear_error(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "source", [ClassCovariance(3, 2), ClassCovariance(3, 2, "full"), ModulatedClassCovariance(3, 2)]
)
@pytest.mark.parametrize("method", ["forward", "update"])
def test_class_wise_sources_refuse_soft_labels(source, method):
    with pytest.raises(ValueError, match="class indices as labels, not probabilities"):
        getattr(source, method)(torch.randn(4, 2), torch.full((4, 3), 1 / 3))


def test_fixed_trace_survives_outputs_that_underflow():
    source = CovNet(6, fixed_trace=0.5)
    torch.nn.init.constant_(source.layers.output.bias, -120.0)
    variance = source(torch.randn(3, 6), torch.zeros(3, dtype=torch.int64)).diagonal()
    torch.testing.assert_close(variance, torch.full((3, 6), 0.5))


def test_statistics_of_another_form_or_size_do_not_merge():
    with pytest.raises(ValueError, match="do not merge"):
        ClassCovariance(4, 4, "full").merge(ClassCovariance(4, 4))
    with pytest.raises(ValueError, match="need features"):
        ClassCovariance(4, 4).update(torch.randn(2, 5), torch.tensor([0, 1]))
