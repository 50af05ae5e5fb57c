"""ISDALoss: its statistics, modes and state, and a small training run."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import references
from references import Problem
from semaug import ISDALoss

CLASSES, DIM = 3, 4
forms = pytest.mark.parametrize("form", ["diagonal", "full"])


def batch(seed: int, count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.normal(size=(count, DIM))), torch.tensor(rng.integers(CLASSES, size=count))


def linear() -> nn.Linear:
    return nn.Linear(DIM, CLASSES).double()


def expected_losses(form, shown, features, labels, head, strength, smoothing=0.0):
    """The naive formula with NumPy's covariance of all batches so far."""
    every = np.concatenate([b[0].numpy() for b in shown])
    classes = np.concatenate([b[1].numpy() for b in shown])
    by_class = np.stack([np.cov(every[classes == label].T, bias=True) for label in range(CLASSES)])
    if form == "diagonal":
        by_class = np.stack([np.diag(np.diag(matrix)) for matrix in by_class])
    weight, bias = head.weight.detach(), head.bias.detach()
    p = Problem(features, labels, labels, weight, bias, None, by_class[labels.numpy()])
    return references.losses(p, labels, strength, smoothing)


@forms
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_uses_the_statistics_of_all_batches_so_far_including_the_current_one(form, smoothing, reduction):
    criterion, head = ISDALoss(CLASSES, DIM, form, smoothing, reduction).double(), linear()
    batches = [batch(seed) for seed in range(3)]
    for shown, (features, labels) in enumerate(batches, start=1):
        result = criterion(features, labels, head, 2.5)
        expected = expected_losses(form, batches[:shown], features, labels, head, 2.5, smoothing)
        expected = {"mean": expected.mean(), "sum": expected.sum(), "none": expected}[reduction]
        np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-11)


@forms
def test_statistics_change_in_training_and_not_in_evaluation(form):
    criterion, head = ISDALoss(CLASSES, DIM, form).double(), linear()
    criterion(*batch(0), head, 1.0)
    before = {name: tensor.clone() for name, tensor in criterion.state_dict().items()}
    features, labels = batch(1)
    result = criterion.eval()(features, labels, head, 2.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in criterion.state_dict().items())
    expected = expected_losses(form, [batch(0)], features, labels, head, 2.0).mean()
    assert result.item() == pytest.approx(expected, rel=1e-10)
    criterion.train()(features, labels, head, 2.0)
    statistics = criterion.covariance.state_dict(prefix="covariance.")
    assert not any(torch.equal(tensor, before[name]) for name, tensor in statistics.items())


def test_loss_without_statistics_is_the_cross_entropy():
    criterion, head = ISDALoss(CLASSES, DIM).double().eval(), linear()
    features, labels = batch(0)
    expected = F.cross_entropy(head(features), labels)
    torch.testing.assert_close(criterion(features, labels, head, 5.0), expected, rtol=1e-13, atol=0)


@forms
def test_state_dict_contains_the_statistics(form):
    criterion, head = ISDALoss(CLASSES, DIM, form).double(), linear()
    criterion(*batch(0), head, 1.0)
    restored = ISDALoss(CLASSES, DIM, form).double()
    restored.load_state_dict(criterion.state_dict())
    statistics = {"covariance.count", "covariance.mean", "covariance.deviation"}
    assert set(criterion.state_dict()) == statistics | {"strength.value", "strength.progress"}
    assert torch.equal(restored(*batch(1), head, 2.0), criterion(*batch(1), head, 2.0))
    assert not torch.equal(restored(*batch(1), head, 2.0), ISDALoss(CLASSES, DIM, form).double()(*batch(1), head, 2.0))


def test_gradients_flow_to_features_and_head_but_not_through_the_statistics():
    criterion, head = ISDALoss(CLASSES, DIM).double(), linear()
    features, labels = batch(0)
    features.requires_grad_()
    criterion(features, labels, head, 1.0).backward()
    # The added term does not depend on the features, so their gradient is that of the softmax of augmented logits.
    variance = criterion.covariance.covariance()[labels]
    difference = head.weight[None] - head.weight[labels][:, None]
    augmented = head(features) + 0.5 * (difference.square() * variance[:, None]).sum(2)
    expected = (augmented.softmax(1) - F.one_hot(labels, CLASSES)) @ head.weight / len(labels)
    torch.testing.assert_close(features.grad, expected.detach(), rtol=1e-11, atol=1e-13)
    assert (head.weight.grad != 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_and_strength_keep_their_precision_in_a_module_of_half_precision(dtype):
    """bf16 cannot count further than 256."""
    features, labels = batch(0, 300)
    criterion, expected = (ISDALoss(CLASSES, DIM) for _ in range(2))
    nn.ModuleDict({"criterion": criterion}).to(dtype)
    head = linear().to(dtype)
    for loss, precision in ((criterion, dtype), (expected, torch.float32)):
        loss.set_progress(1.0)
        for _ in range(3):
            loss(features.to(dtype).to(precision), labels, head.to(precision))
    assert criterion.covariance.count.tolist() == (3 * labels.bincount()).tolist()
    torch.testing.assert_close(criterion.state_dict(), expected.state_dict())
    assert criterion.double().covariance.mean.dtype == torch.float64


def test_head_without_bias():
    criterion, head = ISDALoss(CLASSES, DIM).double().eval(), nn.Linear(DIM, CLASSES, bias=False).double()
    features, labels = batch(0)
    expected = F.cross_entropy(features @ head.weight.T, labels)
    torch.testing.assert_close(criterion(features, labels, head, 1.0), expected, rtol=1e-13, atol=0)


@forms
def test_training_with_the_loss_instead_of_cross_entropy_learns(form):
    rng = np.random.default_rng(0)
    labels = torch.tensor(np.arange(60) % CLASSES)
    images = torch.tensor(rng.normal(size=(60, 6)) + 2 * np.eye(6)[labels.numpy()], dtype=torch.float32)
    body, head, criterion = (
        nn.Sequential(nn.Linear(6, DIM), nn.Tanh()),
        nn.Linear(DIM, CLASSES),
        ISDALoss(CLASSES, DIM, form),
    )
    optimiser = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.5)
    losses = []
    for step in range(60):
        loss = criterion(body(images), labels, head, strength=step / 60)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert (head(body(images)).argmax(1) == labels).float().mean() > 0.8


@pytest.mark.parametrize(
    "head", [nn.Sequential(nn.Linear(DIM, CLASSES)), nn.Identity(), torch.ones(CLASSES, DIM), None]
)
def test_a_head_that_is_not_linear_raises_an_error(head):
    with pytest.raises(ValueError, match="head must be an nn.Linear"):
        ISDALoss(CLASSES, DIM)(torch.ones(2, DIM), torch.tensor([0, 1]), head)


class Cosine(nn.Linear):
    def forward(self, features):
        return F.linear(F.normalize(features), F.normalize(self.weight))


class Cast(nn.Linear):
    """A forward of its own that computes the same, as timm's."""

    def forward(self, features):
        return F.linear(features, self.weight.to(features.dtype), self.bias)


class LowRank(nn.Linear):
    def __init__(self):
        super().__init__(DIM, CLASSES)
        self.update = nn.Parameter(torch.zeros(CLASSES, DIM))

    def forward(self, features):
        return F.linear(features, self.weight + self.update, self.bias)


def test_a_head_with_another_forward_must_compute_the_same():
    features, labels = torch.randn(4, DIM), torch.tensor([0, 1, 2, 0])
    for head in (Cosine(DIM, CLASSES), LowRank()):
        with pytest.raises(ValueError, match=f"the logits of {type(head).__name__} are not W·a \\+ b"):
            ISDALoss(CLASSES, DIM)(features, labels, head, 1.0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(DIM, CLASSES))
    for head in (Cast(DIM, CLASSES), normed):
        loss = ISDALoss(CLASSES, DIM)(features, labels, head, 0.0)
        torch.testing.assert_close(loss, F.cross_entropy(head(features), labels))
    with pytest.raises(ValueError, match="head must be an nn.Linear or a 1×1 convolution"):
        ISDALoss(CLASSES, DIM)(features, labels, nn.Conv2d(DIM, CLASSES, 1, padding=(0, 1)), 1.0)


WRONG = {
    "NaN features": (lambda x, y: (x * math.nan, y, 1.0), "NaN or infinite"),
    "features of other width": (lambda x, y: (x[:, 1:], y, 1.0), r"features must have shape \(N, \d+\), as they enter"),
    "features before pooling": (lambda x, y: (x[:, :, None, None], y, 1.0), "as they enter the head"),
    "an empty batch": (lambda x, y: (x[:0], y[:0], 1.0), "the batch is empty"),
    "labels out of range": (lambda x, y: (x, y + CLASSES, 1.0), "labels must lie in 0 … 2"),
    "int32 labels": (lambda x, y: (x, y.int(), 1.0), "must be int64"),
    "soft labels": (
        lambda x, y: (x, F.one_hot(y, CLASSES).double(), 1.0),
        "class indices as labels, not probabilities",
    ),
    "negative strength": (lambda x, y: (x, y, -1.0), "strength must be a finite number ≥ 0"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_raise_a_clear_error_and_leave_the_statistics_unchanged(case, training):
    criterion, head = ISDALoss(CLASSES, DIM).double(), linear()
    criterion(*batch(0), head, 1.0)
    before = {name: tensor.clone() for name, tensor in criterion.state_dict().items()}
    change, message = WRONG[case]
    features, labels, strength = change(*batch(1))
    with pytest.raises(ValueError, match=message):
        criterion.train(training)(features, labels, head, strength)
    assert all(torch.equal(tensor, before[name]) for name, tensor in criterion.state_dict().items())


def test_an_unknown_form_raises_an_error():
    with pytest.raises(ValueError, match="form must be 'diagonal' or 'full', not 'sparse'"):
        ISDALoss(CLASSES, DIM, "sparse")


def test_options_and_head_are_checked_before_the_statistics_change():
    with pytest.raises(ValueError, match="reduction must be"):
        ISDALoss(3, 4, reduction="avg")
    criterion = ISDALoss(3, 4)
    with pytest.raises(ValueError, match=r"weight must have shape \(3, 4\), not \(5, 4\)"):
        criterion(torch.randn(2, 4), torch.tensor([0, 1]), torch.nn.Linear(4, 5), 1.0)
    assert not criterion.covariance.count.any()
