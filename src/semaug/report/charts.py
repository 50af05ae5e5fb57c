"""Geometry of the figures: curves and bars in units of an SVG's view box; templates/figures.html draws them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 408, 12, 212
MARKED_POINTS = 60  # longer curves have no dots

Format = Callable[[float], str]
Scale = Callable[[float], float]


def plain(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:.3g}"


def percent(value: float) -> str:
    """A share in percent, with as many decimals as it has."""
    return f"{100 * value:.3g} %"


@dataclass(frozen=True)
class Series:
    """One run's values by epoch; `spread` is the half width of a band around them."""

    label: str
    place: int  # of the run; chooses the colour
    epochs: Sequence[float]
    values: Sequence[float | None]
    spread: Sequence[float | None] = ()


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Curve:
    label: str
    place: int
    line: str  # SVG path
    band: str  # SVG path; empty without spread
    dots: list[Dot]


@dataclass(frozen=True)
class LineChart:
    title: str
    caption: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    curves: list[Curve]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


def line_chart(
    title: str, caption: str, series: Sequence[Series], *, text: Format = plain, logarithmic: bool = False
) -> LineChart | None:
    """Curves over epochs; None if there is no value at all. Values below or at zero have no place on a log axis."""
    shown = [[v if v is not None and not (logarithmic and v <= 0) else None for v in line.values] for line in series]
    heights = [
        height
        for line, values in zip(series, shown, strict=True)
        for v, spread in zip(values, line.spread or [None] * len(values), strict=True)
        if v is not None
        for height in (_lower(v, spread or 0), v + (spread or 0))
    ]
    if not heights:
        return None
    y_values = (_decades if logarithmic else _round_numbers)(min(heights), max(heights))
    last = max(max(line.epochs) for line in series)
    first = min(min(line.epochs) for line in series)
    x_values = [v for v in _round_numbers(first, last, whole=True) if first <= v <= last] or [first]
    warp: Callable[[float], float] = math.log10 if logarithmic else float

    def x_of(epoch: float) -> float:
        return (LEFT + RIGHT) / 2 if last == first else LEFT + (RIGHT - LEFT) * (epoch - first) / (last - first)

    def y_of(value: float) -> float:
        low, high = warp(y_values[0]), warp(y_values[-1])
        return BOTTOM - (BOTTOM - TOP) * (warp(value) - low) / (high - low)

    return LineChart(
        title,
        caption,
        [Tick(x_of(v), f"{v:.0f}") for v in x_values],
        [Tick(y_of(v), text(v)) for v in y_values],
        [_curve(line, values, x_of, y_of, text) for line, values in zip(series, shown, strict=True)],
    )


def _curve(line: Series, values: Sequence[float | None], x_of: Scale, y_of: Scale, text: Format) -> Curve:
    known = [
        (x_of(epoch), value, spread or 0.0, epoch)
        for epoch, value, spread in zip(line.epochs, values, line.spread or [None] * len(values), strict=True)
        if value is not None
    ]
    path = _path([(x, y_of(value)) for x, value, _, _ in known])
    outline = [(x, y_of(v + s)) for x, v, s, _ in known] + [(x, y_of(_lower(v, s))) for x, v, s, _ in reversed(known)]
    band = _path(outline) + "Z" if line.spread and len(known) > 1 else ""
    marked = known if len(known) <= MARKED_POINTS else known[-1:]
    dots = [Dot(x, y_of(value), f"{line.label}, epoch {epoch:.0f}: {text(value)}") for x, value, _, epoch in marked]
    return Curve(line.label, line.place, path, band, dots)


def _lower(value: float, spread: float) -> float:
    """The lower edge of a band, which does not go below zero on account of a large spread."""
    return max(value - spread, min(value, 0.0))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))


def _round_numbers(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Four to seven round numbers that enclose the range."""
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-9):
        margin = abs(high) / 2 or 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(round(step)))
    start, stop = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [i * step for i in range(start, stop + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten that enclose the range, at most about six."""
    start, stop = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    stop = max(stop, start + 1)
    step = max(1, math.ceil((stop - start) / 5))
    return [10.0**exponent for exponent in range(start, stop + step, step)]


# ------------------------------------------------------------------------------------------------------------- bars


@dataclass(frozen=True)
class Bar:
    place: int
    y: float
    length: float
    text: str
    hint: str


@dataclass(frozen=True)
class BarGroup:
    name: str
    y: float
    bars: list[Bar]


@dataclass(frozen=True)
class BarChart:
    groups: list[BarGroup]
    height: float
    width: int = WIDTH
    full: int = WIDTH - 60  # length of a bar of 100 %
    thickness: int = 10


def bar_chart(names: Sequence[str], shares: Sequence[tuple[int, str, dict[str, float]]]) -> BarChart:
    """For each name, its share in each run: (place, label, shares by name); the name stands above its bars."""
    full, pitch = BarChart.full, BarChart.thickness + 3
    groups, y = [], 0.0
    for name in names:
        known = [(place, label, by_name[name]) for place, label, by_name in shares if name in by_name]
        bars = [
            Bar(place, y + 19 + i * pitch, max(full * share, 1.0), percent(share), f"{label}: {percent(share)}")
            for i, (place, label, share) in enumerate(known)
        ]
        groups.append(BarGroup(name, y + 14, bars))
        y += 19 + len(known) * pitch + 8
    return BarChart(groups, y)


@dataclass(frozen=True)
class Measured:
    """A measured value with its spread; without a value, the text says why. `muted`: shown as something known."""

    label: str
    value: float | None
    spread: float
    text: str
    muted: bool = False


@dataclass(frozen=True)
class MeasuredBar:
    row: Measured
    y: float
    end: float  # where the bar ends
    low: float  # ends of the whisker
    high: float


@dataclass(frozen=True)
class MeasuredBars:
    bars: list[MeasuredBar]
    ticks: list[Tick]
    one: float  # where the value 1 lies
    bottom: float
    width: int = 760
    left: int = 236
    right: int = 580
    thickness: int = 20


def measured_bars(rows: Sequence[Measured]) -> MeasuredBars:
    """Bars from zero to values around 1 or above, one below the other, each with a whisker of ± its spread."""
    left, right, pitch = MeasuredBars.left, MeasuredBars.right, MeasuredBars.thickness + 12
    values = _round_numbers(0.0, max([1.0, *(row.value + row.spread for row in rows if row.value is not None)]))

    def x_of(value: float) -> float:
        return left + (right - left) * value / values[-1]

    bars = []
    for i, row in enumerate(rows):
        value = row.value or 0.0
        low, high = x_of(_lower(value, row.spread)), x_of(value + row.spread)
        bars.append(MeasuredBar(row, 8.0 + i * pitch, x_of(value), low, high))
    return MeasuredBars(bars, [Tick(x_of(v), plain(v)) for v in values], x_of(1.0), 8.0 + len(rows) * pitch)
