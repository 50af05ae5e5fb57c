"""Charts of numbers as matplotlib figures: curves, rows of bars or dots, and the confusion matrix."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from semaug.report.canvas import CHARACTER, COLOURS, DASHES, INK, SOFT, add_legend, clean, marker, panels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED_CLASSES = 40  # a confusion matrix of more classes has no names and counts
_MOST_CELLS = 400  # a confusion matrix of more classes has several in a cell

plain = "{:.3g}".format
"""Writes a number with three significant digits."""


def percent(share: float) -> str:
    """Write a share in percent with three significant digits; 1 is 100 %."""
    return f"{100 * share:.3g} %"


@dataclass(frozen=True)
class Series:
    """The values of one run or method."""

    label: str  # name in legends
    slot: int  # decides colour, marker and dashes; see `semaug.report.canvas.slots`
    values: Sequence[float | None]
    x: Sequence[float] = ()  # place of each value on the horizontal axis of `lines`
    spread: Sequence[float | None] = ()  # half length of each error bar
    texts: Sequence[str] = ()  # beside each bar of `rows`; the value by default
    hollow: bool = False  # hollow markers and dotted lines, for values that were not measured here

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", clean(self.label))

    @property
    def colour(self) -> str:
        """The colour of the series."""
        return COLOURS[self.slot % len(COLOURS)]

    @property
    def look(self) -> dict[str, Any]:
        """Options of matplotlib for lines and markers."""
        look = {"color": self.colour, "ls": DASHES[self.slot % 6], "marker": marker(self.slot), "ms": 4.5}
        return look | ({"mfc": "none", "mew": 1.2, "ls": ":"} if self.hollow else {"mew": 0})


@dataclass(frozen=True)
class LineChart:
    """Curves on one pair of axes."""

    title: str
    caption: str
    series: Sequence[Series]
    x_label: str = "epoch"
    ticks: Sequence[str] = ()  # names of the places 0, 1, 2, … on the horizontal axis, which has numbers by default
    percent: bool = False  # whether values are shares
    log_x: bool = False
    log_y: bool = False  # values of zero and below are then left out

    def points(self, series: Series) -> list[tuple[float, float, float]]:
        """List x, value and spread of the points of a curve that can be drawn."""
        spreads = series.spread or [None] * len(series.values)
        every = zip(series.x, series.values, spreads, strict=True)
        return [(x, v, s or 0.0) for x, v, s in every if v is not None and (v > 0 or not self.log_y)]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(self.points(series) for series in self.series)


@style()
def swatch(slot: int, line: bool = True) -> "Figure":
    """Draw the marker of a series, and its line if asked for, for legends in HTML."""
    figure, [axes] = panels(1, 1, (0.45 if line else 0.05, 0.05), (0, 0, 0, 0))
    axes.set_axis_off()
    x = [0, 1, 2] if line else [1]
    axes.plot(x, [0] * len(x), markevery=[len(x) // 2], clip_on=False, **Series("", slot, ()).look)
    return figure


@style()
def lines(charts: Sequence[LineChart], *, titles: bool = True, legend: bool = True) -> "Figure":
    """Draw curves in panels, with bands or error bars where they have a spread.

    Up to four curves with short names are labelled at their ends; others have a legend if `legend` asks for it.
    `titles` says whether panels show their titles and captions.
    """
    from matplotlib.lines import Line2D

    keys = list({series.label: series for chart in charts for series in chart.series}.values())
    direct = 1 < len(keys) <= 4 and all(len(series.label) <= 20 for series in keys)
    legend = legend and len(keys) > 1 and not direct
    right = 0.2 + CHARACTER * max(len(series.label) for series in keys) * direct
    margins = (0.6, right, 0.55 if titles else 0.1, 0.5)
    figure, axes = panels(len(charts), 3, (2.6, 1.75), margins, 0.3 * legend)
    for own, chart in zip(axes, charts, strict=True):
        for i, series in enumerate(chart.series):  # error bars are side by side
            _draw_curve(own, chart, series, 0.07 * (i - (len(chart.series) - 1) / 2) if chart.ticks else 0.0)
        _format_axes(own, chart)
        if titles:
            own.set_title(chart.title, pad=19)
            own.text(0, 1.04, chart.caption, transform=own.transAxes, color=SOFT, size=6.8)
        if direct:
            _label_ends(own, chart)
    if legend:
        add_legend(figure, [Line2D([], [], label=series.label, **series.look) for series in keys], len(keys))
    return figure


def _draw_curve(axes: "Axes", chart: LineChart, series: Series, shift: float) -> None:
    if not chart.points(series):
        return
    x, y, spread = (np.array(column) for column in zip(*chart.points(series), strict=True))
    x = x + shift
    low = np.maximum(y - spread, y / 2 if chart.log_y else np.minimum(y, 0.0))  # a band does not cross zero
    if chart.ticks:
        axes.errorbar(x, y, (y - low, spread), color=series.colour, ls="", capsize=3, lw=1.2)
    else:
        axes.fill_between(x, low, y + spread, color=series.colour, alpha=0.15, lw=0)
    axes.plot(x, y, markevery=-(-len(x) // 12), **series.look)


def _format_axes(axes: "Axes", chart: LineChart) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(chart.x_label, loc="right")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if chart.log_x:
        _make_logarithmic(axes, "x")
    elif chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), chart.ticks)
        axes.tick_params(axis="x", rotation=25 if sum(map(len, chart.ticks)) > 34 else 0)
        axes.set_xlim(-0.3, len(chart.ticks) - 0.7)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    if chart.log_y:
        _make_logarithmic(axes, "y")
    scale, unit = (100, " %") if chart.percent else (1, "")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{scale * value:.6g}{unit}"))


def _make_logarithmic(axes: "Axes", name: Literal["x", "y"]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # 1000, where three digits give 1e+03


def _label_ends(axes: "Axes", chart: LineChart) -> None:
    """Write the name of each curve at its end, moved up where names would overlap."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    drawn = [(points[-1], series) for series in chart.series if (points := chart.points(series))]
    ends = sorted(((to_axes.transform(last[:2])[1], series) for last, series in drawn), key=lambda end: end[0])
    heights: list[float] = []
    for height, _ in ends:
        heights.append(max([height, *(below + 0.09 for below in heights[-1:])]))
    for height, (_, series) in zip(heights, ends, strict=True):
        place = height - max(0.0, heights[-1] - 1.0)
        axes.text(1.03, place, series.label, transform=axes.transAxes, va="center", color=series.colour, weight="bold")


def _shortened(name: str, length: int) -> str:
    return clean(name if len(name) <= length else f"{name[: length - 1]}…")


@style()
def reliability(bins: Sequence[tuple[int, float, float]]) -> "Figure":
    """Draw a reliability diagram: the accuracy of the answers in each bin of confidence.

    Each bin is a number of answers, their mean confidence and their accuracy. The area of a dot is in proportion to the
    number of answers; calibrated ones are on the diagonal.
    """
    from matplotlib.ticker import FuncFormatter

    figure, [axes] = panels(1, 1, (2.6, 2.2), (0.6, 0.2, 0.1, 0.5))
    total = sum(count for count, _, _ in bins)
    counts, confidence, accuracy = zip(*(cell for cell in bins if cell[0]), strict=True) if total else ((), (), ())
    axes.plot([0, 1], [0, 1], color=SOFT, lw=1, ls=":")
    axes.vlines(confidence, confidence, accuracy, color=COLOURS[1], lw=1)
    axes.scatter(confidence, accuracy, [8 + 300 * count / total for count in counts], color=COLOURS[0], lw=0, zorder=3)
    axes.set(xlim=(-0.03, 1.05), ylim=(-0.03, 1.05))
    axes.set_xlabel("confidence", loc="right")
    axes.set_ylabel("accuracy", loc="top")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    return figure


@style()
def rows(
    names: Sequence[str],
    series: Sequence[Series],
    *,
    dots: bool = False,
    text: Callable[[float], str] = plain,
    x_label: str = "",
    limits: tuple[float, float] | None = None,
    reference: float | None = None,
    longest: int = 60,
) -> "Figure":
    """Draw values with error bars as horizontal bars or dots, one row for each name.

    Args:
        names: Name of each row, from the top.
        series: Values, one for each name; a row has a bar for each series with a value or text.
        dots: Whether to draw the values of a row as dots on one line instead of bars with texts.
        text: Writes values.
        x_label: Name of the axis.
        limits: Ends of the axis; by default what the values need, and zero for bars.
        reference: Where to draw a vertical line.
        longest: Most characters of a name; longer names are cut.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    shown = [_shortened(name, longest) for name in names]
    texts = [one.texts or ["" if v is None else text(v) for v in one.values] for one in series]
    bars = [[k for k, own in enumerate(texts) if own[i]] for i in range(len(names))]
    sizes = [0.26 if dots else 0.09 + 0.14 * max(1, len(own)) for own in bars]  # inches
    tops = [0.0, *itertools.accumulate(sizes)]
    margins = (0.15 + CHARACTER * max(map(len, shown)), 0.6, 0.25 * dots, 0.4)
    figure, [axes] = panels(1, 1, (3.6 if dots else 2.5, tops[-1]), margins)
    for i, own in enumerate(bars):
        for place, k in enumerate(own):
            value, spread = series[k].values[i], (series[k].spread[i] if series[k].spread else None) or 0.0
            y = tops[i] + (0.13 if dots else 0.115 + 0.14 * place)
            if value is not None:
                ends = [max(value - spread, min(value, 0.0)), value + spread] if spread else []
                if not dots:
                    axes.barh(y, value, height=0.12, color=series[k].colour)
                axes.plot(ends, [y] * len(ends), color=series[k].colour if dots else INK, lw=1.2)
                if dots:
                    axes.plot(value, y, **{**series[k].look, "ls": "", "ms": 6})
            if not dots:
                end = ((value or 0.0) + spread, y)
                axes.annotate(texts[k][i], end, (4, 0), textcoords="offset points", va="center", size=7.5)
    axes.set_yticks([(top + bottom) / 2 for top, bottom in itertools.pairwise(tops)], shown, color=INK)
    axes.set_ylim(tops[-1], 0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.set_xlabel(x_label)
    axes.set_xlim(limits)
    if reference is not None:
        axes.axvline(reference, color=INK, lw=1, ls=(0, (3, 3)), zorder=0.9)
    if dots and len(series) > 1:
        handles = [Line2D([], [], label=one.label, **{**one.look, "ls": "", "ms": 6}) for one in series]
        axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0.1, ncols=len(series))
    return figure


@style()
def confusion_matrix(names: Sequence[str], entries: Sequence[tuple[int, int, int]]) -> "Figure":
    """Draw how often each class was classified as each other one: right answers are blue, wrong ones orange.

    Each entry is a true class, a predicted class and a number of images. Up to 40 classes are named, more are numbered.
    """
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    count, named = len(names), len(names) <= _NAMED_CLASSES
    true, predicted, images = np.array(entries).T
    share = images / np.bincount(true, images, count)[true]
    side = min(count, _MOST_CELLS)
    cells = np.ones((side, side, 4))
    norm = PowerNorm(0.6, -0.15, 1)  # the smallest shares are visible
    for right, colours in ((False, "Oranges"), (True, "Blues")):
        own = np.flatnonzero((true == predicted) == right)
        own = own[np.argsort(share[own], kind="stable")]  # the largest share of a cell is drawn last
        cells[true[own] * side // count, predicted[own] * side // count] = matplotlib.colormaps[colours](
            norm(share[own])
        )
    size = max(1.6, 0.26 * count) if named else 5.5
    shown = [_shortened(name, 24) for name in names] if named else []
    margin = 0.4 + CHARACTER * max(map(len, shown), default=2)
    figure, [axes] = panels(1, 1, (size, size), (margin, 1.2, 0.1, margin))
    axes.imshow(cells, interpolation="none", extent=(0, count, count, 0))
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    axes.set_xlabel("predicted class", color=INK)
    axes.set_ylabel("true class", color=INK)
    if named:
        axes.set_xticks(np.arange(count) + 0.5, shown, rotation=90, size=7.5)
        axes.set_yticks(np.arange(count) + 0.5, shown, size=7.5)
        for x, y, number, part in zip(predicted, true, images, share, strict=True):
            colour = "white" if part > 0.45 else INK
            axes.text(x + 0.5, y + 0.5, str(number), ha="center", va="center", size=7, color=colour)
    height = min(1.2, 0.6 * size) / size
    for x, colours, label in ((0.2, "Blues", "right"), (0.75, "Oranges", "wrong")):
        scale = axes.inset_axes((1 + x / size, 1 - 0.2 / size - height, 0.12 / size, height))
        ticks = [0, 0.25, 1]
        figure.colorbar(ScalarMappable(norm, colours), scale, ticks=ticks, format=lambda value, _: percent(value))
        scale.set_ylim(0, 1)
        scale.set_title(label, size=8, weight="normal", color=SOFT)
        scale.tick_params(labelsize=6.5, length=2)
    return figure
