"""The report of reproduced tables and figures: one self-contained HTML page."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from semaug.report.html import chart, environment, line_charts, render_page
from semaug.studies import drawing
from semaug.studies.presets.table_sota_p2p import published
from semaug.studies.results import NOT_RUN, Section
from semaug.studies.scales import Setup


def render(sections: Sequence[Section], setup: Setup, heading: Sequence[str]) -> str:
    """Make the page.

    Args:
        sections: The sections.
        setup: The scale and folders.
        heading: Sentences about the whole result.

    Returns:
        The HTML.
    """
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
        numeric=[name for name in names if name not in ("data set", "network", "method", "note")],
        paper=("paper", "paper − basic"),
    )


def _part(section: Section, setup: Setup) -> dict[str, Any]:
    experiment, table = section.experiment, section.table(setup)
    tabulated = bool(section.rows) and experiment.kind != "pictures"
    shown = table.shown if tabulated else []
    everywhere = [f"Everywhere: {', '.join(table.common)}."] if tabulated and table.common else []
    dots = drawing.accuracy_dots(section, setup)
    return {
        "name": experiment.name,
        "title": experiment.title,
        "shows": experiment.shows,
        "caption": experiment.caption,
        "count": _count(section) if tabulated else "",
        "notes": [*everywhere, *section.notes],
        "names": [table.names[i] for i in shown],
        "rows": [
            {"absent": not row.runs, "texts": [(table.names[i], texts[i]) for i in shown]}
            for row, texts in zip(section.rows, table.rows, strict=True)
            if tabulated
        ],
        "dots": None if dots is None else chart(dots, drawing.dots_label(section, setup)),
        "dots_label": drawing.dots_label(section, setup),
        "charts": line_charts(drawing.line_charts(section, setup), legend=True),
        "lines": section.extra.get("lines", []),
        "pictures": [
            {**picture, "html": Markup(picture["html"])}  # made by our own code, which escapes names
            for picture in section.extra.get("pictures", [])
        ],
        "published": [asdict(row) for row in published()] if experiment.published else [],
        "command": section.command,
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
