"""Charts drawn with matplotlib, for HTML pages and files alike; each function returns a matplotlib figure.

| module     | subject                                                                    |
|------------|----------------------------------------------------------------------------|
| `style`    | colours and markers of series; a figure as SVG or PNG                      |
| `lines`    | curves over epochs or settings, in panels                                  |
| `rows`     | bars or dots with error bars, one row for each name                        |
| `pictures` | scatter plots, the confusion matrix, grids of photos                       |
"""

from semaug.report.charts.lines import LineChart, lines
from semaug.report.charts.pictures import Panel, Photo, PhotoBlock, confusion_matrix, photo_grid, scatter
from semaug.report.charts.rows import rows
from semaug.report.charts.style import COLOURS, INK, RULE, SOFT, Series, percent, plain, slots, swatch, to_png, to_svg

__all__ = [
    "COLOURS",
    "INK",
    "RULE",
    "SOFT",
    "LineChart",
    "Panel",
    "Photo",
    "PhotoBlock",
    "Series",
    "confusion_matrix",
    "lines",
    "percent",
    "photo_grid",
    "plain",
    "rows",
    "scatter",
    "slots",
    "swatch",
    "to_png",
    "to_svg",
]
