"""Geometry of the figures: curves and bars in units of an SVG's view box; templates/figures.html draws them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 408, 12, 212
MARKED_POINTS = 60  # longer curves have no dots

# marks of about the same area around (0, 0), so that series differ in more than colour
SHAPES = (
    "M-4.4 0a4.4 4.4 0 1 0 8.8 0a4.4 4.4 0 1 0-8.8 0Z",
    "M-3.9-3.9h7.8v7.8h-7.8Z",
    "M0-5L5 3.8H-5Z",
    "M0-5.4L5.4 0L0 5.4L-5.4 0Z",
    "M0 5L5-3.8H-5Z",
    "M-1.8-5h3.6v3.2h3.2v3.6h-3.2v3.2h-3.6v-3.2h-3.2v-3.6h3.2Z",
    "M-5-2.5L-2.5-5L0-2.5L2.5-5L5-2.5L2.5 0L5 2.5L2.5 5L0 2.5L-2.5 5L-5 2.5L-2.5 0Z",
    "M0-6L1.6-2L5.7-1.9L2.4 .8L3.5 4.9L0 2.5L-3.5 4.9L-2.4 .8L-5.7-1.9L-1.6-2Z",
)

_NARROW, _BROAD = frozenset("fijlrtI .,:;'|()[]/-!"), frozenset("mwMW@%…—")

Format = Callable[[float], str]
Scale = Callable[[float], float]


def plain(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:.3g}"


def percent(value: float) -> str:
    """A share in percent, with as many decimals as it has."""
    return f"{100 * value:.3g} %"


def text_width(text: str, size: float = 12.0) -> float:
    """Room for a text of a chart in any of its fonts: more than most of them need."""
    return size * sum(_character_width(character) for character in text)


def _character_width(character: str) -> float:
    if character in _NARROW:
        return 0.42
    if character in _BROAD or ord(character) > 0x2E7F:  # ideographs are square
        return 1.02
    return 0.78 if character.isupper() else 0.65


def shortened(text: str, room: float) -> str:
    """The text, or as much of its beginning as there is room for."""
    if text_width(text) <= room:
        return text
    end = next(end for end in range(len(text) - 1, -1, -1) if text_width(text[:end] + "…") <= room or not end)
    return text[:end] + "…"


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """From values to places between start and end; a single value lies in the middle."""
    return lambda value: (start + end) / 2 if low == high else start + (end - start) * (value - low) / (high - low)


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
    axis: str
    left: float
    right: float
    width: int = WIDTH
    height: int = HEIGHT
    bottom: int = BOTTOM


def line_chart(
    title: str,
    caption: str,
    series: Sequence[Series],
    *,
    text: Format = plain,
    logarithmic: bool = False,
    axis: str = "epoch",
    settings: Sequence[str] = (),
) -> LineChart | None:
    """Curves over epochs, or over settings in which `epochs` are places; None if there is no value at all.

    Values below or at zero have no place on a logarithmic axis.
    """
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
    y_values = (_decades if logarithmic else round_numbers)(min(heights), max(heights))
    y_texts = [text(value) for value in y_values]
    places = sorted({place for line in series for place in line.epochs})
    x_values = places if settings else _whole_numbers(places[0], places[-1])
    x_texts = [settings[int(place)] if settings else f"{place:.0f}" for place in x_values]
    left = max(LEFT, 12 + max(map(text_width, y_texts)))
    right = min(RIGHT, WIDTH - text_width(x_texts[-1]) / 2)
    x_of = linear(places[0], places[-1], left, right)
    y_of = _vertical(y_values, logarithmic)

    def hint(line: Series, place: float, value: float, spread: float) -> str:
        where = settings[int(place)] if settings else f"epoch {place:.0f}"
        return f"{line.label}, {where}: {text(value)}" + (f" ± {text(spread)}" if spread else "")

    return LineChart(
        title,
        caption,
        [Tick(x_of(value), told) for value, told in zip(x_values, x_texts, strict=True)],
        [Tick(y_of(value), told) for value, told in zip(y_values, y_texts, strict=True)],
        [_curve(line, values, x_of, y_of, hint) for line, values in zip(series, shown, strict=True)],
        axis,
        left,
        right,
    )


def _vertical(values: Sequence[float], logarithmic: bool) -> Scale:
    """From values to heights, for an axis with these ticks."""
    if not logarithmic:
        return linear(values[0], values[-1], BOTTOM, TOP)
    of_exponent = linear(math.log10(values[0]), math.log10(values[-1]), BOTTOM, TOP)
    return lambda value: of_exponent(math.log10(value))


def _curve(
    line: Series,
    values: Sequence[float | None],
    x_of: Scale,
    y_of: Scale,
    hint: Callable[[Series, float, float, float], str],
) -> Curve:
    known = [
        (place, value, spread or 0.0)
        for place, value, spread in zip(line.epochs, values, line.spread or [None] * len(values), strict=True)
        if value is not None
    ]
    path = _path([(x_of(place), y_of(value)) for place, value, _ in known])
    upper = [(x_of(place), y_of(v + s)) for place, v, s in known]
    lower = [(x_of(place), y_of(_lower(v, s))) for place, v, s in known]
    band = _path([*upper, *reversed(lower)]) + "Z" if line.spread and len(known) > 1 else ""
    marked = known if len(known) <= MARKED_POINTS else known[-1:]
    dots = [Dot(x_of(place), y_of(value), hint(line, place, value, spread)) for place, value, spread in marked]
    return Curve(line.label, line.place, path, band, dots)


def _lower(value: float, spread: float) -> float:
    """The lower edge of a band, which does not go below zero on account of a large spread."""
    return max(value - spread, min(value, 0.0))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))


def round_numbers(low: float, high: float, *, whole: bool = False) -> list[float]:
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


def _whole_numbers(first: float, last: float) -> list[float]:
    """Round whole numbers within the range."""
    return [value for value in round_numbers(first, last, whole=True) if first <= value <= last] or [first]


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
    whisker: tuple[float, float] | None = None  # its ends


@dataclass(frozen=True)
class BarGroup:
    name: str
    shown: str  # as much of the name as fits
    y: float
    bars: list[Bar]


@dataclass(frozen=True)
class BarChart:
    groups: list[BarGroup]
    height: float
    width: int = WIDTH
    full: int = WIDTH - 60  # length of a bar of 100 %
    thickness: int = 10


def bar_chart(
    names: Sequence[str],
    shares: Sequence[tuple[int, str, dict[str, float]]],
    errors: Mapping[str, float] | None = None,
) -> BarChart:
    """For each name, its share in each run: (place, label, shares by name); the name stands above its bars."""
    pitch = BarChart.thickness + 3
    groups, y = [], 0.0
    for name in names:
        known = [(place, label, by_name[name]) for place, label, by_name in shares if name in by_name]
        error = (errors or {}).get(name, 0.0)
        bars = [_bar(place, label, share, error, y + 19 + i * pitch) for i, (place, label, share) in enumerate(known)]
        groups.append(BarGroup(name, shortened(name, WIDTH), y + 14, bars))
        y += 19 + len(known) * pitch + 8
    return BarChart(groups, y)


def _bar(place: int, label: str, share: float, error: float, y: float) -> Bar:
    full = BarChart.full
    whisker = (full * max(share - error, 0.0), full * min(share + error, 1.0)) if error else None
    told = percent(share) + (f" ± {percent(error)}" if error else "")
    return Bar(place, y, max(full * share, 1.0), percent(share), f"{label}: {told}", whisker)


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
    width: float
    left: float
    right: float
    thickness: int = 20


def measured_bars(rows: Sequence[Measured]) -> MeasuredBars:
    """Bars from zero to values around 1 or above, one below the other, each with a whisker of ± its spread.

    Labels stand on the left and texts on the right, and have the room that the longest ones need.
    """
    pitch = MeasuredBars.thickness + 12
    values = round_numbers(0.0, max([1.0, *(row.value + row.spread for row in rows if row.value is not None)]))
    left = 30 + max((text_width(row.label, size=13) for row in rows), default=0.0)
    right = left + 344
    x_of = linear(0.0, values[-1], left, right)
    bars = []
    for i, row in enumerate(rows):
        value = row.value or 0.0
        low, high = x_of(_lower(value, row.spread)), x_of(value + row.spread)
        bars.append(MeasuredBar(row, 8.0 + i * pitch, x_of(value), low, high))
    ticks = [Tick(x_of(value), plain(value)) for value in values]
    width = right + 40 + max((text_width(row.text, size=13) for row in rows), default=0.0)
    return MeasuredBars(bars, ticks, x_of(1.0), 8.0 + len(rows) * pitch, width, left, right)
