"""Checks of the loss's inputs: shapes, types, and values out of range. All raise `ValueError`."""

import math
from typing import Literal

import torch
from torch import Tensor

from semaug.isda.covariance import Covariance
from semaug.isda.precision import LARGEST_STRENGTH

Reduction = Literal["mean", "sum", "none"]
"""How the losses of the samples become one number; `"none"` leaves one loss per sample."""


def check_options(label_smoothing: float, reduction: str) -> None:
    """Check the options of the loss: label smoothing from 0 to 1, and a known reduction."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], not {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")


def check_inputs(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    covariance: Covariance | None,
    strength: float | Tensor,
    *,
    validate: bool,
) -> None:
    """Check that the batch is not empty, that shapes and types match, and that values are in range.

    Args:
        features, labels, weight, bias, covariance, strength, validate: As in :func:`semaug.augmented_logits`.
    """
    if features.ndim != 2:
        raise ValueError(f"features must have shape (N, D), not {tuple(features.shape)}")
    if features.shape[0] == 0:
        raise ValueError("the batch is empty: the loss needs at least one sample")
    classes = weight.shape[:1]
    for name, tensor, shape in (
        ("the head's weight", weight, (*classes, features.shape[1])),
        ("the head's bias", bias, classes),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(tensor.shape)}")
    check_label_form(labels, len(features), weight.shape[0])
    precisions = {torch.promote_types(tensor.dtype, torch.float32) for tensor in (features, weight)}
    if not (features.is_floating_point() and weight.is_floating_point() and len(precisions) == 1):
        raise ValueError(f"features of {features.dtype} do not match a head of {weight.dtype}")
    if isinstance(strength, Tensor) and strength.ndim:
        raise ValueError(f"strength must be a single number, not a tensor of shape {tuple(strength.shape)}")
    validate = validate and not torch.compiler.is_compiling()
    if validate or not isinstance(strength, Tensor):
        value = float(strength.detach()) if isinstance(strength, Tensor) else strength
        check_strength(value)
    if validate:
        check_features(features)
        check_labels(labels, weight.shape[0])
        check_covariance(covariance)


def check_strength(value: float) -> None:
    """Check that λ is from 0 to 1e12, beyond which fp32 overflows."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"strength must be a finite number ≥ 0, not {value:g}")
    if value > LARGEST_STRENGTH:
        raise ValueError(f"strength must be at most {LARGEST_STRENGTH:g}, not {value:g}")


def check_features(features: Tensor) -> None:
    """Check that no feature (N, D) is NaN or infinite. The host waits for an accelerator."""
    if not bool(features.isfinite().all()):
        rows = (~features.isfinite().all(1)).nonzero()[:, 0].tolist()
        raise ValueError(f"features are NaN or infinite in row {rows[0]} ({len(rows)} of {features.shape[0]} rows)")


def check_covariance(covariance: Covariance | None) -> None:
    """Check that no variance is negative. The host waits for an accelerator."""
    if covariance is not None and bool((covariance.diagonal() < 0).any()):
        raise ValueError("the variances of Σ must not be negative")


def check_label_form(labels: Tensor, count: int, classes: int) -> None:
    """Check that labels have shape and type of class indices (N,) or of probabilities (N, C)."""
    soft = labels.is_floating_point()
    kind, shape = ("probabilities", (count, classes)) if soft else ("class indices", (count,))
    if soft and labels.shape == (count,):
        raise ValueError(f"labels as class indices must be int64, not {labels.dtype}; probabilities have shape {shape}")
    if labels.shape != shape:
        raise ValueError(f"labels as {kind} must have shape {shape}, not {tuple(labels.shape)}")
    if not soft and labels.dtype != torch.int64:
        raise ValueError(f"labels as class indices must be int64, not {labels.dtype}")


def check_labels(labels: Tensor, classes: int) -> None:
    """Check that indices are in range and that soft labels are distributions. The host waits for an accelerator."""
    if labels.is_floating_point():
        sums = labels.double().sum(1)
        tolerance = 3e-2 if labels.dtype in (torch.float16, torch.bfloat16) else 1e-3
        if bool((labels < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=tolerance):
            raise ValueError("soft labels must be probabilities: not negative, with a sum of 1 in each row")
    elif labels.numel() and not bool(((labels >= 0) & (labels < classes)).all()):
        raise ValueError(f"labels must lie in 0 … {classes - 1}, found {int(labels.min())} … {int(labels.max())}")
