"""The report of reproduced tables and figures: one HTML file that needs nothing else."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from semaug.report.html import chart, environment, line_charts, render_page
from semaug.studies import drawing
from semaug.studies.published import published
from semaug.studies.results import NOT_RUN, Section, columns
from semaug.studies.scales import Setup

_TEXT_COLUMNS = ("data set", "network", "method", "note")
_PAPER_COLUMNS = ("paper", "paper − basic")


def render(sections: Sequence[Section], setup: Setup, heading: Sequence[str]) -> str:
    """The page, as HTML."""
    parts = [_part(section, setup) for section in sections]
    names = dict.fromkeys(name for part in parts for name in part["names"])
    return render_page(
        environment(),
        "reproduction.html",
        styles=("style.css", "reproduction.css"),
        fragments="".join(str(picture["html"]) for part in parts for picture in part["pictures"]),
        title="Tables and figures of the paper, reproduced",
        heading=heading,
        parts=parts,
        numeric=[name for name in names if name not in _TEXT_COLUMNS],
        paper=_PAPER_COLUMNS,
    )


def _part(section: Section, setup: Setup) -> dict[str, Any]:
    from markupsafe import Markup

    experiment = section.experiment
    pictures = experiment.kind == "pictures"
    names, texts = columns(section, setup)
    alike = [i for i in (0, 1) if len({row[i] for row in texts}) == 1]
    used = [i for i, name in enumerate(names) if name in ("method", "ours") or any(row[i] for row in texts)]
    used = [i for i in used if i not in alike]
    everywhere = [f"Everywhere: {', '.join(texts[0][i] for i in alike)}."] if alike and not pictures else []
    dots = drawing.accuracy_dots(section, setup)
    return {
        "name": experiment.name,
        "title": experiment.title,
        "shows": experiment.shows,
        "caption": experiment.caption,
        "count": _count(section),
        "notes": [*everywhere, *section.notes],
        "names": [names[i] for i in used],
        "rows": [
            {"absent": not row.runs, "texts": [(names[i], text[i]) for i in used]}
            for row, text in zip(section.rows, texts, strict=True)
            if not pictures
        ],
        "dots": None if dots is None else chart(dots, drawing.dots_label(section, setup)),
        "dots_label": drawing.dots_label(section, setup),
        "charts": line_charts(drawing.line_charts(section, setup), legend=True),
        "lines": section.extra.get("lines", []),
        "pictures": [
            {**picture, "html": Markup(picture["html"])}  # our own figures, which escape what they show
            for picture in section.extra.get("pictures", [])
        ],
        "published": [asdict(row) for row in published()] if experiment.published else [],
        "command": section.command,
        "runs": [run.run.name for row in section.rows for run in row.runs],
    }


def _count(section: Section) -> str:
    """How many seeds the figures come from, in one sentence."""
    if not section.rows or section.experiment.kind == "pictures":
        return ""
    counts = sorted({len(row.runs) for row in section.rows if row.runs})
    absent = sum(not row.runs for row in section.rows)
    missing = f" {absent} of {len(section.rows)} cells were {NOT_RUN}." if absent else ""
    if not counts:
        return f"No cell was run.{missing if absent < len(section.rows) else ''}"
    if counts[-1] == 1:
        return f"Each figure is from one seed, which tells nothing about spread.{missing}"
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"Each figure is the mean of {seeds} seeds, ± their standard deviation.{missing}"
