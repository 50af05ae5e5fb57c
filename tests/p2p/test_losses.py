"""The losses against loops and explicit targets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from torch.nn import functional as F

from semaug.p2p.losses import alignment_loss, confident_cross_entropy, part_losses, ranking_loss


@pytest.mark.parametrize("confidence", [0.7, 0.8, 0.9, 1.0])
def test_confidence_equals_explicit_targets(confidence):
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    target = np.full((6, 5), (1 - confidence) / 4)
    target[np.arange(6), labels.numpy()] = confidence
    expected = -(target * log_softmax(logits.numpy(), 1)).sum(1).mean()
    assert confident_cross_entropy(logits, labels, confidence).item() == pytest.approx(expected, rel=1e-12)


def test_soft_labels_are_accepted():
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    soft = F.one_hot(labels, 5).double()
    torch.testing.assert_close(confident_cross_entropy(logits, soft, 0.7), confident_cross_entropy(logits, labels, 0.7))
    parts = torch.randn(6, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(part_losses(parts, soft), part_losses(parts, labels))


@pytest.mark.parametrize(("confidence", "classes"), [(1.1, 5), (0.1, 5), (1.0, 1)])
def test_impossible_confidences_are_refused(confidence, classes):
    with pytest.raises(ValueError, match="confidence must be in"):
        confident_cross_entropy(torch.randn(2, classes), torch.zeros(2, dtype=torch.int64), confidence)


@given(seed=st.integers(0, 10**6), parts=st.integers(2, 6))
def test_ranking_equals_a_double_loop(seed, parts):
    torch.manual_seed(seed)
    scores = torch.randn(3, parts, dtype=torch.float64)
    losses = torch.randint(4, (3, parts)).double()  # some are equal: such pairs do not count
    total = 0.0
    for n in range(3):
        for i in range(parts):
            for j in range(parts):
                if losses[n, j] > losses[n, i]:
                    total += max(0.0, 1 - scores[n, i].item() + scores[n, j].item())
    assert ranking_loss(scores, losses).item() == pytest.approx(total / 3)


def test_ranking_gives_a_gradient_to_the_scores_only():
    scores = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    losses = torch.tensor([[0.1, 2.0]], dtype=torch.float64, requires_grad=True)
    ranking_loss(scores, losses).backward()
    assert scores.grad.tolist() == [[-1.0, 1.0]]  # the better part's score rises
    assert losses.grad is None


def test_alignment_equals_the_formula_and_gives_a_gradient_to_both_sides():
    image = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    parts = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    value = alignment_loss(image, parts)
    each = softmax(image.detach().numpy(), -1) * log_softmax(parts.detach().numpy(), -1)
    assert value.item() == pytest.approx(-each.sum(-1).mean(1).sum())
    value.backward()
    assert image.grad.abs().sum() > 0
    assert parts.grad.abs().sum() > 0


def test_part_losses_are_the_cross_entropies_of_the_parts():
    logits, labels = torch.randn(3, 4, 5, dtype=torch.float64), torch.tensor([0, 4, 2])
    expected = [
        [F.cross_entropy(part[None], label[None]).item() for part in image]
        for image, label in zip(logits, labels, strict=True)
    ]
    torch.testing.assert_close(part_losses(logits, labels), torch.tensor(expected, dtype=torch.float64))
