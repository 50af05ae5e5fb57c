"""The sources of Σ against NumPy: class-wise statistics, the constant, CovNet, and a source of one's own."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestNeighbors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ranks
import references
from forks import run_ranks
from semaug import ClassCovariance, Constant, CovNet, Diagonal, Full, LearnableAugmentation, Source, isda_loss
from tiny import TinyNet

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


def estimate(features, labels, form, sizes):
    """An estimate in fp64 from batches of these sizes, and the rest as the last batch."""
    source = ClassCovariance(CLASSES, features.shape[1], form).double()
    sizes = [*sizes, len(features) - sum(sizes)]
    for batch, batch_labels in zip(features.split(sizes), labels.split(sizes), strict=True):
        source.update(batch, batch_labels)
    return source


def assert_equal_to_numpy(source, features, labels):
    expected = by_numpy(features, labels, source.form, source.num_classes)
    counts = np.bincount(labels.numpy(), minlength=source.num_classes)
    expected[counts < 2] = np.average(expected, axis=0, weights=counts)
    np.testing.assert_allclose(source.covariance().numpy(), expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_array_equal(source.count.numpy(), counts)
    for label in labels.unique():
        np.testing.assert_allclose(source.mean[label].numpy(), features[labels == label].numpy().mean(0), atol=1e-11)


# Class-wise statistics


@given(form=st.sampled_from(["diagonal", "full"]), seed=seeds, d=st.integers(1, 5), sizes=st.lists(st.integers(0, 9)))
def test_class_covariance_equals_numpy_under_any_batching(form, seed, d, sizes):
    features, labels = labelled(seed, sum(sizes) + 5, d)
    assert_equal_to_numpy(estimate(features, labels, form, sizes), features, labels)


@forms
def test_a_class_seen_once_or_never_has_the_pooled_covariance(form):
    source, pooled = (ClassCovariance(3, 2, form, sharing) for sharing in ("classwise", "pooled"))
    features, labels = torch.randn(5, 2), torch.tensor([0, 0, 0, 0, 1])
    for each in (source, pooled):
        each.update(features, labels)
    torch.testing.assert_close(source.covariance()[1:], pooled.covariance()[1:], rtol=0, atol=0)
    assert not torch.allclose(source.covariance()[0], pooled.covariance()[0])
    assert source.count.tolist() == [4, 1, 0]


@forms
def test_a_class_of_one_image_has_the_pooled_covariance_in_every_epoch(form):
    source, without = ClassCovariance(3, 2, form).double(), ClassCovariance(3, 2, form, "pooled").double()
    source.set_class_images([4, 1, 3])
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])
    for epoch in range(3):
        features = torch.randn(8, 2, dtype=torch.float64) + epoch
        source.update(features, labels)
        without.update(features[labels != 1], labels[labels != 1])
    assert source.count.tolist() == [12, 1, 9]
    assert (source.deviation[1] == 0).all()
    torch.testing.assert_close(source.covariance()[1], without.covariance()[1] * 21 / 22)


def test_the_classes_of_one_image_move_to_another_device_with_the_statistics():
    source = ClassCovariance(3, 2)
    keys = list(source.state_dict())
    source.set_class_images([4, 1, 3])
    assert [buffer.device.type for buffer in source.to("meta").buffers()] == ["meta"] * 4
    assert list(source.state_dict()) == keys


@forms
def test_every_sample_has_the_covariance_of_its_class(form):
    features, labels = labelled(0, 40, 3)
    source = estimate(features, labels, form, [10, 20])
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
def test_statistics_in_fp32_are_exact_for_a_mean_far_from_zero_where_the_naive_formula_fails(form):
    rng = np.random.default_rng(0)
    features = torch.tensor(1e4 + 0.1 * rng.normal(size=(640, 4)), dtype=torch.float32)
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
    source = estimate(features[:20], labels[:20], form, [])
    restored = ClassCovariance(CLASSES, 3, form).double()
    restored.load_state_dict(source.state_dict())
    assert torch.equal(restored.covariance(), source.covariance())
    restored.update(features[20:], labels[20:])
    assert_equal_to_numpy(restored, features, labels)


@forms
def test_statistics_are_not_parameters_and_have_no_graph(form):
    source = ClassCovariance(2, 3, form)
    source.update(torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 0, 1]))
    assert list(source.parameters()) == []
    assert not source.covariance().requires_grad


def test_statistics_of_bf16_features_inside_autocast_are_in_fp32():
    features, labels = labelled(2, 50, 3)
    features = features.bfloat16()
    source = ClassCovariance(CLASSES, 3, "full")
    with torch.autocast("cpu", torch.bfloat16):
        source.update(features, labels)
    np.testing.assert_allclose(source.covariance().numpy(), by_numpy(features, labels, "full"), rtol=1e-4, atol=1e-5)


class LargestNewTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator creates."""

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.existing = {tensor.data_ptr() for tensor in existing}
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.data_ptr() not in self.existing:
                self.numbers = max(self.numbers, leaf.numel())
        return result


def test_an_update_reads_and_writes_only_the_classes_of_the_batch():
    classes, dimensions = 10_000, 16
    rng = np.random.default_rng(0)
    features = torch.tensor(rng.normal(size=(50, dimensions)))
    labels = torch.tensor(rng.choice([0, 17, 5000, 9999], size=50))
    source = ClassCovariance(classes, dimensions).double()
    for rows in (slice(20), slice(20, 50)):
        with LargestNewTensor(source.count, source.mean, source.deviation) as record:
            source.update(features[rows], labels[rows])
        assert record.numbers <= classes
    for label in labels.unique():
        expected = features[labels == label].numpy().var(0)
        np.testing.assert_allclose(source.covariance()[label].numpy(), expected, rtol=1e-10)
    assert float(source.count.sum()) == 50
    assert int(source.deviation.any(1).sum()) == 4


# Statistics that classes share


SHARED = ("pooled", "shrunk", "neighbours")


def shared_by_numpy(features, labels, form, sharing, classes):
    """The covariance of each class from those of its members, the pooled ones by scikit-learn."""
    own, counts = by_numpy(features, labels, form, classes), np.bincount(labels.numpy(), minlength=classes)
    present = np.flatnonzero(counts)
    analysis = LinearDiscriminantAnalysis(solver="lsqr", store_covariance=True).fit(features.numpy(), labels.numpy())
    pooled = analysis.covariance_ if form == "full" else analysis.covariance_.diagonal()
    if sharing == "pooled":
        return np.stack([pooled] * classes)
    if sharing == "shrunk":
        own_counts = np.where(counts < 2, 0, counts)
        share = (own_counts / (own_counts + counts.mean())).reshape(-1, *[1] * (own.ndim - 1))
        return share * own + (1 - share) * pooled
    means = np.zeros((classes, features.shape[1]))
    means[present] = [features[labels == label].numpy().mean(0) for label in present]
    search = NearestNeighbors(n_neighbors=min(8, len(present))).fit(means[present])
    nearest = present[search.kneighbors(means, return_distance=False)]
    return np.stack([np.average(own[rows], axis=0, weights=counts[rows]) for rows in nearest])


@forms
@pytest.mark.filterwarnings("ignore:Only one sample available")
@pytest.mark.parametrize("sharing", SHARED)
@pytest.mark.parametrize(("classes", "count"), [(20, 200), (3, 40), (20, 25)])
def test_shared_covariances_equal_those_of_scikit_learn(form, sharing, classes, count):
    features, labels = labelled(4, count, 3, classes)
    labels[labels == 1] = 0  # a class without images
    features[labels == 2], labels[labels == 2] = 50.0, 0
    features[-1], labels[-1] = -60.0, 2  # and one with a single image, far from the others
    source = ClassCovariance(classes, 3, form, sharing).double()
    for batch, batch_labels in zip(features.split(17), labels.split(17), strict=True):
        source.update(batch, batch_labels)
    expected = shared_by_numpy(features, labels, form, sharing, classes)
    np.testing.assert_allclose(source.covariance().numpy()[labels], expected[labels], rtol=1e-10, atol=1e-10)
    covariance = source(features.bfloat16(), labels)
    matrices = covariance.variance if form == "diagonal" else covariance.matrices[covariance.index]
    np.testing.assert_allclose(matrices.numpy(), expected[labels], rtol=1e-10, atol=1e-10)


@forms
def test_a_shrunk_covariance_is_half_pooled_whatever_the_number_of_epochs(form):
    features, labels = labelled(5, 40, 3)
    labels = torch.arange(40) % CLASSES
    once, often, pooled = (ClassCovariance(CLASSES, 3, form, name).double() for name in ("shrunk", "shrunk", "pooled"))
    once.update(features, labels)
    pooled.update(features, labels)
    for _ in range(5):
        often.update(features, labels)
    half = 0.5 * by_numpy(features, labels, form) + 0.5 * pooled.covariance().numpy()
    for source in (once, often):
        np.testing.assert_allclose(source.covariance().numpy(), half, rtol=1e-10)


@pytest.mark.parametrize("seen", [0, 1])
def test_a_class_seen_less_than_twice_has_the_pooled_covariance_if_shrunk(seen):
    features, labels = labelled(6, 30, 3)
    labels[labels == 3] = 0
    labels[:seen] = 3
    shrunk, pooled = (ClassCovariance(CLASSES, 3, sharing=name).double() for name in ("shrunk", "pooled"))
    for source in (shrunk, pooled):
        source.update(features, labels)
    torch.testing.assert_close(shrunk.covariance()[3], pooled.covariance()[3], rtol=1e-12, atol=0)
    assert not torch.allclose(shrunk.covariance()[0], pooled.covariance()[0])


@pytest.mark.parametrize("sharing", ["classwise", *SHARED])
def test_no_number_is_needed_by_the_host(sharing):
    with FakeTensorMode():  # tensors without values, which nobody can read
        source = ClassCovariance(20, 3, sharing=sharing)
        features, labels = torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64)
        source.update(features, labels)
        assert source(features, labels).diagonal().shape == (6, 3)


@pytest.mark.parametrize("sharing", ["classwise", *SHARED])
def test_before_any_sample_there_is_no_variance(sharing):
    assert (ClassCovariance(20, 3, sharing=sharing).covariance() == 0).all()


def test_two_ranks_with_half_the_batches_each_have_the_statistics_of_all_batches(tmp_path: Path):
    features, labels = labelled(3, 60, 3)
    labels[labels == 2] = 1
    labels[:30:10] = 2  # a class that is not in every batch
    batches = list(zip(features.split(10), labels.split(10), strict=True))
    torch.save(batches, tmp_path / "batches.pt")
    run_ranks(2, tmp_path, ranks.class_statistics, tmp_path)
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, state in states[0].items():
        assert all(torch.equal(tensor, states[1][name][key]) for key, tensor in state.items())
    for form in ("diagonal", "full"):
        source = ClassCovariance(CLASSES, 3, form).double()
        source.load_state_dict(states[0][form])
        assert_equal_to_numpy(source, features, labels)


# The constant


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_is_its_value_times_the_identity(dtype):
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
def test_covnet_has_the_cost_stated_in_the_paper(depth, width, flops, parameters):
    with torch.device("meta"):
        source = CovNet(2048, width, depth)
    assert f"{source.flops / 1e6:.2f}" == flops
    assert f"{source.num_parameters / 1e6:.2f}" == parameters
    assert source.num_parameters == sum(tensor.numel() for tensor in source.state_dict().values())


def test_covnet_has_one_hidden_layer_of_a_quarter_of_the_dimensions_by_default():
    shapes = [tuple(tensor.shape) for tensor in CovNet(40).state_dict().values()]
    assert shapes == [(10, 40), (10,), (40, 10), (40,)]
    assert CovNet(3).layers.output.in_features == 1


@pytest.mark.parametrize("trace", [None, 0.5])
def test_covnet_keeps_its_parameter_names_and_initialisation(trace):
    torch.manual_seed(3)
    source = CovNet(8, width=5, depth=2, fixed_trace=trace)
    torch.manual_seed(3)
    layers = [torch.nn.Linear(8, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 8)]
    if trace is not None:
        torch.nn.init.zeros_(layers[-1].weight)
        torch.nn.init.zeros_(layers[-1].bias)
    names = ["layers.hidden.0", "layers.hidden.2", "layers.output"]
    expected = {f"{name}.{part}": getattr(layer, part) for name, layer in zip(names, layers, strict=True)
                for part in ("weight", "bias")}  # fmt: skip
    assert list(source.state_dict()) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in source.state_dict().items())


@given(seed=seeds, d=st.integers(1, 9), width=st.integers(1, 7), depth=st.integers(1, 4), scale=st.floats(0.1, 5))
def test_covnet_is_the_sigmoid_or_softplus_of_a_perceptron(seed, d, width, depth, scale):
    torch.manual_seed(seed)
    source, features = randomised(CovNet(d, width, depth), scale), torch.randn(5, d, dtype=torch.float64)
    covariance = source(features, torch.zeros(5, dtype=torch.int64))
    assert isinstance(covariance, Diagonal)
    expected = expit(references.perceptron(source.layers, features))
    np.testing.assert_allclose(covariance.variance.detach().numpy(), expected, rtol=1e-12, atol=1e-15)
    assert (covariance.variance >= 0).all()
    assert (covariance.variance <= 1).all()
    source.activation = "softplus"
    variance = source(features, torch.zeros(5, dtype=torch.int64)).diagonal().detach().numpy()
    np.testing.assert_allclose(variance, np.logaddexp(0, references.perceptron(source.layers, features)), rtol=1e-9)


def randomised(source: Source, scale: float) -> Source:
    """The source in fp64, with noise added to every parameter."""
    source = source.double()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += scale * torch.randn_like(parameter)
    return source


@given(
    seed=seeds, trace=st.floats(0.01, 10), scale=st.floats(0, 3), activation=st.sampled_from(["sigmoid", "softplus"])
)
def test_fixed_trace_holds_for_every_sample_and_any_parameters(seed, trace, scale, activation):
    torch.manual_seed(seed)
    source = randomised(CovNet(6, fixed_trace=trace, activation=activation), scale)
    features = torch.randn(8, 6, dtype=torch.float64)
    variance = source(features, torch.zeros(8, dtype=torch.int64)).diagonal().detach().numpy()
    assert (variance > 0).all()
    np.testing.assert_allclose(variance.mean(1), trace, rtol=1e-12)
    outputs = references.perceptron(source.layers, features)
    shape = (expit(outputs) if activation == "sigmoid" else np.logaddexp(0, outputs)) + 1e-6
    np.testing.assert_allclose(variance / trace, shape / shape.mean(1, keepdims=True), rtol=1e-10)
    if scale > 0.1:
        assert np.ptp(variance) > 1e-3 * trace


@pytest.mark.parametrize("dim", [2, 7, 64, 512])
@pytest.mark.parametrize("trace", [0.3, 0.5, 1.0])
def test_fixed_trace_starts_at_the_same_variance_everywhere(dim, trace):
    source, labels = CovNet(dim, fixed_trace=trace), torch.zeros(6, dtype=torch.int64)
    for dtype, tolerance in ((torch.float32, 4 * torch.finfo(torch.float32).eps), (torch.float64, 1e-13)):
        variance = source.to(dtype)(torch.randn(6, dim, dtype=dtype), labels).diagonal()
        assert len(variance.unique()) == 1
        torch.testing.assert_close(variance, torch.full_like(variance, trace), rtol=tolerance, atol=0)


@pytest.mark.parametrize("trace", [None, 0.5])
def test_gradients_at_initialisation_reach_the_layers(trace):
    p = references.problem("diagonal", n=8, d=8)
    source = CovNet(8, fixed_trace=trace).double()
    isda_loss(*p.inputs[:4], source(p.features, p.labels)).backward()
    assert source.layers.output.weight.grad.abs().max() > 1e-8
    # With a fixed trace the last layer starts at zero and blocks the gradient of the layer before it.
    assert (source.layers.hidden[0].weight.grad.abs().max() > 1e-8) == (trace is None)


def test_covnet_of_bf16_features_inside_autocast_is_in_fp32():
    source, features = CovNet(8), torch.randn(4, 8).bfloat16()
    labels = torch.zeros(4, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        covariance = source(features, labels)
    expected = source(features.float(), labels)
    assert covariance.variance.dtype == torch.float32
    assert torch.equal(covariance.variance, expected.variance)


def test_covnet_has_no_statistics():
    source = CovNet(4)
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    source.update(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())


# A source of one's own


class PooledVariance(Source):
    """The pooled within-class variance, for all samples: a new source in a few lines."""

    def __init__(self, num_classes: int, feature_dim: int) -> None:
        super().__init__()
        self.classes = ClassCovariance(num_classes, feature_dim)

    def update(self, features, labels):
        self.classes.update(features, labels)

    def forward(self, features, labels):
        pooled = self.classes.deviation.sum(0) / self.classes.count.sum().clamp_min(1)
        return Diagonal(pooled.expand(features.shape))


def test_a_source_without_a_covariance_is_refused_when_it_is_made():
    class Statistics(Source):
        def update(self, features, labels):
            pass

    with pytest.raises(TypeError, match="forward"):
        Statistics()


def test_a_new_source_works_with_the_loss():
    features, labels = labelled(0, 40, 5)
    source, p = PooledVariance(CLASSES, 5).double(), references.problem("diagonal", n=6, c=CLASSES, d=5)
    source.update(features, labels)
    within = np.concatenate([features[labels == k] - features[labels == k].mean(0) for k in range(CLASSES)])
    p.matrices = np.stack([np.diag(np.square(within).mean(0))] * 6)
    result = isda_loss(*p.inputs[:4], source(p.features, p.labels), 3.0, reduction="none")
    np.testing.assert_allclose(result.numpy(), references.losses(p, p.labels, 3.0), rtol=1e-10)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_a_new_source_works_with_the_learner(order):
    model = TinyNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    learner = LearnableAugmentation(model, optimizer, PooledVariance(4, 6), strength=10.0, order=order)
    labels = torch.arange(8) % 4
    for _ in range(2):
        metrics = learner.step(torch.randn(8, 3, 9, 9), labels)
    assert learner.source.classes.count.tolist() == [4, 4, 4, 4]
    assert metrics["variance_mean"] > 0
    assert 0 < metrics["augmentation_share"] < 1
    assert "classes.mean" in learner.source.state_dict()


# Errors


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Constant(-0.1), "constant variance must be a finite number ≥ 0, not -0.1"),
        (lambda: Constant(math.nan), "finite number ≥ 0, not nan"),
        (lambda: CovNet(4, fixed_trace=math.nan), "fixed_trace must be positive, not nan"),
        (lambda: ClassCovariance(4, 3, "low rank"), "form must be 'diagonal' or 'full', not 'low rank'"),
        (lambda: ClassCovariance(4, 3, sharing="all"), "classwise, pooled, shrunk, neighbours, not 'all'"),
        (lambda: CovNet(8, activation="relu"), "activation must be 'sigmoid' or 'softplus', not 'relu'"),
        (lambda: ClassCovariance(1, 3), "at least 2 classes"),
        (lambda: ClassCovariance(4, 0), "1 feature dimension"),
        (lambda: CovNet(8, width=0), "width and depth must be positive"),
        (lambda: CovNet(8, depth=0), "width and depth must be positive"),
        (lambda: CovNet(0), "feature_dim, width and depth must be positive"),
        (lambda: CovNet(8, fixed_trace=0.0), "fixed_trace must be positive, not 0.0"),
        (lambda: CovNet(8, fixed_trace=-math.inf), "fixed_trace must be positive"),
    ],
)
def test_wrong_arguments_raise_a_clear_error(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("form", ["diagonal", "full"])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1, -1]), "labels must lie in 0 … 2, found -1 … 1"),
        (torch.tensor([0, 1, 3]), "labels must lie in 0 … 2, found 0 … 3"),
        (torch.tensor([1, 0, 1]).to(torch.uint8), "class indices must be int64, not torch.uint8"),
        (torch.tensor([True, False, True]), "class indices must be int64, not torch.bool"),
    ],
)
def test_labels_that_are_no_classes_leave_the_statistics_unchanged(form, labels, message):
    source = ClassCovariance(3, 2, form)
    with pytest.raises(ValueError, match=message):
        source.update(torch.randn(3, 2), labels)
    assert not source.count.any()


@pytest.mark.parametrize("source", [ClassCovariance(3, 2), ClassCovariance(3, 2, "full")])
@pytest.mark.parametrize("method", ["forward", "update"])
def test_class_wise_statistics_do_not_accept_soft_labels(source, method):
    with pytest.raises(ValueError, match="class indices as labels, not probabilities"):
        getattr(source, method)(torch.randn(4, 2), torch.full((4, 3), 1 / 3))


@pytest.mark.parametrize("activation", ["sigmoid", "softplus", None])
def test_fixed_trace_survives_outputs_that_underflow(activation):
    source = CovNet(6, fixed_trace=0.5, activation=activation)
    torch.nn.init.constant_(source.layers.output.bias, -120.0)
    variance = source(torch.randn(3, 6), torch.zeros(3, dtype=torch.int64)).diagonal()
    torch.testing.assert_close(variance, torch.full((3, 6), 0.5))


def test_features_of_another_dimension_raise_an_error():
    with pytest.raises(ValueError, match="need features"):
        ClassCovariance(4, 4).update(torch.randn(2, 5), torch.tensor([0, 1]))


@forms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_have_fp32_at_least_whatever_the_default_precision(form, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        source = ClassCovariance(CLASSES, 3, form)
    finally:
        torch.set_default_dtype(before)
    features, labels = labelled(0, 4000, 3)
    for part in range(0, 4000, 40):
        source.update(features[part : part + 40], labels[part : part + 40])
    assert source.covariance().dtype == torch.promote_types(dtype, torch.float32)
    np.testing.assert_allclose(source.covariance(), by_numpy(features, labels, form), rtol=1e-3, atol=1e-3)
