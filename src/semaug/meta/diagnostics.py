"""Diagnostics of a half step: loss, accuracy, size and spread of Σ, and how far CovNet has moved."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from semaug.isda.covariance import Covariance
from semaug.isda.loss import plain_logits
from semaug.meta.losses import TrainLoss
from semaug.meta.problem import global_norm
from semaug.util import distributed

Metrics = dict[str, Tensor]
"""Diagnostics by name, each a tensor of one number on the training device."""


@torch.no_grad()
def sample_means(
    train_loss: TrainLoss, features: Tensor, head: tuple[Tensor, Tensor | None], covariance: Covariance, loss: Tensor
) -> dict[str, Tensor]:
    """Means over the samples of a micro-batch, from which :meth:`Diagnostics.summary` is computed.

    Args:
        train_loss: L_train of the micro-batch.
        features: Features (N, D).
        head: Weight (C, D) and bias (C,).
        covariance: Σ of the samples.
        loss: The value of L_train.
    """
    labels, weights = train_loss.labels, train_loss.image_weights
    logits, soft = plain_logits(features, *head), labels.is_floating_point()
    answers, target = (labels.argmax(1), labels.to(logits.dtype)) if soft else (labels, labels)
    plain = F.cross_entropy(logits, target, reduction="none", label_smoothing=train_loss.label_smoothing)
    variance = covariance.diagonal().double()
    return {
        "train_loss": loss,
        "plain_loss": (plain if weights is None else weights * plain).mean(),
        "accuracy": (logits.argmax(1) == answers).double().mean(),
        "variance": variance.mean(0),
        "variance_square": variance.square().mean(0),
        "variance_std_dims": variance.std(1, correction=0).mean(),
    }


class Diagnostics:
    """The diagnostics of half steps.

    Args:
        parameters: The parameters of the source of Σ, whose drift from their present values is measured.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.initial = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def summary(self, means: dict[str, Tensor], dtype: torch.dtype) -> Metrics:
        """The diagnostics of the half batch of all ranks, from its :func:`sample_means`."""
        means = dict(zip(means, distributed.sum_over_ranks(list(means.values())), strict=True))
        plain, variance, square = (means.pop(name) for name in ("plain_loss", "variance", "variance_square"))
        metrics = {
            **means,
            "augmentation_share": 1 - plain / means["train_loss"].clamp_min(1e-12),
            "variance_mean": variance.mean(),
            "variance_std_samples": (square - variance.square()).clamp_min(0).sqrt().mean(),
        }
        if self.parameters:
            moved = [parameter - start for parameter, start in zip(self.parameters, self.initial, strict=True)]
            size = global_norm(self.initial)
            metrics["drift"] = global_norm(moved) / size.clamp_min(torch.finfo(size.dtype).tiny)
        return {name: value.to(dtype) for name, value in metrics.items()}
