"""The losses of P2P-Net as functions, computed in fp32 or more."""

import torch
from torch import Tensor
from torch.nn import functional as F

from semaug.isda.precision import widened


def confident_cross_entropy(logits: Tensor, labels: Tensor, confidence: float = 1.0) -> Tensor:
    """Mean cross-entropy with a target of `confidence` for the label; the rest is spread over the other classes.

    This is label smoothing with ``ε = (1 − confidence) · C / (C − 1)``, for logits (N, C) and labels (N,) or (N, C).
    """
    classes = logits.shape[1]
    if classes < 2 or not 1 / classes <= confidence <= 1:
        raise ValueError(f"confidence must be in [1/C, 1] with C ≥ 2 classes, not {confidence} with C = {classes}")
    return F.cross_entropy(widened(logits), labels, label_smoothing=(1 - confidence) * classes / (classes - 1))


def ranking_loss(scores: Tensor, losses: Tensor) -> Tensor:
    """``Σ max(0, 1 − s_i + s_j)`` over pairs of parts with loss_j > loss_i, mean over images; both (N, P).

    A part that is classified better should have the higher score. The losses receive no gradient.
    """
    scores, losses = widened(scores), losses.detach()
    worse = losses[:, None, :] > losses[:, :, None]  # (N, i, j)
    hinge = F.relu(1 - scores[:, :, None] + scores[:, None, :])
    return (hinge * worse).sum((1, 2)).mean()


def alignment_loss(image_features: Tensor, predictions: Tensor) -> Tensor:
    """``−Σ_d softmax(f)_d · log softmax(m)_d``, mean over images and summed over leading dimensions (the stages).

    f are the image's features and m their predictions from the parts, (…, N, D). Both receive a gradient: the paper
    detaches only the crops and the input of the proposal network.
    """
    each = -(widened(image_features).softmax(-1) * widened(predictions).log_softmax(-1)).sum(-1)
    return each.mean(-1).sum()


@torch.no_grad()
def part_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy (N, P) of each part, from `logits` (N, P, C) and the images' `labels`."""
    repeated = labels.repeat_interleave(logits.shape[1], 0)
    return F.cross_entropy(widened(logits).flatten(0, 1), repeated, reduction="none").view(logits.shape[:2])
