"""Curves over epochs or settings, in panels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semaug.report.charts.style import CHARACTER, SOFT, Series, add_legend, panels, percent, plain, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LineChart:
    """Curves on one pair of axes.

    Args:
        title: Heading.
        caption: What the chart shows.
        series: The curves.
        x_label: Name of the horizontal axis.
        ticks: Names of the places 0, 1, 2, … of the horizontal axis; by default it has numbers.
        percent: Whether values are shares, which are shown in percent.
        log_x: Whether the horizontal axis is logarithmic.
        log_y: Whether the vertical axis is logarithmic; values of zero and below are left out.
    """

    title: str
    caption: str
    series: Sequence[Series]
    x_label: str = "epoch"
    ticks: Sequence[str] = ()
    percent: bool = False
    log_x: bool = False
    log_y: bool = False

    def points(self, series: Series) -> list[tuple[float, float, float]]:
        """List what can be drawn of a curve.

        Args:
            series: One of the curves.

        Returns:
            x, value and spread of each point.
        """
        spreads = series.spread or [None] * len(series.values)
        every = zip(series.x, series.values, spreads, strict=True)
        return [(x, v, s or 0.0) for x, v, s in every if v is not None and (v > 0 or not self.log_y)]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(self.points(series) for series in self.series)


@style()
def lines(charts: Sequence[LineChart], *, titles: bool = True, legend: bool = True, columns: int = 3) -> "Figure":
    """Draw curves, with bands or error bars where they have a spread.

    Up to four curves with short names are labelled at their ends; others have a legend.

    Args:
        charts: The panels.
        titles: Whether panels show their titles and captions.
        legend: Whether to draw a legend where curves are not labelled.
        columns: Most panels in a row.

    Returns:
        The figure.
    """
    from matplotlib.lines import Line2D

    keys = list({series.label: series for chart in charts for series in chart.series}.values())
    direct = 1 < len(keys) <= 4 and all(len(series.label) <= 20 for series in keys)
    legend = legend and len(keys) > 1 and not direct
    right = 0.2 + CHARACTER * max(len(series.label) for series in keys) * direct
    margins = (0.6, right, 0.55 if titles else 0.1, 0.5)
    figure, axes = panels(len(charts), columns, (2.6, 1.75), margins, 0.3 * legend)
    for own, chart in zip(axes, charts, strict=True):
        _draw(own, chart, titles, direct)
    if legend:
        add_legend(figure, [Line2D([], [], label=series.label, **series.look) for series in keys], len(keys))
    return figure


def _draw(axes: "Axes", chart: LineChart, titles: bool, direct: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    for series in chart.series:
        points = chart.points(series)
        if not points:
            continue
        x, y, spread = (np.array(column) for column in zip(*points, strict=True))
        low = np.maximum(y - spread, y / 2 if chart.log_y else np.minimum(y, 0.0))  # no band crosses zero
        if chart.ticks:
            axes.errorbar(x, y, (y - low, spread), color=series.colour, ls="", capsize=3, lw=1.2)
        else:
            axes.fill_between(x, low, y + spread, color=series.colour, alpha=0.15, lw=0)
        axes.plot(x, y, markevery=-(-len(x) // 12), **series.look)
    axes.set_xlabel(chart.x_label, loc="right")
    if titles:
        axes.set_title(chart.title, pad=19)
        axes.text(0, 1.04, chart.caption, transform=axes.transAxes, color=SOFT, size=7)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if chart.log_x:
        axes.set_xscale("log")
    elif chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), chart.ticks)
        if sum(map(len, chart.ticks)) > 34:
            axes.tick_params(axis="x", rotation=25)
        axes.set_xlim(-0.3, len(chart.ticks) - 0.7)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    if chart.log_y:
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 100 * bottom else (1,), numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
    text = percent if chart.percent else plain
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    if direct:
        _label_ends(axes, chart)


def _label_ends(axes: "Axes", chart: LineChart) -> None:
    """Write the name of each curve at its end, moved up where names would overlap."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [
        (to_axes.transform(points[-1][:2])[1], series) for series in chart.series if (points := chart.points(series))
    ]
    ends.sort(key=lambda end: end[0])
    heights: list[float] = []
    for height, _ in ends:
        heights.append(max([height, *(below + 0.09 for below in heights[-1:])]))
    for height, (_, series) in zip(heights, ends, strict=True):
        place = height - max(0.0, heights[-1] - 1.0)
        axes.text(1.03, place, series.label, transform=axes.transAxes, va="center", color=series.colour, weight="bold")
