"""The losses of P2P-Net as pure functions, in fp32 at least."""

import torch
from torch import Tensor
from torch.nn import functional as F

from semaug.isda.precision import widened


def confident_cross_entropy(logits: Tensor, labels: Tensor, confidence: float = 1.0) -> Tensor:
    """The mean cross-entropy with a target of `confidence` for the label and the rest spread over the other classes.

    This is label smoothing by ``ε = (1 − confidence) · C / (C − 1)``. Logits (N, C); labels (N,), or soft ones (N, C).
    """
    classes = logits.shape[1]
    if classes < 2 or not 1 / classes <= confidence <= 1:
        raise ValueError(f"confidence must lie in [1/C, 1] with C ≥ 2 classes, not {confidence} with C = {classes}")
    return F.cross_entropy(widened(logits), labels, label_smoothing=(1 - confidence) * classes / (classes - 1))


def ranking_loss(scores: Tensor, losses: Tensor) -> Tensor:
    """``Σ max(0, 1 − s_i + s_j)`` over pairs of parts with loss_j > loss_i, mean over images; both (N, P).

    A part that is classified better should have the higher score. The losses only tell which is better: no gradient
    goes into them.
    """
    scores, losses = widened(scores), losses.detach()
    worse = losses[:, None, :] > losses[:, :, None]  # (N, i, j)
    hinge = F.relu(1 - scores[:, :, None] + scores[:, None, :])
    return (hinge * worse).sum((1, 2)).mean()


def alignment_loss(image_features: Tensor, predictions: Tensor) -> Tensor:
    """``−Σ_d softmax(f)_d · log softmax(m)_d``, mean over images; f of the image and m from its parts, (…, N, D).

    Summed over leading dimensions (the stages). Nothing is detached: the specification detaches the proposal network's
    input and the crops alone, and so the image's features learn from the parts as the parts from them.
    """
    each = -(widened(image_features).softmax(-1) * widened(predictions).log_softmax(-1)).sum(-1)
    return each.mean(-1).sum()


def part_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy (N, P) of each part, from logits (N, P, C) and the labels of the images."""
    with torch.no_grad():
        repeated = labels.repeat_interleave(logits.shape[1], 0)
        return F.cross_entropy(widened(logits.detach()).flatten(0, 1), repeated, reduction="none").view(
            logits.shape[:2]
        )
