"""The report of reproduced tables and figures: one self-contained HTML page, and its charts.

At small scale the paper's accuracies are of other data, so no chart has them beside ours.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semaug.inference.runs import read_metrics
from semaug.report import charts, html
from semaug.report.canvas import slots
from semaug.report.charts import LineChart, Series
from semaug.report.reading import method_title, number
from semaug.studies.cells import DATASETS
from semaug.studies.paired import mean_and_deviation
from semaug.studies.presets.figure_frozen_blocks import PAPER_HOURS
from semaug.studies.presets.table_sota_p2p import published
from semaug.studies.results import NOT_RUN, Row, Section
from semaug.training.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(sections: Sequence[Section], heading: Sequence[str]) -> str:
    """Make the page of some sections, below sentences about the whole result."""
    parts = [_part(section) for section in sections]
    return html.render_page(
        html.environment(),
        "reproduction.html",
        styles=("style.css", "reproduction.css"),
        fragments="".join(str(picture["html"]) for part in parts for picture in part["pictures"]),
        title="Tables and figures of the paper, reproduced",
        heading=heading,
        parts=parts,
        words=("data set", "network", "method", "note"),
        paper=("paper", "paper − basic"),
    )


def _part(section: Section) -> dict[str, Any]:
    table = section.table()
    tabulated = bool(section.rows) and section.experiment.kind != "pictures"
    shown = table.shown if tabulated else []
    everywhere = [f"Everywhere: {', '.join(table.common)}."] if tabulated and table.common else []
    dots, label = accuracy_dots(section), _dots_label(section)
    return {
        "section": section,
        "count": _count(section) if tabulated else "",
        "notes": [*everywhere, *section.notes],
        "names": [table.names[i] for i in shown],
        "rows": [
            {"absent": not row.runs, "texts": [(table.names[i], texts[i]) for i in shown]}
            for row, texts in zip(section.rows, table.rows, strict=True)
            if tabulated
        ],
        "dots": None if dots is None else html.chart(dots, label),
        "dots_label": label,
        "charts": html.line_charts(line_charts(section), legend=True),
        "pictures": section.extra.get("pictures", []),
        "published": published() if section.experiment.published else [],
        "runs": [run.run.name for row in section.rows for run in row.runs],
    }


def _count(section: Section) -> str:
    """How many seeds the results come from, in one sentence."""
    counts = sorted({len(row.runs) for row in section.rows if row.runs})
    absent = sum(not row.runs for row in section.rows)
    if not counts:
        return "No cell was run."
    missing = f" {absent} of {len(section.rows)} cells were {NOT_RUN}." if absent else ""
    if counts[-1] == 1:
        return f"Each result is from one seed, which says nothing about spread.{missing}"
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"Each result is the mean of {seeds} seeds, ± their standard deviation.{missing}"


def accuracy_dots(section: Section) -> "Figure | None":
    """Draw the accuracy of each measured cell, and the paper's at full scale; None if there is nothing to show."""
    measured = [row for row in section.rows if row.mean is not None]
    if not measured or section.experiment.kind != "table":
        return None
    full = section.setup.scale == "full"
    star = "" if full else "*"  # as in the table: stand-ins
    datasets, networks = (len({getattr(row.cell, name) for row in section.rows}) > 1 for name in ("dataset", "network"))
    names = []
    for row in measured:
        place = [DATASETS[row.cell.dataset] + star] * datasets + [row.cell.network + star] * networks
        names.append(f"{', '.join(place)}: {row.cell.title}" if place else row.cell.title)
    others = published() if section.experiment.published and full else []
    names += [f"{row.method} ({row.backbone})" for row in others]
    missing: list[float | None] = [None] * len(others)
    ours, spread = [row.mean for row in measured] + missing, [row.spread for row in measured] + missing
    series = [Series("ours", 0, ours, spread=spread)]
    if full:
        paper = [row.cell.paper for row in measured] + [row.accuracy for row in others]
        series.append(Series("as published", 1, paper, hollow=True))
    return charts.rows(names, series, dots=True, text="{:.3g} %".format)


def _dots_label(section: Section) -> str:
    """Describe the chart of accuracies, without a full stop."""
    beside = "; hollow: the paper's, or as published" if section.setup.scale == "full" else ""
    split = "validation" if any(run.split == "val" for row in section.rows for run in row.runs) else "test"
    return f"Top-1 accuracy on the {split} split, with ± the standard deviation over seeds{beside}"


def line_charts(section: Section) -> list[LineChart]:
    """Make the charts of curves of a section that have something to show."""
    made: list[LineChart] = []
    if section.experiment.kind == "lines":
        made.append(_accuracy_sweep(section))
    if section.extra.get("times"):
        made.append(_time_sweep(section))
    if section.extra.get("gap"):
        made.append(_gap_chart(section.extra["gap"]))
    if section.experiment.kind == "theorem" and section.extra:
        made += _theorem_charts(section.extra["curves"])
    if section.experiment.curves:
        made += _training_curves(section)
    return [chart for chart in made if not chart.empty]


def _accuracy_sweep(section: Section) -> LineChart:
    rows, axis = section.rows, section.experiment.axis
    by_network = axis == "network"
    several = not by_network and len({row.cell.network for row in rows}) > 1

    def place(row: Row) -> str:
        return row.network if by_network else row.cell.setting.partition("= ")[2]

    settings = list(dict.fromkeys(name for row in rows if (name := place(row))))
    lines: dict[str, list[Row]] = {}
    for row in rows:
        label = row.network if several and row.cell.setting else method_title(row.cell.method)
        lines.setdefault(label, []).append(row)
    series = []
    for slot, (label, own) in zip(slots([own[0].cell.method for own in lines.values()]), lines.items(), strict=True):
        is_swept = bool(place(own[0]))  # plain training has no such setting, and a constant line
        own = own if is_swept else own * len(settings)
        places = [settings.index(place(row)) for row in own] if is_swept else list(range(len(settings)))
        ours, spread = _shares([row.mean for row in own]), _shares([row.spread for row in own])
        series.append(Series(label, slot, ours, places, spread))
        paper = _shares([row.cell.paper for row in own])
        if section.setup.scale == "full" and is_swept and any(paper):
            series.append(Series(f"{label}, the paper", slot, paper, places, hollow=True))
    caption = "Top-1 accuracy with ± the standard deviation over seeds, where there are several"
    if by_network:  # names are long: what they share is on the axis
        families = {re.split(r"\d", name)[0] for name in settings}  # ResNet-50, resnet26t
        shared = families.pop() if len(families) == 1 else ""
        settings, axis = [name.removeprefix(shared) for name in settings], f"{axis} {shared}…" if shared else axis
    return LineChart("Accuracy", caption, series, axis, settings, percent=True)


def _shares(percentages: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else value / 100 for value in percentages]


def _time_sweep(section: Section) -> LineChart:
    rows: list[dict[str, Any]] = section.extra["times"]
    settings, places = [row["frozen"] for row in rows], range(len(rows))
    lines = []
    for slot, name in enumerate(("jvp", "double_backward")):
        ratios, spreads = ([number(row[name].get(key)) for row in rows] for key in ("ratio", "ratio_spread"))
        lines.append(Series(name.replace("_", " "), slot, ratios, places, spreads))
    if section.setup.scale == "full":
        hours = [PAPER_HOURS.get(setting) for setting in settings]
        relative = [None if hour is None else hour / PAPER_HOURS["basic"] for hour in hours]
        lines.append(Series("the paper", 1, relative, places, hollow=True))
    caption = "Time of a step of the meta loop relative to plain training, with ± half the interquartile range"
    return LineChart("Relative time per step", caption, lines, "frozen blocks", settings)


def _gap_chart(curves: dict[str, dict[str, Any]]) -> LineChart:
    caption = "ISDA loss minus the loss of M draws for each sample, with ± the standard deviation over repetitions"
    rows = enumerate(curves.items())
    series = [Series(name, i, curve["mean"], curve["draws"], curve["spread"]) for i, (name, curve) in rows]
    return LineChart("Gap of the bound", caption, series, "M", log_x=True)


def _theorem_charts(curves: dict[str, dict[str, Any]]) -> list[LineChart]:
    caption = "Minimum over the steps of a run of T steps, mean over seeds, for four schedules of step sizes"
    made = []
    for key, title in (("meta", "min E‖∇L_meta‖²"), ("relative", "min E‖∇L_meta‖²/α²")):
        series = [Series(name, i, curve[key], curve["lengths"]) for i, (name, curve) in enumerate(curves.items())]
        made.append(LineChart(title, caption, series, "T", log_x=True, log_y=True))
    return made


def _training_curves(section: Section) -> list[LineChart]:
    """Mean of Σ and its share of the loss, epoch by epoch, of the cells that learn Σ."""
    rows = [row for row in section.rows if METHODS[row.cell.method].learns and row.runs]
    made = []
    for key, title, caption in (
        ("variance_mean", "Variance", "Mean of the diagonal of Σ in each epoch"),
        ("augmentation_share", "Share of the loss", "The part of the training loss that Σ adds"),
    ):
        series = []
        for row, slot in zip(rows, slots([row.cell.method for row in rows]), strict=True):
            runs = [[number(metrics.get(key)) for metrics in read_metrics(run.run)] for run in row.runs]
            epochs = [[value for value in values if value is not None] for values in zip(*runs, strict=False)]
            means, spreads = ([mean_and_deviation(values)[i] for values in epochs] for i in (0, 1))
            series.append(Series(row.cell.title, slot, means, range(1, len(epochs) + 1), spreads))
        caption += "; the band is ± over seeds"
        made.append(LineChart(title, caption, series, percent=key == "augmentation_share"))
    return made
