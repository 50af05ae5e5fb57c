"""Σ during training: small charts of the metrics of one run or several."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from semaug.report.canvas import to_png, to_svg
from semaug.report.charts import lines
from semaug.report.curves import AUGMENTATION, augments, metric_charts, metric_values
from semaug.report.figures.figure import Figure, fragment
from semaug.report.html import line_charts
from semaug.report.reading import ReportedRun, read_runs
from semaug.util.errors import RunError


def diagnostics(runs: Mapping[str, Path]) -> Figure:
    """Draw Σ over the epochs: its variances, drift, meta-gradient and strength.

    Numbers, by run: the first and the last value of each metric.

    Args:
        runs: Run directories by label; they need not be finished.

    Raises:
        RunError: If no run augmented features.
    """
    named = [replace(run, label=label) for label, run in zip(runs, read_runs([*runs.values()]), strict=True)]
    shown = [run for run in named if augments(run)]
    if not shown:
        listed = ", ".join(map(str, runs.values()))
        raise RunError(f"there is no Σ to show: {listed} did not augment features in any epoch")
    numbers: dict[str, Any] = {"runs": {run.label: _ends(run) for run in shown}}
    rows = numbers["runs"].items()
    drift = ", ".join(f"{label} {row['drift']['last']:.2g}" for label, row in rows if "drift" in row)
    variance = "; ".join(
        f"{label}: mean variance {row['variance_mean']['first']:.3g} → {row['variance_mean']['last']:.3g}"
        for label, row in rows
        if "variance_mean" in row
    )
    others = ", ".join(run.label for run in named if run not in shown)
    caption = (
        "The covariance Σ of the augmentation, epoch by epoch. "
        + (f"Drift is the distance of CovNet's weights from the initial ones: {drift} of their norm. " if drift else "")
        + f"{variance}."
        + (f" Without Σ, and not shown: {others}." if others else "")
    )
    charts = metric_charts(shown, AUGMENTATION)
    drawn, title = lines(charts), "Σ during training"
    html = fragment("metrics.html", drawn=line_charts(charts), runs=shown)
    return Figure("diagnostics", title, caption, numbers, to_png(drawn), to_svg(drawn, title), html)


def _ends(run: ReportedRun) -> dict[str, dict[str, float]]:
    values = {metric.key: metric_values(run, metric.key) for metric in AUGMENTATION}
    known = {key: [value for value in own if value is not None] for key, own in values.items()}
    return {key: {"first": own[0], "last": own[-1]} for key, own in known.items() if own}
