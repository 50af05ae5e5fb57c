"""The losses of P2P-Net as functions, computed in fp32 or more."""

import torch
from torch import Tensor
from torch.nn import functional as F

from semaug.isda.precision import widened


def confident_cross_entropy(logits: Tensor, labels: Tensor, confidence: float = 1.0) -> Tensor:
    """Mean cross-entropy with a target of `confidence` for the label; the rest is spread over the other classes.

    This is label smoothing with ``ε = (1 − confidence) · C / (C − 1)``.

    Args:
        logits: (N, C), C ≥ 2.
        labels: Classes (N,), or probabilities (N, C).
        confidence: In [1/C, 1].

    Raises:
        ValueError: `confidence` is out of range.
    """
    classes = logits.shape[1]
    if classes < 2 or not 1 / classes <= confidence <= 1:
        raise ValueError(f"confidence must be in [1/C, 1] with C ≥ 2 classes, not {confidence} with C = {classes}")
    return F.cross_entropy(widened(logits), labels, label_smoothing=(1 - confidence) * classes / (classes - 1))


def ranking_loss(scores: Tensor, losses: Tensor) -> Tensor:
    """``Σ max(0, 1 − s_i + s_j)`` over pairs of parts with loss_j > loss_i, mean over images.

    A part that is classified better should have the higher score.

    Args:
        scores: Scores (N, P) of the parts.
        losses: Losses (N, P) of the parts; they receive no gradient.
    """
    scores, losses = widened(scores), losses.detach()
    worse = losses[:, None, :] > losses[:, :, None]  # (N, i, j)
    hinge = F.relu(1 - scores[:, :, None] + scores[:, None, :])
    return (hinge * worse).sum((1, 2)).mean()


def alignment_loss(image_features: Tensor, predictions: Tensor) -> Tensor:
    """``−Σ_d softmax(f)_d · log softmax(m)_d``, mean over images and summed over leading dimensions (the stages).

    Both sides receive a gradient: the paper detaches only the crops and the input of the proposal network.

    Args:
        image_features: Features f (…, N, D) of the image.
        predictions: Predictions m (…, N, D) of them from the parts.
    """
    each = -(widened(image_features).softmax(-1) * widened(predictions).log_softmax(-1)).sum(-1)
    return each.mean(-1).sum()


@torch.no_grad()
def part_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy (N, P) of each part, from `logits` (N, P, C) and the images' `labels`."""
    repeated = labels.repeat_interleave(logits.shape[1], 0)
    return F.cross_entropy(widened(logits).flatten(0, 1), repeated, reduction="none").view(logits.shape[:2])
