"""Geometry of the charts of reproduced tables and figures; templates/figures.html draws them."""

from collections.abc import Sequence
from dataclasses import dataclass

from semaug.report import charts
from semaug.report.charts import Format, LineChart, Series, Tick


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    label: str
    place: int


@dataclass(frozen=True)
class Sweep:
    """Curves over named settings, evenly spaced, and a legend of their own."""

    chart: LineChart
    keys: list[Key]


def sweep_chart(
    title: str, caption: str, axis: str, settings: Sequence[str], series: Sequence[Series], text: Format
) -> Sweep | None:
    """Curves over settings; `epochs` of the series are places among them. None if there is no value at all."""
    known = [line for line in series if any(value is not None for value in line.values)]
    chart = charts.line_chart(title, caption, known, text=text, axis=axis, settings=settings) if known else None
    return None if chart is None else Sweep(chart, [Key(line.label, line.place) for line in known])


@dataclass(frozen=True)
class Mark:
    """A value in a row of a dot chart; `place` chooses the colour, `hollow` marks what was not measured here."""

    place: int
    value: float
    spread: float
    hint: str
    hollow: bool = False


@dataclass(frozen=True)
class PlacedMark:
    mark: Mark
    x: float
    low: float
    high: float


@dataclass(frozen=True)
class DotRow:
    label: str
    y: float  # of the marks; the label stands above them
    marks: list[PlacedMark]


@dataclass(frozen=True)
class DotChart:
    rows: list[DotRow]
    ticks: list[Tick]
    bottom: float
    width: float


def dot_chart(rows: Sequence[tuple[str, Sequence[Mark]]], text: Format = charts.plain) -> DotChart | None:
    """Rows of values on one axis, each with a whisker of ± its spread; None if there is no value."""
    ends = [value for _, marks in rows for m in marks for value in (m.value - m.spread, m.value + m.spread)]
    if not ends:
        return None
    values = charts.round_numbers(min(ends), max(ends))
    texts = [text(value) for value in values]
    width = max(charts.WIDTH, *(charts.text_width(label) for label, _ in rows))
    margins = [max(8.0, charts.text_width(told) / 2) for told in (texts[0], texts[-1])]
    x_of = charts.linear(values[0], values[-1], margins[0], width - margins[1])
    pitch = 34.0
    placed = [
        DotRow(
            label,
            26 + i * pitch,
            [PlacedMark(m, x_of(m.value), x_of(m.value - m.spread), x_of(m.value + m.spread)) for m in marks],
        )
        for i, (label, marks) in enumerate(rows)
    ]
    ticks = [Tick(x_of(value), told) for value, told in zip(values, texts, strict=True)]
    return DotChart(placed, ticks, 6 + len(rows) * pitch, width)
