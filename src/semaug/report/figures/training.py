"""What Σ did during training: small multiples of the metrics of one run or several."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semaug.report import charts
from semaug.report.figures.drawing import COLOURS, DASHES, INK, RULE, SOFT, canvas, files
from semaug.report.figures.figure import Figure, fragment
from semaug.report.reading import ReportedRun, number, read_runs
from semaug.util.errors import SemaugError

# key, title, what it is, key of the spread
METRICS = (
    ("variance_mean", "Variance", "mean of Σ's diagonal; band: ± its spread over samples", "variance_std_samples"),
    ("variance_std_samples", "Spread over samples", "standard deviation; zero if all are alike", ""),
    ("variance_std_dims", "Spread over dimensions", "standard deviation; zero if all are alike", ""),
    ("drift", "Drift", "of the source from where it began, relative to its size", ""),
    ("meta_gradient_norm", "Meta-gradient", "length of the gradient that the source follows", ""),
    ("meta_slope", "Meta-gradient / αλ", "what is left without the learning rate α and λ", ""),
    ("meta_loss", "Meta loss", "cross-entropy of the pseudo-updated network", ""),
    ("augmentation_share", "Share of augmentation", "the part of the training loss that Σ adds", ""),
    ("strength", "Strength λ", "the factor on Σ", ""),
)
WIDE = ("variance_mean", "variance_std_samples", "variance_std_dims", "drift", "meta_gradient_norm", "meta_slope")


def diagnostics(runs: Mapping[str, Path]) -> Figure:
    """Σ over training, by epoch: its variances and spreads, drift, meta-gradient and strength, of several runs.

    Runs need not be finished. Numbers, by run: the first and the last value of each metric.
    """
    paths = list(runs.values())
    found = read_runs(paths)
    named = [_Named(label, place, run) for place, (label, run) in enumerate(zip(runs, found, strict=True))]
    told = [run for run in named if any(number(row.get("strength")) for row in run.rows)]
    if not told:
        listed = ", ".join(map(str, paths))
        raise SemaugError(f"there is nothing to say about Σ: {listed} did not augment features in any epoch")
    numbers: dict[str, Any] = {"runs": {run.label: _ends(run) for run in told}}
    left_out = [run.label for run in named if run not in told]
    drift = {label: row["drift"]["last"] for label, row in numbers["runs"].items() if "drift" in row}
    caption = (
        "The covariance Σ of the augmentation, epoch by epoch. "
        + (
            "Drift is how far the learned source has moved from where it began, relative to its size: "
            + ", ".join(f"{label} {value:.2g}" for label, value in drift.items()) + ". "
            if drift else ""
        )
        + "; ".join(
            f"{label}: mean variance {row['variance_mean']['first']:.3g} → {row['variance_mean']['last']:.3g}"
            for label, row in numbers["runs"].items() if "variance_mean" in row
        )
        + "."
        + (f" Without Σ, and not shown: {', '.join(left_out)}." if left_out else "")
    )  # fmt: skip
    png, svg = _draw(told)
    drawn = [chart for metric in METRICS if (chart := _chart(told, *metric)) is not None]
    html = fragment("diagnostics.html", charts=drawn, runs=told)
    return Figure("diagnostics", "Σ during training", caption, numbers, png, svg, html)


class _Named:
    """A run under the label that it was given."""

    def __init__(self, label: str, place: int, run: ReportedRun) -> None:
        self.label, self.place = label, place
        before = [None, *run.metrics]
        self.rows = [{**row, "meta_slope": _slope(row, last)} for last, row in zip(before, run.metrics, strict=False)]

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Epochs and values, where there are any."""
        pairs = [(number(row.get("epoch")) or i, number(row.get(key))) for i, row in enumerate(self.rows, start=1)]
        known = [(epoch, value) for epoch, value in pairs if value is not None]
        return [epoch for epoch, _ in known], [value for _, value in known]


def _slope(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> float | None:
    """The meta-gradient of an epoch without the factors α and λ that it has by definition; α is that of its middle."""
    norm, strength = number(row.get("meta_gradient_norm")), number(row.get("strength"))
    rates = [number(end.get("lr")) or 0.0 for end in (before or row, row)]
    factor = (strength or 0.0) * sum(rates) / 2
    return norm / factor if norm is not None and factor > 0 else None


def _ends(run: _Named) -> dict[str, dict[str, float]]:
    values = {key: run.series(key)[1] for key, *_ in METRICS}
    return {key: {"first": known[0], "last": known[-1]} for key, known in values.items() if known}


def _logarithmic(runs: Sequence[_Named], key: str) -> bool:
    """Whether runs differ so much that the smaller ones would lie on the axis."""
    known = [value for run in runs for value in run.series(key)[1] if value > 0]
    return key in WIDE and bool(known) and max(known) > 10 * min(known)


def _what(what: str, logarithmic: bool) -> str:
    if not logarithmic:
        return what
    return what.replace("; band: ± its spread over samples", "") + " (logarithmic)"


def _chart(runs: Sequence[_Named], key: str, title: str, what: str, spread: str) -> charts.LineChart | None:
    logarithmic = _logarithmic(runs, key)
    what, spread = _what(what, logarithmic), "" if logarithmic else spread
    series = [
        charts.Series(run.label, run.place, epochs, values, run.series(spread)[1] if spread else ())
        for run in runs
        for epochs, values in [run.series(key)]
        if values and (not spread or len(run.series(spread)[1]) == len(values))
    ]
    caption = what[0].upper() + what[1:] + "."
    return charts.line_chart(title, caption, series, logarithmic=logarithmic) if series else None


def _positive(epochs: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    kept = [(epoch, value) for epoch, value in zip(epochs, values, strict=True) if value > 0]
    return [epoch for epoch, _ in kept], [value for _, value in kept]


def _draw(runs: Sequence[_Named]) -> tuple[bytes, str | None]:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    shown = [metric for metric in METRICS if any(run.series(metric[0])[1] for run in runs)]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = canvas(4.0 * columns, 3.1 * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    for axis, (key, title, what, spread) in zip(axes, shown, strict=False):
        logarithmic = _logarithmic(runs, key)
        axis.set_yscale("log" if logarithmic else "linear")
        for run in runs:
            epochs, values = run.series(key)
            colour, dash = COLOURS[run.place % 6], DASHES[run.place % 6]
            marker = "o" if len(values) == 1 else None
            if logarithmic:
                epochs, values = _positive(epochs, values)
            band = run.series(spread)[1] if spread and not logarithmic else []
            axis.plot(epochs, values, color=colour, ls=dash, lw=1.8, marker=marker, ms=4)
            if values and len(band) == len(values):
                low = [max(v - s, 0.0) for v, s in zip(values, band, strict=True)]
                high = [v + s for v, s in zip(values, band, strict=True)]
                axis.fill_between(epochs, low, high, color=colour, alpha=0.15, lw=0)
        axis.set_title(title, fontsize=11, loc="left", color=INK, fontweight="bold", pad=20)
        below = axis.text(
            0, 1.03, _what(what, logarithmic), transform=axis.transAxes, color=SOFT, va="bottom", size=7.5
        )
        below.set_in_layout(False)  # it may reach beyond its axes, and shall not make them smaller
        axis.set_xlabel("epoch", fontsize=8.5, color=SOFT, loc="right")
        axis.tick_params(labelsize=8.5, colors=SOFT, color=RULE)
        if logarithmic:
            low, high = axis.get_ylim()
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=7))
            axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: charts.plain(value)))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axis.grid(axis="y", color="#e8eaed", lw=0.8)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.spines["bottom"].set_color(RULE)
    handles = [
        Line2D([], [], color=COLOURS[run.place % 6], ls=DASHES[run.place % 6], lw=2, label=run.label) for run in runs
    ]
    room = 72 * 4.0 * columns  # points
    needed = max(charts.text_width(run.label, 9.5) for run in runs) + 50  # with its line
    ncols = max(1, min(len(runs), int(room / needed)))
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9.5, handlelength=3)
    return files(figure)
