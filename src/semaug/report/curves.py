"""The metrics of training as curves over the epochs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semaug.report.charts import LineChart, Series
from semaug.report.reading import ReportedRun, number


@dataclass(frozen=True)
class Metric:
    """A metric of metrics.jsonl."""

    key: str
    title: str
    caption: str
    spread: str = ""  # key of its standard deviation, which is drawn as a band
    percent: bool = False
    wide: bool = False  # logarithmic where values differ by more than a factor of 10


TRAINING = (
    Metric("train_loss", "Training loss", "Loss on the augmented training batches"),
    Metric("val_top1", "Validation accuracy", "Top-1 accuracy on the validation split", percent=True),
    Metric("train_accuracy", "Training accuracy", "Top-1 accuracy on the augmented training batches", percent=True),
    Metric("val_loss", "Validation loss", "Cross-entropy on the validation split, without augmentation"),
    Metric("lr", "Learning rate", "Learning rate of the network at the end of the epoch"),
)
AUGMENTATION = (
    Metric("strength", "Strength λ", "Factor of Σ in the loss"),
    Metric("augmentation_share", "Share of the loss", "Part of the training loss that is due to Σ", percent=True),
    Metric("variance_mean", "Variance", "Mean of the diagonal of Σ; band: ± the spread over samples",
           "variance_std_samples", wide=True),
    Metric("variance_std_samples", "Spread over samples", "Standard deviation; zero if samples do not differ",
           wide=True),
    Metric("variance_std_dims", "Spread over dimensions", "Standard deviation; zero if dimensions do not differ",
           wide=True),
    Metric("drift", "Drift", "Distance of CovNet's weights from the initial ones, relative to their norm", wide=True),
    Metric("meta_loss", "Meta loss", "Cross-entropy of the pseudo-updated network on the other half batch"),
    Metric("meta_gradient_norm", "Meta-gradient", "Norm of the gradient of the meta loss for CovNet", wide=True),
    Metric("meta_slope", "Meta-gradient / αλ", "The same without the factors learning rate α and λ", wide=True),
)  # fmt: skip


def augments(run: ReportedRun) -> bool:
    """Whether a run augmented features in any epoch."""
    return any(number(row.get("strength")) for row in run.metrics)


def metric_values(run: ReportedRun, key: str) -> list[float | None]:
    """List the values of a metric, None where there is none; ``meta_slope`` is computed from other metrics."""
    if key == "meta_slope":
        return [_slope(row, before) for before, row in zip([None, *run.metrics], run.metrics, strict=False)]
    return [number(row.get(key)) for row in run.metrics]


def _slope(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> float | None:
    """The meta-gradient without its factors λ and α, for which it takes the mean of both ends of the epoch."""
    norm, strength = number(row.get("meta_gradient_norm")), number(row.get("strength"))
    rates = [number(end.get("lr")) or 0.0 for end in (before or row, row)]
    factor = (strength or 0.0) * sum(rates) / 2
    return norm / factor if norm is not None and factor > 0 else None


def metric_charts(runs: Sequence[ReportedRun], metrics: Sequence[Metric]) -> list[LineChart]:
    """Make a chart of each metric that any of the runs has."""
    charts = []
    for metric in metrics:
        series = []
        for run in runs:
            values = metric_values(run, metric.key)
            epochs = [number(row.get("epoch")) or i for i, row in enumerate(run.metrics, start=1)]
            spread = metric_values(run, metric.spread) if metric.spread else ()
            series.append(Series(run.label, run.slot, values, epochs, spread))
        positive = [value for one in series for value in one.values if value is not None and value > 0]
        log = metric.wide and bool(positive) and max(positive) > 10 * min(positive)
        chart = LineChart(metric.title, metric.caption, series, percent=metric.percent, log_y=log)
        if not chart.empty:
            charts.append(chart)
    return charts
