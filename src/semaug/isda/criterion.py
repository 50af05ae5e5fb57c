"""The ISDA loss as a module, with class-wise statistics and a strength of its own."""

from typing import Literal

import torch
from torch import Tensor, nn

from semaug.isda.checks import Reduction, check_inputs, check_options
from semaug.isda.head import Head, follows_weight, is_linear, weight_and_bias
from semaug.isda.loss import isda_loss
from semaug.isda.sources import ClassCovariance
from semaug.isda.strength import StrengthOption, make_strength
from semaug.util import distributed


class ISDALoss(nn.Module):
    """The ISDA loss with the class-wise covariance of all features seen so far: a replacement for cross-entropy.

    In training mode, each call first adds the batch to the class statistics; in evaluation mode, it only reads them.
    The statistics are part of the state dict. Inference does not change: the classifier is still ``head(features)``.

    Args:
        num_classes: Number of classes C, at least 2.
        feature_dim: Dimension D of the features.
        form: `"diagonal"` (variances) or `"full"` (covariance matrices, C×D×D numbers: for small D).
        label_smoothing: Share of the uniform distribution in the target, from 0 to 1.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"`: one loss per sample.
        strength: `"auto"`, or λ0 of the paper's schedule; λ follows :meth:`set_progress`.

    Examples:
        >>> import semaug, torch
        >>> head, criterion = torch.nn.Linear(8, 3), semaug.ISDALoss(num_classes=3, feature_dim=8)
        >>> features = torch.randn(4, 8, requires_grad=True)  # from the backbone
        >>> criterion.set_progress(0.25)  # before each step: the share of training that is done
        >>> loss = criterion(features, torch.tensor([0, 2, 1, 1]), head)
        >>> loss.backward()
    """

    def __init__(
        self,
        num_classes: int,
        feature_dim: int,
        form: Literal["diagonal", "full"] = "diagonal",
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        strength: StrengthOption = "auto",
    ) -> None:
        super().__init__()
        check_options(label_smoothing, reduction)
        self.covariance = ClassCovariance(num_classes, feature_dim, form)
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.strength = make_strength(strength)

    def set_progress(self, progress: float) -> None:
        """Set the progress of training, which determines λ. Call it before each step, or at least once per epoch.

        Args:
            progress: From 0 at the start of training to 1 at its end.

        Raises:
            ValueError: If it is outside this range.
        """
        self.strength.set_progress(progress)

    def forward(self, features: Tensor, labels: Tensor, head: Head, strength: float | None = None) -> Tensor:
        """Compute the loss of a batch and, in training mode, add the batch to the class statistics.

        Args:
            features: Features before the head, shape (N, D) with N ≥ 1.
            labels: Class indices, shape (N,), int64.
            head: The linear layer from D features to C logits: `nn.Linear`, or a 1×1 convolution.
            strength: λ for this call, from 0 to 1e12. Default: the module's own.

        Returns:
            The loss: a scalar, or shape (N,) for the reduction `"none"`.

        Raises:
            ValueError: If an input does not fit, or ``"auto"`` has no progress; the statistics are then
                unchanged.
        """
        if not is_linear(head):
            raise ValueError(f"the head must be an nn.Linear or a 1×1 convolution, not a {type(head).__name__}")
        weight, bias = weight_and_bias(head)
        expected = (self.covariance.num_classes, self.covariance.feature_dim)
        if tuple(weight.shape) != expected:
            raise ValueError(f"the head's weight must have shape {expected}, not {tuple(weight.shape)}")
        if features.ndim != 2 or features.shape[1] != expected[1]:
            shape = tuple(features.shape)
            raise ValueError(f"features must have shape (N, {expected[1]}), as they enter the head, not {shape}")
        value = self.strength.value if strength is None else strength
        check_inputs(features, labels, weight, bias, None, value, validate=True)
        if not torch.compiler.is_compiling() and not follows_weight(head, features.detach()):
            raise ValueError(
                f"the logits of {type(head).__name__} are not W·a + b, with the head's weight W and bias b"
            )
        follow = self.training and strength is None
        if follow:
            self.strength.check_ready()
        if self.training:
            self.covariance.update(features.detach(), labels)
        covariance = self.covariance(features, labels)
        loss = isda_loss(
            features, labels, weight, bias, covariance, value,
            label_smoothing=self.label_smoothing, reduction=self.reduction, validate=False,
        )  # fmt: skip
        if follow:
            share = 1 / distributed.world_size()
            self.strength.observe(features, labels, (weight, bias), covariance, share, self.label_smoothing)
            self.strength.update()
        return loss
