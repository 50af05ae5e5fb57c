"""The ISDA loss (equations 1 to 3 of the paper): augmented logits, the loss, and its derivative along a direction.

Implicit semantic data augmentation (ISDA) draws features ``a' ~ N(a_i, λΣ_i)`` around the feature ``a_i`` of each
sample. Their mean cross-entropy, eq. 1 with infinitely many draws, has an upper bound: the ISDA loss, eq. 2,

    ``E[−log softmax(W a' + b)_{y_i}] ≤ −log softmax(z_i)_{y_i}`` with

    ``z_ij = w_j·a_i + b_j + (λ/2) v_jᵀ Σ_i v_j`` and ``v_j = w_j − w_{y_i}``.

Equation 3 is the same loss with the Σ_i that CovNet predicts. Here a (N, D) are the deep features: the input of the
last linear layer, called the head, with weight W (C, D) and bias b (C,). y are the labels and λ is the strength.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from semaug.isda.checks import Reduction, check_inputs, check_options
from semaug.isda.covariance import Covariance, Diagonal
from semaug.isda.precision import LARGEST_TERM, full_precision, widened
from semaug.isda.quadratic import quadratic_form


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
    """Compute the logits of eq. 2: ``z_ij = w_j·a_i + b_j + (λ/2) (w_j − w_{y_i})ᵀ Σ_i (w_j − w_{y_i})``.

    The added term is exactly 0 for the sample's own class, j = y_i. It is limited to 1e20, so nothing overflows.
    With soft labels p, the mean weight ``Σ_k p_ik w_k`` takes the place of ``w_{y_i}``.

    Args:
        features: Features a before the head, shape (N, D) with N ≥ 1.
        labels: Class indices (N,) of type int64, or probabilities (N, C) of floating type.
        weight: Weight W of the head, shape (C, D).
        bias: Bias b of the head, shape (C,), or None.
        covariance: Σ of the N samples; None means Σ = 0 and gives the plain logits.
        strength: λ, from 0 to 1e12: a number, or a scalar tensor, in which the logits are differentiable.
        validate: Also check values: finite features, labels in range. This makes the host wait for an accelerator.
            Shapes and types are always checked.

    Returns:
        The augmented logits z, shape (N, C), in fp32, or in fp64 for fp64 inputs.

    Raises:
        ValueError: If the batch is empty, shapes or types do not match, or a value is out of range.

    Examples:
        >>> import semaug, torch
        >>> weight, covariance = torch.eye(2), semaug.Diagonal(torch.ones(1, 2))  # v = w_1 − w_0 = (−1, 1)
        >>> semaug.augmented_logits(torch.zeros(1, 2), torch.tensor([0]), weight, None, covariance, strength=3.0)
        tensor([[0., 3.]])
    """
    check_inputs(features, labels, weight, bias, covariance, strength, validate=validate)
    if isinstance(covariance, Diagonal):
        return _diagonal_logits(features, labels, weight, bias, covariance.variance, strength)
    logits = plain_logits(features, weight, bias)
    if covariance is None:
        return logits
    return logits + (strength / 2 * covariance.quadratic(weight, labels)).clamp_max(LARGEST_TERM)


def plain_logits(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits ``W a + b`` without augmentation (N, C), in fp32 at least."""
    with full_precision(features):
        return F.linear(widened(features), widened(weight), None if bias is None else widened(bias))


def _diagonal_logits(
    features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, variance: Tensor, strength: float | Tensor
) -> Tensor:
    """The augmented logits of diagonal covariances; both terms share one gradient of the weight."""
    if variance.shape != features.shape:
        raise ValueError(f"variances {tuple(variance.shape)} do not match features {tuple(features.shape)}")
    with full_precision(weight):
        features, weight, bias = widened(features), widened(weight), None if bias is None else widened(bias)
        scaled = strength / 2 * variance.to(weight.dtype)
        return quadratic_form(features, bias, scaled.clamp_max(_largest_variance(weight)), weight, labels)


def _largest_variance(weight: Tensor) -> Tensor:
    """The largest ``(λ/2)·s`` for which no part of ``Σ_d (λ/2) s_d (w_jd − w̄_d)²`` exceeds `LARGEST_TERM`, a scalar.

    No ``|w_jd − w̄_d|`` is larger than twice the largest weight. The bound is a constant: it has no gradient.
    """
    reach: Tensor = torch.linalg.vector_norm(weight.detach(), ord=math.inf)
    return LARGEST_TERM / (4 * weight.shape[1]) / reach.square()


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
    """Compute the ISDA loss (eq. 2 and 3): a bound of the mean cross-entropy of infinitely many ``a' ~ N(a, λΣ)``.

    With class indices it is the cross-entropy of :func:`augmented_logits`: ``−log softmax(z_i)_{y_i}``.

    Soft labels and label smoothing mean what they mean in :func:`torch.nn.functional.cross_entropy`, which the loss
    equals at λ = 0. The cross-entropy of target p is ``log Σ_j exp((w_j − w̄)·a' + b_j − b̄)`` with ``w̄ = Σ_k p_k w_k``
    and ``b̄ = Σ_k p_k b_k``, so Jensen's inequality gives the bound

        ``log Σ_j exp(w_j·a + b_j + (λ/2) (w_j − w̄)ᵀ Σ (w_j − w̄)) − Σ_k p_k (w_k·a + b_k)``.

    The cross-entropy of the augmented logits with target p is no bound: it rewards variance along every class in p.

    Args:
        features: Features a before the head, shape (N, D) with N ≥ 1.
        labels: Class indices (N,) of type int64, or probabilities (N, C) of floating type.
        weight: Weight W of the head, shape (C, D).
        bias: Bias b of the head, shape (C,), or None.
        covariance: Σ of the N samples; None means Σ = 0 and gives the cross-entropy.
        strength: λ, from 0 to 1e12: a number, or a scalar tensor, in which the loss is differentiable.
        label_smoothing: Share of the uniform distribution in the target, from 0 to 1.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"`: one loss per sample.
        validate: As in :func:`augmented_logits`.

    Returns:
        The loss: a scalar, or shape (N,) for `"none"`; in fp32, or in fp64 for fp64 inputs.

    Raises:
        ValueError: If the batch is empty, shapes or types do not match, or a value or an option is out of range.

    Examples:
        >>> import semaug, torch
        >>> inputs = torch.zeros(1, 2), torch.tensor([0]), torch.eye(2), None, semaug.Diagonal(torch.ones(1, 2))
        >>> semaug.isda_loss(*inputs, strength=0.0)  # the cross-entropy, log 2
        tensor(0.6931)
        >>> semaug.isda_loss(*inputs, strength=3.0)  # augmented logits 0 and 3
        tensor(3.0486)
    """
    check_options(label_smoothing, reduction)
    check_inputs(features, labels, weight, bias, covariance, strength, validate=validate)
    target = target_of(labels, weight, label_smoothing)
    augmented = augmented_logits(features, target, weight, bias, covariance, strength, validate=False)
    if not target.is_floating_point():
        return F.cross_entropy(augmented, target, reduction=reduction)
    losses = augmented.logsumexp(1) - (target * plain_logits(features, weight, bias)).sum(1)
    return _reduced(losses, reduction)


def sampled_loss(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    covariance: Covariance,
    strength: float = 1.0,
    draws: int = 1,
    *,
    generator: torch.Generator | None = None,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the loss of explicit augmentation (eq. 1): the mean cross-entropy of M draws ``a' ~ N(a, λΣ)``.

    :func:`isda_loss` is a bound of its expectation, the limit of many draws, and draws nothing. This function takes
    the time and memory of M·N samples and serves for comparison.

    Args:
        features: Features a before the head, shape (N, D) with N ≥ 1.
        labels: Class indices (N,) of type int64, or probabilities (N, C) of floating type.
        weight: Weight W of the head, shape (C, D).
        bias: Bias b of the head, shape (C,), or None.
        covariance: Σ of the N samples.
        strength: λ, from 0 to 1e12.
        draws: Number M of draws for each sample, at least 1.
        generator: Source of randomness, on the device of the features; by default torch's.
        label_smoothing: Share of the uniform distribution in the target, from 0 to 1.
        reduction: `"mean"` or `"sum"` over the samples, or `"none"`: one loss per sample.

    Returns:
        The loss: a scalar, or shape (N,) for `"none"`; in fp32, or in fp64 for fp64 inputs.

    Raises:
        ValueError: If the batch is empty, shapes or types do not match, or a value or an option is out of range.

    Examples:
        >>> import semaug, torch
        >>> inputs = torch.zeros(1, 2), torch.tensor([0]), torch.eye(2), None, semaug.Diagonal(torch.ones(1, 2))
        >>> semaug.sampled_loss(*inputs, 3.0, 10000, generator=torch.Generator().manual_seed(0)).round(decimals=2)
        tensor(1.2200)
        >>> semaug.isda_loss(*inputs, 3.0).round(decimals=2)
        tensor(3.0500)
    """
    check_options(label_smoothing, reduction)
    check_inputs(features, labels, weight, bias, covariance, strength, validate=True)
    if draws < 1:
        raise ValueError(f"draws must be at least 1, not {draws}")
    drawn = covariance.sample(widened(features), draws, strength, generator).flatten(0, 1)  # draw by draw
    target = target_of(labels, weight, label_smoothing)
    targets = target.repeat(draws, *[1] * (target.ndim - 1))
    losses = F.cross_entropy(plain_logits(drawn, weight, bias), targets, reduction="none").view(draws, -1).mean(0)
    return _reduced(losses, reduction)


def _reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


def target_of(labels: Tensor, weight: Tensor, smoothing: float) -> Tensor:
    """Class indices as they are, unless they are smoothed; otherwise probabilities (N, C) in the loss's precision."""
    if not labels.is_floating_point() and smoothing == 0:
        return labels
    probabilities = labels if labels.is_floating_point() else F.one_hot(labels, weight.shape[0])
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return probabilities.to(dtype) * (1 - smoothing) + smoothing / weight.shape[0]


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
    image_weights: Tensor | None = None,
) -> Tensor:
    """Compute the derivative of the mean :func:`isda_loss` along a direction, in closed form for a diagonal Σ.

    With the augmented logits z, the plain logits l and the target p, it is the mean of ``softmax(z)·ż − p·l̇`` over the
    samples. It is differentiable in the variances. Values are not checked.

    Args:
        features, labels, weight, bias, covariance, strength, label_smoothing: As in :func:`isda_loss`.
        direction: Directions of features, weight, bias and variances, each of the shape of what it moves; None is 0.
        image_weights: Weights (N,) of the samples in the mean; None: all 1.

    Returns:
        The directional derivative, a scalar.
    """
    d_features, d_weight, d_bias, d_variance = direction
    target = target_of(labels, weight, label_smoothing)
    augmented = _diagonal_logits(features, target, weight, bias, covariance.variance, strength)
    with full_precision(weight):
        features, weight = widened(features), widened(weight)
        scaled, bound = strength / 2 * covariance.variance.to(weight.dtype), _largest_variance(weight)
        by_features = torch.zeros_like(augmented) if d_features is None else F.linear(widened(d_features), weight)
        d_augmented = by_features if d_bias is None else by_features + widened(d_bias)
        if d_weight is not None:
            double, d_weight = 2 * scaled.clamp_max(bound), widened(d_weight)
            d_augmented = d_augmented + quadratic_form(features, None, double, weight, target, d_weight)
        if d_variance is not None:
            d_scaled = (strength / 2 * d_variance.to(weight.dtype)).where(scaled <= bound, 0.0)
            d_augmented = d_augmented + quadratic_form(None, None, d_scaled, weight, target)
    if target.is_floating_point():
        d_plain = by_features if d_weight is None else by_features + plain_logits(features, d_weight, None)
        if d_bias is not None:
            d_plain = d_plain + widened(d_bias)
        of_target = (target * d_plain).sum(1)
    else:  # the own class, whose augmented logit is the plain one
        of_target = d_augmented.gather(1, target[:, None])[:, 0]
    along = (augmented.softmax(1) * d_augmented).sum(1) - of_target
    return (along if image_weights is None else image_weights * along).mean()
