"""L_train and L_meta as functions of features and head."""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class TrainLoss:
    """L_train, the ISDA loss with Σ from a source, as a function of features and head.

    Args:
        source: Where Σ comes from.
        labels: Class indices (N,), or probabilities (N, C).
        strength: λ.
        source_input: Features (N, D) that Σ is computed from, which makes it a constant in the features that the loss
            is called with; None for those.
        label_smoothing: Label smoothing, in [0, 1].
        image_weights: Weights (N,) of the images, which need not add up to N; None: all 1.
    """

    source: Source
    labels: Tensor
    strength: float | Tensor
    source_input: Tensor | None
    label_smoothing: float
    image_weights: Tensor | None = None

    def covariance(self, features: Tensor) -> Covariance:
        """Σ of the samples."""
        covariance: Covariance = self.source(
            widened(features if self.source_input is None else self.source_input), self.labels
        )
        return covariance

    def __call__(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, covariance: Covariance | None = None
    ) -> Tensor:
        """The mean over the samples; `covariance` is Σ, if it is known already."""
        covariance = self.covariance(features) if covariance is None else covariance
        losses = isda_loss(
            features, self.labels, weight, bias, covariance, self.strength, label_smoothing=self.label_smoothing,
            reduction="mean" if self.image_weights is None else "none", validate=False,
        )  # fmt: skip
        return losses if self.image_weights is None else (self.image_weights * losses).mean()

    def along(
        self,
        features: Tensor,
        head: tuple[Tensor, Tensor | None],
        d_features: Tensor,
        d_weight: Tensor,
        d_bias: Tensor | None,
    ) -> Tensor | None:
        """The derivative along a direction, in closed form for a diagonal Σ and differentiable in θ_g.

        Args:
            features: Features (N, D) at which to differentiate; those of `source_input`, if there is one.
            head: Weight (C, D) and bias (C,) at which to differentiate.
            d_features, d_weight, d_bias: The direction.

        Returns:
            The derivative; None if Σ has another form.
        """
        kinds: list[type] = []

        def variance_at(features: Tensor) -> Tensor:
            covariance = self.covariance(features)
            kinds.append(type(covariance))
            return covariance.diagonal()

        d_variance: Tensor | None = None
        if self.source_input is None:
            variance, d_variance = torch.func.jvp(variance_at, (features,), (d_features,))[:2]
        else:
            variance = variance_at(features)
        if kinds != [Diagonal]:
            return None
        return isda_loss_along(
            features, self.labels, *head, Diagonal(variance), self.strength,
            direction=(d_features, d_weight, d_bias, d_variance),
            label_smoothing=self.label_smoothing, image_weights=self.image_weights,
        )  # fmt: skip


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
