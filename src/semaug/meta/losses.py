"""L_train and L_meta as functions of features and head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from semaug.isda.covariance import Covariance, Diagonal
from semaug.isda.loss import isda_loss, isda_loss_along, plain_logits
from semaug.isda.precision import full_precision, widened
from semaug.isda.sources import Source

HeadLoss = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A loss of features (N, D), head weight (C, D) and bias (C,). θ_g enters through its closure."""

HeadLossAlong = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
"""The derivative of a :data:`HeadLoss` along a direction of features, weight and bias, differentiable in θ_g; None if
there is no closed form."""


def train_loss(
    source: Source,
    labels: Tensor,
    strength: float | Tensor,
    source_input: Tensor | None,
    label_smoothing: float,
    image_weights: Tensor | None = None,
) -> HeadLoss:
    """L_train, the ISDA loss with Σ from a source.

    Args:
        source: Where Σ comes from.
        labels: Class indices (N,), or probabilities (N, C).
        strength: λ.
        source_input: Features (N, D) that Σ is computed from; None for those that the loss is called with.
        label_smoothing: Label smoothing, in [0, 1].
        image_weights: Weights (N,) of the images; None: all 1.

    Returns:
        The loss as a function of features and head.
    """

    def loss(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        covariance = source(widened(features if source_input is None else source_input), labels)
        return weighted_loss(
            image_weights, features, labels, weight, bias, covariance, strength,
            label_smoothing=label_smoothing, validate=False,
        )  # fmt: skip

    return loss


def weighted_loss(image_weights: Tensor | None, *args: Any, **options: Any) -> Tensor:
    """The mean over a batch of image weight (N,), None for 1, times :func:`~semaug.isda_loss` with these arguments."""
    if image_weights is None:
        return isda_loss(*args, **options)
    return (image_weights * isda_loss(*args, reduction="none", **options)).mean()


def train_loss_along(
    source: Source,
    labels: Tensor,
    strength: float | Tensor,
    features: Tensor,
    head: tuple[Tensor, Tensor | None],
    detach: bool,
    label_smoothing: float,
    image_weights: Tensor | None = None,
) -> HeadLossAlong:
    """The derivative of L_train along a direction, in closed form for a diagonal Σ.

    Args:
        source: Where Σ comes from.
        labels: Class indices (N,), or probabilities (N, C).
        strength: λ.
        features: Features (N, D) at which to differentiate.
        head: Weight (C, D) and bias (C,) at which to differentiate.
        detach: Whether Σ is a constant in the features.
        label_smoothing: Label smoothing, in [0, 1].
        image_weights: Weights (N,) of the images; None: all 1.

    Returns:
        The derivative as a function of the direction.
    """

    def along(d_features: Tensor, d_weight: Tensor, d_bias: Tensor | None) -> Tensor | None:
        kinds: list[type] = []

        def variance_at(features: Tensor) -> Tensor:
            covariance: Covariance = source(features, labels)
            kinds.append(type(covariance))
            return covariance.diagonal()

        d_variance: Tensor | None = None
        if detach:
            variance = variance_at(features)
        else:
            variance, d_variance = torch.func.jvp(variance_at, (features,), (d_features,))[:2]
        if kinds != [Diagonal]:
            return None
        return isda_loss_along(
            features,
            labels,
            *head,
            Diagonal(variance),
            strength,
            direction=(d_features, d_weight, d_bias, d_variance),
            label_smoothing=label_smoothing,
            image_weights=image_weights,
        )

    return along


def meta_loss(
    features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, image_weights: Tensor | None = None
) -> Tensor:
    """L_meta, the plain cross-entropy, in fp32 at least.

    Args:
        features: Features (N, D).
        labels: Class indices (N,), or probabilities (N, C).
        weight: Weight of the head (C, D).
        bias: Bias of the head (C,).
        image_weights: Weights (N,) of the images; None: all 1.

    Returns:
        The mean over the samples.
    """
    with full_precision(features):
        logits = plain_logits(features, weight, bias)
        if image_weights is None:
            return F.cross_entropy(logits, labels)
        return (image_weights * F.cross_entropy(logits, labels, reduction="none")).mean()
