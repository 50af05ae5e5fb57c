"""Progress of a training run, stored in a checkpoint beside network, optimisers and random states."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from torch import Tensor

from semaug.training.checks import GRADIENT_NORM, NOT_FINITE

SELECT_BY = {"top1": "val_top1", "mean-of-classes": "val_mean_class_accuracy"}
"""The metric that chooses the best epoch, by the setting `select_by`."""
Row = dict[str, Any]
"""Metrics of one epoch by name."""


@dataclass
class EpochState:
    """Progress within an unfinished epoch."""

    images: int  # number of training images, which must stay the same within an epoch
    step: int = 0  # number of steps taken
    seconds: float = 0.0  # time that they took
    lr: float = 0.0  # learning rate of the last step
    sums: dict[str, float] = field(default_factory=dict)  # of each metric, over the steps in which it was finite
    counts: dict[str, int] = field(default_factory=dict)  # of those steps
    generator: Tensor | None = None  # state of the batches' random generator after the last step

    def add(self, steps: Iterable[Mapping[str, float]]) -> None:
        """Add the metrics of further steps to the sums, except those that are not finite (of steps skipped in fp16)."""
        for metrics in steps:
            for name, value in metrics.items():
                if name != GRADIENT_NORM and math.isfinite(value):
                    self.sums[name] = self.sums.get(name, 0.0) + value
                    self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Mean of each metric, rounded to six digits."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        means["train_accuracy"] = means.pop("accuracy")
        return {name: float(f"{value:.6g}") for name, value in means.items()}


@dataclass
class TrainingState:
    """Progress of a run."""

    epoch: int = 0  # number of completed epochs
    within: EpochState | None = None  # progress within the next epoch; None before its first step
    metrics: list[Row] = field(default_factory=list)  # of each completed epoch
    best: float = -1.0  # highest validation accuracy so far, of the kind that selects
    best_epoch: int = 0  # the epoch that reached it
    warned: bool = False  # whether a warning about CovNet has been printed

    def complete_epoch(self, row: Row, accuracy: str = "val_top1") -> bool:
        """Record the metrics of a completed epoch; returns whether its validation accuracy is the best so far.

        An epoch that was not validated, or whose network gave numbers that are not finite, is never the best.

        Args:
            row: The metrics.
            accuracy: Name of the one that selects.
        """
        self.metrics.append(row)
        self.epoch, self.within = row["epoch"], None
        if row.get(accuracy, -1.0) <= self.best or NOT_FINITE in row:
            return False
        self.best, self.best_epoch = row[accuracy], row["epoch"]
        return True

    def to_checkpoint(self) -> dict[str, Any]:
        """The state as plain values and tensors."""
        return asdict(self)

    @classmethod
    def from_checkpoint(cls, content: Mapping[str, Any]) -> Self:
        """Restore the state from a dictionary with, among others, the items of :meth:`to_checkpoint`."""
        values = {name: content[name] for name in cls.__dataclass_fields__}
        return cls(**values | {"within": None if values["within"] is None else EpochState(**values["within"])})
