"""Implicit semantic data augmentation (ISDA): augmented logits and the loss, as functions and as a module.

Notation of the paper: ``a`` (N, D) are the features before the last linear layer, ``W`` (C, D) and ``b`` (C,) that
layer, ``y`` the labels, ``Σ_i`` the covariance of sample i, ``λ`` the strength of augmentation.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semaug.isda.covariance import Covariance, Diagonal, soft_labels
from semaug.isda.head import Head, is_linear, weight_and_bias
from semaug.isda.precision import LARGEST_TERM, full_precision, widened
from semaug.isda.sources import ClassCovariance
from semaug.isda.strength import check_size

Reduction = Literal["mean", "sum", "none"]


def augmented_logits(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    covariance: Covariance | None,
    strength: float | Tensor = 1.0,
    *,
    validate: bool = True,
) -> Tensor:
    """Eq. 2: ``z_ij = w_j·a_i + b_j + (λ/2) (w_j − w_{y_i})ᵀ Σ_i (w_j − w_{y_i})``, shape (N, C), at least fp32.

    The added term is exactly 0 for the own class, j = y_i, and held at 1e20 at most, so that nothing overflows.
    ``labels`` are class indices (N,), or probabilities (N, C) of floating type: then ``Σ_k p_ik w_k`` takes the place
    of ``w_{y_i}``. ``covariance=None`` gives the plain logits.
    ``validate=False`` skips the two checks that read values (finite features, labels in range), each of which makes
    the host wait for an accelerator.
    """
    check_inputs(features, labels, weight, bias, strength, validate=validate)
    if isinstance(covariance, Diagonal):
        return covariance.augmented_logits(features, labels, weight, bias, strength)
    logits = _logits(features, weight, bias)
    if covariance is None:
        return logits
    return logits + (strength / 2 * covariance.quadratic(weight, labels)).clamp_max(LARGEST_TERM)


def _logits(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with full_precision(features):
        return F.linear(widened(features), widened(weight), None if bias is None else widened(bias))


def isda_loss(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    covariance: Covariance | None,
    strength: float | Tensor = 1.0,
    *,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    validate: bool = True,
) -> Tensor:
    """Eq. 2, 3: the upper bound of the expected cross-entropy of infinitely many features ``a' ~ N(a, λΣ)``.

    With class indices it is the cross-entropy of :func:`augmented_logits`. Soft labels and label smoothing are those
    of :func:`torch.nn.functional.cross_entropy` (equal to it for λ = 0) and keep the bound: a cross-entropy with
    target p is ``log Σ_j exp((w_j − w̄)·a' + b_j − b̄)`` with ``w̄ = Σ_k p_k w_k``, so Jensen's inequality gives

        ``log Σ_j exp(w_j·a + b_j + (λ/2)(w_j − w̄)ᵀ Σ (w_j − w̄)) − Σ_k p_k (w_k·a + b_k)``.

    (The cross-entropy of the augmented logits with target p would *reward* variance along every class in p.)
    ``reduction`` is ``"mean"``, ``"sum"`` or ``"none"`` (one loss per sample, (N,)).
    """
    check_options(label_smoothing, reduction)
    if not labels.is_floating_point() and label_smoothing == 0:
        augmented = augmented_logits(features, labels, weight, bias, covariance, strength, validate=validate)
        return F.cross_entropy(augmented, labels, reduction=reduction)

    check_inputs(features, labels, weight, bias, strength, validate=validate)
    target = soft_labels(labels, weight.shape[0], label_smoothing, widened(weight).dtype)
    augmented = augmented_logits(features, target, weight, bias, covariance, strength, validate=False)
    losses = augmented.logsumexp(1) - (target * _logits(features, weight, bias)).sum(1)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


def isda_loss_along(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    covariance: Diagonal,
    strength: float | Tensor = 1.0,
    *,
    direction: Sequence[Tensor | None],
    label_smoothing: float = 0.0,
) -> Tensor:
    """The derivative of :func:`isda_loss`, its mean, along a `direction` of features, weight, bias and variance.

    With z the augmented logits and p the target it is the mean over samples of ``softmax(z)·ż − p·ẏ``, where ẏ is the
    derivative of the plain logits. ``None`` in the direction is 0. It can itself be differentiated in the variance.
    """
    d_features, d_weight, d_bias, _ = direction
    if labels.is_floating_point() or label_smoothing:
        labels = soft_labels(labels, weight.shape[0], label_smoothing, widened(weight).dtype)
    augmented = augmented_logits(features, labels, weight, bias, covariance, strength, validate=False)
    moved = covariance.augmented_logits_along(features, labels, weight, strength, *direction)
    if labels.is_floating_point():
        plain = torch.zeros_like(augmented) if d_features is None else _logits(d_features, weight, None)
        if d_weight is not None:
            plain = plain + _logits(features, d_weight, None)
        if d_bias is not None:
            plain = plain + widened(d_bias)
        of_target = (labels * plain).sum(1)
    else:  # to which augmentation adds nothing
        of_target = moved.gather(1, labels[:, None])[:, 0]
    return ((augmented.softmax(1) * moved).sum(1) - of_target).mean()


def check_options(label_smoothing: float, reduction: str) -> None:
    """Raise ``ValueError`` for options that the loss does not know."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], not {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")


def check_inputs(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    strength: float | Tensor,
    *,
    validate: bool,
) -> None:
    """Raise one clear ``ValueError`` for inputs that the loss cannot take; see :func:`augmented_logits`."""
    if features.ndim != 2:
        raise ValueError(f"features must have shape (N, D), not {tuple(features.shape)}")
    if weight.ndim != 2 or weight.shape[1] != features.shape[1]:
        raise ValueError(f"the head's weight must have shape (C, {features.shape[1]}), not {tuple(weight.shape)}")
    if not features.is_floating_point() or widened(features[:0]).dtype != widened(weight[:0]).dtype:
        raise ValueError(f"features of {features.dtype} do not go with a head of {weight.dtype}")
    count, classes = features.shape[0], weight.shape[0]
    if bias is not None and bias.shape != (classes,):
        raise ValueError(f"the head's bias must have shape ({classes},), not {tuple(bias.shape)}")
    expected = (count, classes) if labels.is_floating_point() else (count,)
    if tuple(labels.shape) != expected:
        kind = "probabilities" if labels.is_floating_point() else "class indices"
        raise ValueError(f"labels as {kind} must have shape {expected}, not {tuple(labels.shape)}")
    if not labels.is_floating_point() and labels.dtype != torch.int64:
        raise ValueError(f"labels as class indices must be int64, not {labels.dtype}")
    if isinstance(strength, Tensor):
        if strength.ndim:
            raise ValueError(f"strength must be a single number, not a tensor of shape {tuple(strength.shape)}")
    elif not (math.isfinite(strength) and strength >= 0):
        raise ValueError(f"strength must be a finite number ≥ 0, not {strength}")
    else:
        check_size(strength)
    if validate and not torch.compiler.is_compiling():
        check_features(features)
        check_labels(labels, classes)
        if isinstance(strength, Tensor):
            if not bool(strength.isfinite() & (strength >= 0)):
                raise ValueError(f"strength must be finite and ≥ 0, not {strength}")
            check_size(float(strength.detach()))


def check_features(features: Tensor) -> None:
    """Raise ``ValueError`` where a feature is not finite (reads the values, so the host waits for an accelerator)."""
    if not bool(features.isfinite().all()):
        rows = (~features.isfinite().all(1)).nonzero()[:, 0].tolist()
        raise ValueError(f"features are NaN or infinite in row {rows[0]} ({len(rows)} of {features.shape[0]} rows)")


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise ``ValueError`` where an index names no class or a row is not a distribution (reads the values)."""
    if labels.is_floating_point():
        sums = labels.double().sum(1)
        tolerance = 1e-3 if widened(labels).dtype == labels.dtype else 3e-2
        if bool((labels < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=tolerance):
            raise ValueError("soft labels must be probabilities: not negative, and of sum 1 in each row")
    elif labels.numel() and not bool(((labels >= 0) & (labels < classes)).all()):
        raise ValueError(f"labels must lie in 0 … {classes - 1}, found {int(labels.min())} … {int(labels.max())}")


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
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        check_options(label_smoothing, reduction)
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
        check_inputs(features, labels, weight, bias, strength, validate=True)
        if self.training:
            self.covariance.update(features.detach(), labels)
        return isda_loss(
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
