"""Checks during training: divergence, BatchNorm over a single value, a CovNet that is not learning."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from semaug.isda.sources import CovNet
from semaug.util.errors import TrainingError

GRADIENT_NORM = "gradient_norm"
"""Name of a number that is checked after each step, but is not a metric."""
NOT_FINITE = "val_not_finite"
"""Name of the number of validation images without a finite loss, in the rows of epochs that have any."""
EXPLODED = 100  # a training loss of so many times log C, far above that of guessing, has exploded
SIGNIFICANT = 5.0  # standard errors by which an accuracy must have fallen
OVERFLOWS_ALLOWED = 20  # consecutive steps without a finite loss in fp16
COVNET_EPOCHS = 2  # epochs with augmentation after which a CovNet should have changed …
LITTLE_DRIFT = 1e-3  # … by this share of its norm,
LITTLE_SPREAD = 1e-3  # and its variances should differ between images by this share of their mean


class FiniteCheck:
    """Finds the first step whose numbers are not finite.

    In fp16 the gradient scaler skips a step that overflows, so only many consecutive ones, or all of the steps of an
    epoch, count as a failure.
    """

    def __init__(self, steps: int, fp16: bool) -> None:
        self._fp16, self._allowed = fp16, min(OVERFLOWS_ALLOWED, steps - 1) if fp16 else 0
        self._consecutive = 0

    def first_failure(self, steps: Sequence[Mapping[str, float]]) -> int | None:
        """Check the metrics of further steps; returns the index of the first step that failed, or None."""
        for i, numbers in enumerate(steps):
            checked = [numbers["train_loss"]] if self._fp16 else numbers.values()
            self._consecutive = 0 if all(map(math.isfinite, checked)) else self._consecutive + 1
            if self._consecutive > self._allowed:
                return i
        return None


def breakdown(metrics: Sequence[Mapping[str, Any]], classes: int, images: int, chance: float) -> str | None:
    """Describe how training has diverged, from the metrics of all epochs; None if it has not.

    It has if the last epoch has lost nine tenths of what had been learned, or if the loss has exploded in two epochs in
    a row at the accuracy of guessing: a network can recover from a peak within one.

    Args:
        metrics: A row for each epoch.
        classes: Number of classes, ≥ 2.
        images: Number of training images.
        chance: Accuracy of guessing: the share of the largest class.
    """
    accuracy, best = metrics[-1]["train_accuracy"], max(row["train_accuracy"] for row in metrics)
    had_learned = best > min(10 * chance, (1 + chance) / 2)
    pooled = (accuracy + best) / 2
    noise = math.sqrt(2 * pooled * (1 - pooled) / images)  # of a difference between the accuracies of two epochs
    if had_learned and accuracy < chance + (best - chance) / 10 and best - accuracy > SIGNIFICANT * noise:
        fall = f"from {100 * best:.1f} % to {100 * accuracy:.1f} %"
        return f"the training accuracy fell {fall}, and guessing gives {100 * chance:.1f} %"
    guessing, limit, last = min(2 * chance, chance + (1 - chance) / 10), EXPLODED * math.log(classes), metrics[-2:]
    if len(last) == 2 and all(row["train_loss"] > limit and row["train_accuracy"] < guessing for row in last):
        loss = f"{last[1]['train_loss']:.2g}"
        return f"the training loss exploded to {loss}, with a training accuracy of {100 * accuracy:.1f} %"
    return None


def refuse_single_values(model: nn.Module) -> None:
    """Make every BatchNorm of a network raise a :class:`TrainingError` in training if it gets one value per channel."""

    def check(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if layer.training and inputs[0].numel() == inputs[0].shape[1]:
            raise TrainingError(
                "BatchNorm needs more than one value per channel: a pass has one image, whose feature map is a single "
                "pixel; give a larger `batch_size`, `micro_batch` or `crop`"
            )

    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.register_forward_pre_hook(check)


def covnet_warning(source: nn.Module, metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe the failure of a CovNet, from the metrics of all epochs; None if it learns, or for other sources."""
    if not isinstance(source, CovNet):
        return None
    last = metrics[-1]
    mean, spread, drift = last["variance_mean"], last["variance_std_samples"], last["drift"]
    top = 1.0 if source.activation == "sigmoid" else math.inf
    if source.fixed_trace is None and not 0.01 <= mean <= 0.99 * top:
        state = "has collapsed, so hardly anything is augmented" if mean < 0.01 else "is saturated"
        return (
            f"CovNet {state}: its mean variance is {mean:.3g}, in a range from 0 to {top:g}; try a `fixed_trace` of 0.5"
        )
    if sum(row["strength"] > 0 for row in metrics) < COVNET_EPOCHS:
        return None
    if drift < LITTLE_DRIFT:
        return (
            f"CovNet is not learning: its weights have changed by {drift:.1g} of their norm, so Σ has hardly changed; "
            "the `method` isda costs less, and the `meta_optimizer` adam moves CovNet more"
        )
    if spread < LITTLE_SPREAD * mean:
        return (
            f"CovNet gives the same Σ to all images: their mean variance is {mean:.2g}, with a standard deviation of "
            f"{spread:.1g}; the `method` isda costs less"
        )
    return None
