"""AutoStrength: the solution of Newton's method, what it does not depend on, and a small training run."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import logsumexp
from torch import nn

import semaug
from semaug.isda import strength as module
from semaug.isda.strength import AutoStrength, Schedule, make_strength

CLASSES, DIM, COUNT, SHARE = 5, 6, 12, 0.4


def batch(seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(DIM, CLASSES).double()
    with torch.no_grad():
        head.weight.copy_(torch.randn(CLASSES, DIM, generator=generator, dtype=torch.float64))
        head.bias.copy_(torch.randn(CLASSES, generator=generator, dtype=torch.float64))
    labels = torch.arange(COUNT) % CLASSES
    noise = torch.randn(COUNT, DIM, generator=generator, dtype=torch.float64)
    features = scale * head.weight.detach()[labels] + 0.3 * noise  # fitted, with margins
    variance = torch.rand(COUNT, DIM, generator=generator, dtype=torch.float64)
    return features, labels, (head.weight.detach(), head.bias.detach()), semaug.Diagonal(variance)


def solved(monkeypatch, features, labels, head, covariance, progress=1.0, start=0.0, smoothing=0.0):
    """λ of one batch, with enough steps and no smoothing of λ over batches."""
    monkeypatch.setattr(module, "NEWTON_STEPS", 60)
    monkeypatch.setattr(module, "RATE", 1.0)
    auto = AutoStrength(SHARE)
    auto.value.fill_(start)
    auto.set_progress(progress)
    auto.observe(features, labels, head, covariance, label_smoothing=smoothing)
    auto.update()
    return float(auto.value)


def loss_by_numpy(value, features, labels, head, covariance, smoothing=0.0):
    """The mean ISDA loss, from its formula alone."""
    a, w, b, s = (x.numpy() for x in (features, *head, covariance.variance))
    target = np.eye(CLASSES)[labels.numpy()] * (1 - smoothing) + smoothing / CLASSES
    difference = w[None] - (target @ w)[:, None]
    augmented = a @ w.T + b + value / 2 * np.einsum("ijd,id->ij", difference**2, s)
    return (logsumexp(augmented, axis=1) - (target * (a @ w.T + b)).sum(1)).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("start", [0.0, 1.0, 1e6])
@pytest.mark.parametrize(("progress", "scale"), [(0.5, 3.0), (1.0, 3.0), (1.0, 0.2)])
def test_the_loss_at_the_solution_took_the_share_of_what_the_network_knows(
    monkeypatch, progress, scale, start, smoothing
):
    inputs = batch(scale=min(scale, 0.5) if smoothing else scale)
    plain = loss_by_numpy(0.0, *inputs, smoothing)
    assert plain < math.log(CLASSES), "better than guessing"
    goal = plain + SHARE * progress * (math.log(CLASSES) - plain)
    expected = brentq(lambda value: loss_by_numpy(value, *inputs, smoothing) - goal, 0.0, 1e3, xtol=1e-13)
    assert solved(monkeypatch, *inputs, progress, start, smoothing) == pytest.approx(expected, rel=1e-9)


def test_a_few_updates_come_close_from_the_solution_of_another_batch(monkeypatch):
    start = solved(monkeypatch, *batch(1))
    expected = solved(monkeypatch, *batch(2))
    assert abs(start / expected - 1) > 0.05
    monkeypatch.undo()
    auto = AutoStrength(SHARE)
    auto.value.fill_(start)
    auto.set_progress(1.0)
    for _ in range(60):
        auto.observe(*batch(2))
        auto.update()
    assert float(auto.value) == pytest.approx(expected, rel=2e-3)


def test_the_scale_of_features_head_and_covariance_changes_nothing(monkeypatch):
    features, labels, (weight, bias), covariance = batch()
    plain = solved(monkeypatch, features, labels, (weight, bias), covariance)
    for factor in (0.01, 7.0):
        # features × f, head / f, Σ × f²: the same logits and the same added terms
        scaled = semaug.Diagonal(factor**2 * covariance.variance)
        moved = solved(monkeypatch, factor * features, labels, (weight / factor, bias), scaled)
        assert moved == pytest.approx(plain, rel=1e-9)
        # Σ × f: λ / f, so λΣ stays
        larger = semaug.Diagonal(factor * covariance.variance)
        assert factor * solved(monkeypatch, features, labels, (weight, bias), larger) == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_network_no_better_than_guessing_is_not_augmented(monkeypatch, smoothing):
    features, labels, (weight, bias), covariance = batch(scale=-1.0)
    # Barely worse than guessing, where counting without the entropy of the labels would say that it knows something.
    inputs = 1e-3 * features, labels, (weight, 0 * bias), covariance
    assert 0 < loss_by_numpy(0.0, *inputs, smoothing) - math.log(CLASSES) < 0.01
    assert solved(monkeypatch, *inputs, smoothing=smoothing) == 0.0
    assert solved(monkeypatch, *inputs, start=100.0, smoothing=smoothing) == pytest.approx(0.0, abs=1e-9)


def test_without_any_variance_the_strength_stays(monkeypatch):
    features, labels, head, _ = batch()
    assert solved(monkeypatch, features, labels, head, semaug.Diagonal(torch.zeros(COUNT, DIM)), start=3.0) == 3.0


def test_features_that_are_not_finite_leave_the_strength(monkeypatch):
    features, labels, head, covariance = batch()
    features[0, 0] = math.nan
    assert solved(monkeypatch, features, labels, head, covariance, start=3.0) == 3.0


def test_micro_batches_count_by_their_share(monkeypatch):
    features, labels, head, covariance = batch()
    whole = solved(monkeypatch, features, labels, head, covariance)
    auto = AutoStrength(SHARE)
    auto.set_progress(1.0)
    for rows in (slice(0, 4), slice(4, 12)):
        part = semaug.Diagonal(covariance.variance[rows])
        auto.observe(features[rows], labels[rows], head, part, share=(rows.stop - rows.start) / COUNT)
    auto.update()
    assert float(auto.value) == pytest.approx(whole, rel=1e-12)


def test_probabilities_as_labels_equal_class_indices(monkeypatch):
    features, labels, head, covariance = batch()
    soft = nn.functional.one_hot(labels, CLASSES).double()
    expected = solved(monkeypatch, features, labels, head, covariance)
    assert solved(monkeypatch, features, soft, head, covariance) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_equal_class_indices_for_every_single_image(monkeypatch, dtype):
    """With one image in the batch, the rounding of its own class's term has either sign."""
    for seed in range(3):
        features, labels, head, covariance = batch(seed)
        features, variance, *head = (tensor.to(dtype) for tensor in (features, covariance.variance, *head))
        soft = nn.functional.one_hot(labels, CLASSES).to(dtype)
        for i in range(COUNT):
            row, form = slice(i, i + 1), semaug.Diagonal(variance[i : i + 1])
            expected = solved(monkeypatch, features[row], labels[row], tuple(head), form)
            result = solved(monkeypatch, features[row], soft[row], tuple(head), form)
            assert result == pytest.approx(expected, rel=1e-4)  # 0 if the image is misclassified


def test_strength_moves_a_tenth_of_the_way(monkeypatch):
    expected = solved(monkeypatch, *batch())
    monkeypatch.setattr(module, "RATE", 0.1)
    auto = AutoStrength(SHARE)
    auto.set_progress(1.0)
    auto.observe(*batch())
    auto.update()
    assert float(auto.value) == pytest.approx(0.1 * expected, rel=1e-9)


def test_progress_is_needed_and_checked():
    criterion = semaug.ISDALoss(CLASSES, DIM).double()
    features, labels, _, _ = batch()
    head = nn.Linear(DIM, CLASSES).double()
    with pytest.raises(ValueError, match="set_progress"):
        criterion(features, labels, head)
    assert not criterion.covariance.count.any(), "the statistics are unchanged"
    with pytest.raises(ValueError, match="between 0 and 1"):
        criterion.set_progress(1.5)
    with pytest.raises(ValueError, match="a number or 'auto'"):
        make_strength("strong")
    with pytest.raises(ValueError, match="positive"):
        AutoStrength(0.0)
    assert isinstance(make_strength(3.0), Schedule)


def test_a_training_loop_ends_with_the_share_and_resumes_exactly():
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(CLASSES, DIM, generator=generator)
    labels = torch.arange(200) % CLASSES
    features = centres[labels] + 0.5 * torch.randn(200, DIM, generator=generator)

    def train(criterion, head, first, last):
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        for step in range(first, last):
            criterion.set_progress(step / 300)
            loss = criterion(features, labels, head)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    head, criterion = nn.Linear(DIM, CLASSES), semaug.ISDALoss(CLASSES, DIM)
    train(criterion, head, 0, 150)
    again, copy = nn.Linear(DIM, CLASSES), semaug.ISDALoss(CLASSES, DIM)
    again.load_state_dict(head.state_dict())
    copy.load_state_dict(criterion.state_dict())
    loss = train(criterion, head, 150, 300)
    assert loss == train(copy, again, 150, 300)
    assert torch.equal(head.weight, again.weight)
    plain = nn.functional.cross_entropy(head(features), labels).item()
    assert loss == pytest.approx(plain + module.SHARE * (math.log(CLASSES) - plain), rel=0.1)
    assert float(criterion.strength.value) > 0


def test_a_restored_strength_has_its_progress():
    auto, again = AutoStrength(), AutoStrength()
    auto.set_progress(0.5)
    again.load_state_dict(auto.state_dict())
    again.check_ready()
    assert again.progress == 0.5


def test_an_empty_batch_is_refused() -> None:
    features, labels, head, covariance = batch()
    with pytest.raises(ValueError, match="micro-batch is empty"):
        AutoStrength().observe(features[:0], labels[:0], head, semaug.Diagonal(covariance.variance[:0]))
