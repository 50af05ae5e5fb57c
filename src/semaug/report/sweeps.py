"""Geometry of the charts of reproduced tables and figures; templates/sweeps.html draws them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from semaug.report import charts
from semaug.report.charts import Curve, Dot, Format, LineChart, Series, Tick


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    label: str
    place: int


@dataclass(frozen=True)
class Sweep:
    """Curves over named settings, evenly spaced."""

    chart: LineChart
    axis: str
    keys: list[Key]


def sweep_chart(
    title: str, caption: str, axis: str, settings: Sequence[str], series: Sequence[Series], text: Format
) -> Sweep | None:
    """Curves over settings; `epochs` of the series are places among them. None if there is no value at all."""
    known = [line for line in series if any(value is not None for value in line.values)]
    chart = charts.line_chart(title, caption, known, text=text) if known else None
    if chart is None:
        return None
    places = [place for line in known for place in line.epochs]
    first, last = min(places), max(places)

    def x_of(place: float) -> float:
        width = charts.RIGHT - charts.LEFT
        return charts.LEFT + width * ((place - first) / (last - first) if last > first else 0.5)

    ticks = [Tick(x_of(place), settings[int(place)]) for place in sorted(set(places))]
    curves = [_named(curve, line, settings, text) for curve, line in zip(chart.curves, known, strict=True)]
    keys = [Key(line.label, line.place) for line in known]
    return Sweep(replace(chart, x_ticks=ticks, curves=curves), axis, keys)


def _named(curve: Curve, line: Series, settings: Sequence[str], text: Format) -> Curve:
    """The curve with the settings, and the spreads, in the hints of its dots."""
    spreads: Sequence[float | None] = line.spread or [None] * len(line.values)
    known = [
        (settings[int(place)], value, spread)
        for place, value, spread in zip(line.epochs, line.values, spreads, strict=True)
        if value is not None
    ]
    dots = [
        Dot(dot.x, dot.y, f"{line.label}, {setting}: {text(value)}" + (f" ± {text(spread)}" if spread else ""))
        for dot, (setting, value, spread) in zip(curve.dots, known, strict=True)
    ]
    return replace(curve, dots=dots)


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
    y: float
    marks: list[PlacedMark]


@dataclass(frozen=True)
class DotChart:
    rows: list[DotRow]
    ticks: list[Tick]
    bottom: float
    width: int = 760
    left: int = 300
    right: int = 740


def dot_chart(rows: Sequence[tuple[str, Sequence[Mark]]], text: Format = charts.plain) -> DotChart | None:
    """Rows of values on one axis, each with a whisker of ± its spread; None if there is no value."""
    ends = [value for _, marks in rows for m in marks for value in (m.value - m.spread, m.value + m.spread)]
    if not ends:
        return None
    values = charts._round_numbers(min(ends), max(ends))
    left, right, pitch = DotChart.left, DotChart.right, 24.0

    def x_of(value: float) -> float:
        return left + (right - left) * (value - values[0]) / (values[-1] - values[0])

    placed = [
        DotRow(
            label,
            16 + i * pitch,
            [PlacedMark(m, x_of(m.value), x_of(m.value - m.spread), x_of(m.value + m.spread)) for m in marks],
        )
        for i, (label, marks) in enumerate(rows)
    ]
    return DotChart(placed, [Tick(x_of(value), text(value)) for value in values], 16 + len(rows) * pitch)
