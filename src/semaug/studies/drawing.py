"""The charts of a section: accuracies as dots, sweeps as curves, Σ over the epochs, times, the theorem."""

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from semaug.inference.runs import read_metrics
from semaug.report import charts
from semaug.report.charts import LineChart, Series
from semaug.report.reading import number
from semaug.report.sweeps import DotChart, Key, Mark, Sweep, dot_chart, sweep_chart
from semaug.studies.cells import DATASETS
from semaug.studies.presets.figure_frozen_blocks import PAPER_HOURS
from semaug.studies.published import published
from semaug.studies.results import Row, Section, SeedRun
from semaug.studies.scales import Setup
from semaug.training.methods import METHODS

OURS, PAPER = 0, 1  # colours


def shows_paper(setup: Setup) -> bool:
    """At small scale the paper's accuracies are of other data: no chart has them beside ours."""
    return setup.scale == "full"


def _share(value: float) -> str:
    return f"{value:.3g} %"


# ------------------------------------------------------------------------------------------------------ accuracies


def accuracy_dots(section: Section, setup: Setup) -> DotChart | None:
    """One row for each measured cell: ours with its spread, and the paper's figure at full scale."""
    star = "" if setup.scale == "full" else "*"  # as in the table: stand-ins
    datasets, networks = (len({getattr(row.cell, name) for row in section.rows}) > 1 for name in ("dataset", "network"))
    rows = []
    for row in section.rows:
        if row.mean is None:
            continue
        spread = row.spread or 0.0
        marks = [Mark(OURS, row.mean, spread, f"ours: {row.ours} %")]
        if shows_paper(setup) and row.cell.paper is not None:
            marks.append(Mark(PAPER, row.cell.paper, 0.0, f"the paper: {row.cell.paper:.1f} %", hollow=True))
        place = [DATASETS[row.cell.dataset] + star] * datasets + [row.cell.network + star] * networks
        rows.append((f"{', '.join(place)}: {row.cell.title}" if place else row.cell.title, marks))
    if rows and section.experiment.published and shows_paper(setup):
        rows += [
            (
                f"{row.method} ({row.backbone})",
                [Mark(PAPER, row.accuracy, 0.0, f"published: {row.accuracy:.1f} %", True)],
            )
            for row in published()
        ]
    return dot_chart(rows, _share)


def dots_label(section: Section, setup: Setup) -> str:
    beside = "; hollow: the paper's, or as published" if shows_paper(setup) else ""
    split = "validation" if any(run.split == "val" for row in section.rows for run in row.runs) else "test"
    return f"Top-1 accuracy on the {split} split, with ± the standard deviation over seeds{beside}"


# ---------------------------------------------------------------------------------------------------------- sweeps


def sweeps(section: Section, setup: Setup) -> list[Sweep]:
    """The curves of an experiment over its settings."""
    found: list[Sweep | None] = []
    if section.experiment.kind == "lines":
        found.append(_accuracy_sweep(section, setup))
    if section.extra.get("times"):
        found.append(_time_sweep(section, setup))
    if section.experiment.kind == "theorem" and section.extra:
        found += _theorem_sweeps(section.extra)
    return [chart for chart in found if chart is not None]


def _accuracy_sweep(section: Section, setup: Setup) -> Sweep | None:
    rows, axis = section.rows, section.experiment.axis
    by_network = axis == "network"

    def place(row: Row) -> str:
        return row.network if by_network else row.cell.setting.partition("= ")[2]

    settings = list(dict.fromkeys(name for row in rows if (name := place(row))))
    several = len({row.cell.network for row in rows}) > 1

    def line(row: Row) -> str:
        if by_network or not row.cell.setting:
            return METHODS[row.cell.method].title
        return row.network if several else METHODS[row.cell.method].title

    series = []
    for i, label in enumerate(dict.fromkeys(line(row) for row in rows)):
        own = [row for row in rows if line(row) == label]
        if not place(own[0]):  # plain training, which has no such setting
            own = own * len(settings)
            places = list(range(len(settings)))
        else:
            places = [settings.index(place(row)) for row in own]
        series.append(Series(label, i, places, [row.mean for row in own], [row.spread for row in own]))
        paper = [row.cell.paper for row in own]
        if shows_paper(setup) and any(value is not None for value in paper) and place(own[0]):
            series.append(Series(f"{label}, the paper", 5, places, paper))
    caption = "Top-1 accuracy; the band is ± the standard deviation over seeds, where there are several."
    if by_network:  # names are long: what they share goes to the axis
        families = {re.split(r"\d", name)[0] for name in settings}  # ResNet-50, resnet26t
        shared = families.pop() if len(families) == 1 else ""
        settings, axis = [name.removeprefix(shared) for name in settings], f"{axis} {shared}…" if shared else axis
    return sweep_chart("Accuracy", caption, axis, settings, series, _share)


def _time_sweep(section: Section, setup: Setup) -> Sweep | None:
    rows: list[dict[str, Any]] = section.extra["times"]
    settings = [str(row["frozen"]) for row in rows]
    places = list(range(len(rows)))

    def series(name: str, label: str, colour: int) -> Series:
        ratios = [number(row[name].get("ratio")) for row in rows]
        return Series(label, colour, places, ratios, [number(row[name].get("ratio_spread")) for row in rows])

    lines = [series("jvp", "jvp", 0), series("double_backward", "double backward", 1)]
    if shows_paper(setup):
        hours = [PAPER_HOURS.get(setting) for setting in settings]
        lines.append(Series("the paper", 5, places, [None if h is None else h / PAPER_HOURS["basic"] for h in hours]))
    caption = "Time of a step of the meta loop relative to plain training; the band is half the interquartile range."
    return sweep_chart("Time per step, relative", caption, "frozen blocks", settings, lines, charts.plain)


def _theorem_sweeps(extra: dict[str, Any]) -> list[Sweep | None]:
    curves: dict[str, dict[str, Any]] = extra["curves"]
    lengths = [str(length) for length in next(iter(curves.values()))["lengths"]]
    places = list(range(len(lengths)))
    found = []
    for key, title in (("meta", "log₁₀ min E‖∇L_meta‖²"), ("relative", "log₁₀ min E‖∇L_meta‖²/α²")):
        lines = [Series(name, i, places, _logs(curve[key])) for i, (name, curve) in enumerate(curves.items())]
        caption = "Minimum over the steps of a run of T steps, mean over seeds, for four schedules of step sizes."
        found.append(sweep_chart(title, caption, "T", lengths, lines, charts.plain))
    return found


def _logs(values: Sequence[float]) -> list[float | None]:
    import math

    return [math.log10(value) if value > 0 else None for value in values]


# -------------------------------------------------------------------------------------------------- over the epochs


def training_curves(section: Section) -> tuple[list[Key], list[LineChart]]:
    """Mean of Σ and its share of the loss, epoch by epoch, of the cells that learn Σ."""
    rows = [row for row in section.rows if row.cell.method in ("joint", "learnable") and row.runs]
    kinds: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("variance_mean", "Variance", "Mean of Σ's diagonal in each epoch; the band is ± over seeds.", charts.plain),
        ("augmentation_share", "Share of the loss",
         "Part of the training loss that the augmentation adds; the band is ± over seeds.", charts.percent),
    )  # fmt: skip
    found = []
    for key, title, caption, text in kinds:
        lines = [_by_epoch(row, place, key) for place, row in enumerate(rows)]
        known = [line for line in lines if any(value is not None for value in line.values)]
        chart = charts.line_chart(title, caption, known, text=text) if known else None
        if chart is not None:
            found.append(chart)
    return [Key(row.cell.title, place) for place, row in enumerate(rows)], found


def _by_epoch(row: Row, place: int, key: str) -> Series:
    runs = [_values(run, key) for run in row.runs]
    length = min(map(len, runs))
    values: list[float | None] = []
    spreads: list[float | None] = []
    for epoch in range(length):
        known = [value for run in runs if (value := run[epoch]) is not None]
        values.append(statistics.fmean(known) if known else None)
        spreads.append(statistics.stdev(known) if len(known) > 1 else None)
    return Series(row.cell.title, place, list(range(1, length + 1)), values, spreads)


def _values(run: SeedRun, key: str) -> list[float | None]:
    return [number(metrics.get(key)) for metrics in read_metrics(run.run)]
