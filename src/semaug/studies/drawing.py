"""The charts of a section: accuracies as dots; accuracy, time, Σ and the theorem as curves."""

import re
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semaug.inference.runs import read_metrics
from semaug.report import charts
from semaug.report.canvas import slots
from semaug.report.charts import LineChart, Series
from semaug.report.reading import method_title, number
from semaug.studies.cells import DATASETS
from semaug.studies.presets.figure_frozen_blocks import PAPER_HOURS
from semaug.studies.presets.table_sota_p2p import published
from semaug.studies.results import Row, Section
from semaug.studies.scales import Setup
from semaug.training.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _shows_paper(setup: Setup) -> bool:
    """At small scale the paper's accuracies are of other data: no chart has them beside ours."""
    return setup.scale == "full"


def accuracy_dots(section: Section, setup: Setup) -> "Figure | None":
    """Draw the accuracy of each measured cell, and the paper's at full scale; None if there is nothing to show."""
    measured = [row for row in section.rows if row.mean is not None]
    if not measured or section.experiment.kind != "table":
        return None
    star = "" if setup.scale == "full" else "*"  # as in the table: stand-ins
    datasets, networks = (len({getattr(row.cell, name) for row in section.rows}) > 1 for name in ("dataset", "network"))
    names = []
    for row in measured:
        place = [DATASETS[row.cell.dataset] + star] * datasets + [row.cell.network + star] * networks
        names.append(f"{', '.join(place)}: {row.cell.title}" if place else row.cell.title)
    others = published() if section.experiment.published and _shows_paper(setup) else ()
    names += [f"{row.method} ({row.backbone})" for row in others]
    missing: list[float | None] = [None] * len(others)
    series = [
        Series("ours", 0, [row.mean for row in measured] + missing, spread=[row.spread for row in measured] + missing)
    ]
    if _shows_paper(setup):
        paper = [row.cell.paper for row in measured] + [row.accuracy for row in others]
        series.append(Series("as published", 1, paper, hollow=True))
    return charts.rows(names, series, dots=True, text="{:.3g} %".format)


def dots_label(section: Section, setup: Setup) -> str:
    """Describe the chart of accuracies, without a full stop."""
    beside = "; hollow: the paper's, or as published" if _shows_paper(setup) else ""
    split = "validation" if any(run.split == "val" for row in section.rows for run in row.runs) else "test"
    return f"Top-1 accuracy on the {split} split, with ± the standard deviation over seeds{beside}"


def line_charts(section: Section, setup: Setup) -> list[LineChart]:
    """Make the charts of curves of a section that have something to show."""
    made: list[LineChart] = []
    if section.experiment.kind == "lines":
        made.append(_accuracy_sweep(section, setup))
    if section.extra.get("times"):
        made.append(_time_sweep(section, setup))
    if section.extra.get("gap"):
        made.append(_gap_chart(section.extra["gap"]))
    if section.experiment.kind == "theorem" and section.extra:
        made += _theorem_charts(section.extra)
    if section.experiment.curves:
        made += _training_curves(section)
    return [chart for chart in made if not chart.empty]


def _accuracy_sweep(section: Section, setup: Setup) -> LineChart:
    rows, axis = section.rows, section.experiment.axis
    by_network = axis == "network"

    def place(row: Row) -> str:
        return row.network if by_network else row.cell.setting.partition("= ")[2]

    settings = list(dict.fromkeys(name for row in rows if (name := place(row))))
    several = len({row.cell.network for row in rows}) > 1

    def line(row: Row) -> str:
        return row.network if several and not by_network and row.cell.setting else method_title(row.cell.method)

    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(line(row), []).append(row)
    series = []
    for slot, (label, own) in zip(slots([own[0].cell.method for own in lines.values()]), lines.items(), strict=True):
        if not place(own[0]):  # plain training, which has no such setting
            own = own * len(settings)
            places = list(range(len(settings)))
        else:
            places = [settings.index(place(row)) for row in own]
        series.append(
            Series(label, slot, _shares([row.mean for row in own]), places, _shares([row.spread for row in own]))
        )
        if _shows_paper(setup) and place(own[0]):
            paper = Series(f"{label}, the paper", slot, _shares([row.cell.paper for row in own]), places, hollow=True)
            series += [paper] if any(paper.values) else []
    caption = "Top-1 accuracy with ± the standard deviation over seeds, where there are several"
    if by_network:  # names are long: what they share is on the axis
        families = {re.split(r"\d", name)[0] for name in settings}  # ResNet-50, resnet26t
        shared = families.pop() if len(families) == 1 else ""
        settings, axis = [name.removeprefix(shared) for name in settings], f"{axis} {shared}…" if shared else axis
    return LineChart("Accuracy", caption, series, axis, settings, percent=True)


def _shares(percentages: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else value / 100 for value in percentages]


def _time_sweep(section: Section, setup: Setup) -> LineChart:
    rows: list[dict[str, Any]] = section.extra["times"]
    settings = [row["frozen"] for row in rows]
    places = list(range(len(rows)))
    lines = []
    for slot, (name, label) in enumerate((("jvp", "jvp"), ("double_backward", "double backward"))):
        ratios, spreads = ([number(row[name].get(key)) for row in rows] for key in ("ratio", "ratio_spread"))
        lines.append(Series(label, slot, ratios, places, spreads))
    if _shows_paper(setup):
        hours = [PAPER_HOURS.get(setting) for setting in settings]
        relative = [None if hour is None else hour / PAPER_HOURS["basic"] for hour in hours]
        lines.append(Series("the paper", 1, relative, places, hollow=True))
    caption = "Time of a step of the meta loop relative to plain training, with ± half the interquartile range"
    return LineChart("Relative time per step", caption, lines, "frozen blocks", settings)


def _gap_chart(curves: dict[str, dict[str, Any]]) -> LineChart:
    caption = "ISDA loss minus the loss of M draws for each sample, with ± the standard deviation over repetitions"
    series = [
        Series(name, i, curve["mean"], curve["draws"], curve["spread"])
        for i, (name, curve) in enumerate(curves.items())
    ]
    return LineChart("Gap of the bound", caption, series, "M", log_x=True)


def _theorem_charts(extra: dict[str, Any]) -> list[LineChart]:
    curves: dict[str, dict[str, Any]] = extra["curves"]
    caption = "Minimum over the steps of a run of T steps, mean over seeds, for four schedules of step sizes"
    return [
        LineChart(
            title,
            caption,
            [Series(name, i, curve[key], curve["lengths"]) for i, (name, curve) in enumerate(curves.items())],
            "T",
            log_x=True,
            log_y=True,
        )
        for key, title in (("meta", "min E‖∇L_meta‖²"), ("relative", "min E‖∇L_meta‖²/α²"))
    ]


def _training_curves(section: Section) -> list[LineChart]:
    """Mean of Σ and its share of the loss, epoch by epoch, of the cells that learn Σ."""
    rows = [row for row in section.rows if METHODS[row.cell.method].learns and row.runs]
    numbers = slots([row.cell.method for row in rows])
    kinds = (
        ("variance_mean", "Variance", "Mean of the diagonal of Σ in each epoch; the band is ± over seeds"),
        (
            "augmentation_share",
            "Share of the loss",
            "The part of the training loss that Σ adds; the band is ± over seeds",
        ),
    )
    return [
        LineChart(title, caption, [_by_epoch(row, slot, key) for row, slot in zip(rows, numbers, strict=True)],
                  percent=key == "augmentation_share")
        for key, title, caption in kinds
    ]  # fmt: skip


def _by_epoch(row: Row, slot: int, key: str) -> Series:
    runs = [[number(metrics.get(key)) for metrics in read_metrics(run.run)] for run in row.runs]
    known = [[value for value in values if value is not None] for values in zip(*runs, strict=False)]
    means = [statistics.fmean(values) if values else None for values in known]
    spreads = [statistics.stdev(values) if len(values) > 1 else None for values in known]
    return Series(row.cell.title, slot, means, range(1, len(known) + 1), spreads)
