"""Bars or dots with error bars, one row for each name."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from semaug.report.charts.style import CHARACTER, INK, Series, panels, plain, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """Draw values as horizontal bars or dots.

    Args:
        names: Name of each row, from the top.
        series: Values, one for each name; a row has a bar for each series with a value or text.
        dots: Whether to draw the values of a row as dots on one line instead of bars with texts.
        text: Writes values.
        x_label: Name of the axis.
        limits: Ends of the axis; by default what the values need, and zero for bars.
        reference: Where to draw a vertical line.
        longest: Most characters of a name; longer names are cut.

    Returns:
        The figure.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    shown = [name if len(name) <= longest else f"{name[: longest - 1]}…" for name in names]
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
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.set_xlabel(x_label)
    if reference is not None:
        axes.axvline(reference, color=INK, lw=1, ls=(0, (3, 3)), zorder=0.9)
    if limits:
        axes.set_xlim(*limits)
    if dots and len(series) > 1:
        handles = [Line2D([], [], label=one.label, **{**one.look, "ls": "", "ms": 6}) for one in series]
        axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0.1, ncols=len(series))
    return figure
