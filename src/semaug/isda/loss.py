"""ISDA as a drop-in loss for a training loop of one's own."""

from typing import Literal

from torch import Tensor, nn

from semaug.isda import functional
from semaug.isda.head import Head, is_linear, weight_and_bias
from semaug.isda.sources import ClassCovariance


class ISDALoss(nn.Module):
    """The ISDA loss with the class-wise covariance of all features seen so far.

    Called with the features before the head, the labels, and the head itself:

    >>> import torch
    >>> criterion, head = ISDALoss(num_classes=3, feature_dim=8), torch.nn.Linear(8, 3)
    >>> loss = criterion(torch.randn(4, 8), torch.tensor([0, 2, 1, 1]), head, strength=2.0)

    In training mode each call first takes the batch into the statistics; in eval mode it leaves them alone. The
    statistics are part of the state dict. Nothing changes at inference: the classifier is ``head(features)``.
    """

    def __init__(
        self,
        num_classes: int,
        feature_dim: int,
        form: Literal["diagonal", "full"] = "diagonal",
        label_smoothing: float = 0.0,
        reduction: functional.Reduction = "mean",
    ) -> None:
        super().__init__()
        functional.check_options(label_smoothing, reduction)
        self.covariance = ClassCovariance(num_classes, feature_dim, form)
        self.label_smoothing = label_smoothing
        self.reduction = reduction

    def forward(self, features: Tensor, labels: Tensor, head: Head, strength: float = 1.0) -> Tensor:
        """The loss of features (N, D) with class indices (N,) under the linear layer `head`, at strength λ."""
        if not is_linear(head):
            raise ValueError(f"the head must be an nn.Linear or a 1×1 convolution, not a {type(head).__name__}")
        weight, bias = weight_and_bias(head)
        expected = (self.covariance.num_classes, self.covariance.feature_dim)
        if tuple(weight.shape) != expected:
            raise ValueError(f"the loss was made for a head of shape {expected}, not {tuple(weight.shape)}")
        functional.check_inputs(features, labels, weight, bias, strength, validate=True)
        if self.training:
            self.covariance.update(features.detach(), labels)
        return functional.isda_loss(
            features,
            labels,
            weight,
            bias,
            self.covariance(features, labels),
            strength,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            validate=False,
        )
