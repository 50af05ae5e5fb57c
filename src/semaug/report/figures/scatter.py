"""Scatter plots of features: a picture, and a page whose points show their images."""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from semaug.inference.pictures import data_uri
from semaug.report.canvas import COLOURS, MARKERS, SOFT, add_legend, clean, panels, style, to_svg
from semaug.report.figures.figure import fragment

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Panel:
    """One scatter plot."""

    title: str
    subtitle: str
    places: npt.NDArray[np.float64]  # (N, 2)
    labels: Sequence[int]  # class of each point
    images: Sequence[int]  # number of the image of each point
    augmented: Sequence[bool]  # augmented features are hollow

    def members(self, label: int, augmented: bool) -> npt.NDArray[np.intp]:
        """List the points of a class that are augmented or original features."""
        return np.flatnonzero((np.asarray(self.labels) == label) & (np.asarray(self.augmented) == augmented))


@style()
def scatter(plots: Sequence[Panel], classes: Sequence[str], *, titles: bool = True) -> "Figure":
    """Draw scatter plots side by side; colour and marker show the class.

    The SVG id of a group of points is ``points-CLASS-AUGMENTED``. `titles` decides on titles, frames and the legend.
    """
    from matplotlib.lines import Line2D

    columns = 2 if len(plots) == 4 else min(3, len(plots))
    figure, axes = panels(len(plots), columns, (3.8, 3.8), (0.1, 0.1, 0.5 * titles + 0.05, 0.1), 0.3 * titles)
    for own, plot in zip(axes, plots, strict=True):
        own.set(xticks=[], yticks=[])  # distances in a t-SNE plane have no unit
        own.set_aspect("equal", adjustable="datalim")
        own.spines[:].set_visible(titles)
        if titles:
            own.set_title(clean(plot.title), pad=19)
            own.text(0, 1.02, plot.subtitle, transform=own.transAxes, color=SOFT, va="bottom")
        for c in range(len(classes)):
            colour, marker = COLOURS[c % 8], MARKERS[c % 8]
            size = {"*": 62, "P": 40, "X": 40}.get(marker, 30)
            hollow: dict[str, Any] = {
                "s": 0.6 * size,
                "facecolors": "none",
                "edgecolors": colour,
                "linewidths": 0.8,
                "alpha": 0.8,
            }
            solid: dict[str, Any] = {"s": size, "facecolors": colour, "edgecolors": "white", "linewidths": 0.6}
            for augmented, look in ((1, hollow), (0, solid)):
                x, y = plot.places[plot.members(c, bool(augmented))].T
                own.scatter(x, y, marker=marker, gid=f"points-{c}-{augmented}", zorder=3 - augmented, **look)
    if titles:
        marks = [(MARKERS[c % 8], COLOURS[c % 8], COLOURS[c % 8], clean(name)) for c, name in enumerate(classes)]
        if any(any(plot.augmented) for plot in plots):
            marks += [("o", SOFT, SOFT, "original feature"), ("o", "none", SOFT, "augmented feature")]
        handles = [Line2D([], [], ls="", marker=m, ms=6.5, mfc=f, mec=e, label=text) for m, f, e, text in marks]
        add_legend(figure, handles, 2 * columns)
    return figure


def scatter_fragment(
    plots: Sequence[Panel], classes: Sequence[str], thumbnails: npt.NDArray[np.uint8], names: Sequence[str]
) -> str:
    """Render scatter plots whose points show their image when pointed at, focused or tapped.

    Args:
        plots: The plots.
        classes: Names of the classes.
        thumbnails: Small pictures, uint8 (N, side, side, 3).
        names: Name of each image.

    Returns:
        A part of a page.
    """
    from markupsafe import Markup

    # all thumbnails in one picture, of which the page shows a part
    count, side = thumbnails.shape[:2]
    columns = math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    tiles = np.zeros((rows * columns, side, side, 3), dtype=np.uint8)
    tiles[:count] = thumbnails
    sheet = tiles.reshape(rows, columns, side, side, 3).swapaxes(1, 2).reshape(rows * side, columns * side, 3)
    return fragment(
        "scatter.html",
        panels=[(plot, Markup(_interactive(plot, classes, names))) for plot in plots],
        classes=classes,
        augmented=any(any(plot.augmented) for plot in plots),
        sheet={"uri": data_uri(Image.fromarray(sheet), quality=78), "columns": columns, "rows": rows},
    )


def _interactive(plot: Panel, classes: Sequence[str], names: Sequence[str]) -> str:
    """The SVG of a scatter plot with the data of each point for the script."""
    svg = to_svg(scatter([plot], classes, titles=False), "").replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    root = ElementTree.fromstring(svg)
    root.attrib |= {"class": "cloud", "role": "group"}
    root.set(
        "aria-label", f"{clean(plot.title)}: {len(plot.places)} features; use the arrow keys to go from point to point"
    )
    groups = {group.get("id"): group for group in root.iter("g")}
    tabindex = "0"
    for augmented in (1, 0):
        for c, name in enumerate(classes):
            group, members = groups.get(f"points-{c}-{augmented}"), plot.members(c, bool(augmented)).tolist()
            if group is None or not members:
                continue
            for shape in group.findall("defs/path"):  # so that each point can have a style of its own
                shape.attrib = {"id": shape.attrib["id"], "d": shape.attrib["d"]}
            marks = [mark for mark in group.iter() if mark.tag == "use" or (mark.tag == "path" and not mark.get("id"))]
            for mark, i in zip(marks, members, strict=True):
                hint = clean(names[plot.images[i]]) + (", augmented" if augmented else "")
                mark.attrib |= {
                    "class": "point",
                    "role": "img",
                    "tabindex": tabindex,
                    "aria-label": f"{clean(name)}, {hint}",
                }
                mark.attrib |= {"data-class": str(c), "data-name": clean(name), "data-hint": hint}
                mark.set("data-image", str(plot.images[i]))
                tabindex = "-1"
    return ElementTree.tostring(root, encoding="unicode")
