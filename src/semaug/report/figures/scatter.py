"""Scatter plots of features: a picture, and a page whose points show their images."""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from PIL import Image

from semaug.inference.pictures import data_uri
from semaug.report.canvas import COLOURS, SOFT, add_legend, clean, legend_columns, marker, panels, style, to_svg
from semaug.report.figures.figure import fragment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


@dataclass(frozen=True, eq=False)
class Block:
    """Scatter plots of the same images."""

    title: str  # may be empty
    plots: Sequence[Panel]
    classes: Sequence[str]

    @property
    def columns(self) -> int:
        """Number of plots side by side."""
        return 2 if len(self.plots) == 4 else min(3, len(self.plots))


@style()
def scatter(blocks: Sequence[Block]) -> "Figure":
    """Draw blocks of scatter plots; colour and marker show the class, and each block has its legend."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    side = 3.8 if len(blocks) == 1 else 3.0  # inches
    across = 2 if len(blocks) > 1 and blocks[0].columns < 3 else 1
    width, cell, head = blocks[0].columns * (side + 0.2), side + 0.6, 0.3 * any(block.title for block in blocks)
    handles = []
    for block in blocks:
        marks = [(marker(c), COLOURS[c % 8], COLOURS[c % 8], clean(name)) for c, name in enumerate(block.classes)]
        if any(any(plot.augmented) for plot in block.plots):
            marks += [("o", SOFT, SOFT, "original feature"), ("o", "none", SOFT, "augmented feature")]
        handles.append([Line2D([], [], ls="", marker=m, ms=6.5, mfc=f, mec=e, label=text) for m, f, e, text in marks])
    heights = []
    for block, own in zip(blocks, handles, strict=True):
        columns = legend_columns([str(handle.get_label()) for handle in own], 2 * block.columns, width)
        heights.append(head + -(-len(block.plots) // block.columns) * cell + 0.2 * -(-len(own) // columns) + 0.4)
    rows = [max(heights[i : i + across]) for i in range(0, len(blocks), across)]
    total = across * (width + 0.4) - 0.4, sum(rows)
    figure = Figure(figsize=total, facecolor="white")
    for i, (block, own) in enumerate(zip(blocks, handles, strict=True)):
        left, top = i % across * (width + 0.4), total[1] - sum(rows[: i // across])
        figure.text((left + 0.1) / total[0], top / total[1], clean(block.title), va="top", size=13, weight="bold")
        top -= head
        for k, plot in enumerate(block.plots):
            x, y = left + k % block.columns * (side + 0.2) + 0.1, top - k // block.columns * cell - cell + 0.1
            axes = figure.add_axes((x / total[0], y / total[1], side / total[0], side / total[1]))
            axes.set_title(clean(plot.title), pad=19)
            axes.text(0, 1.02, plot.subtitle, transform=axes.transAxes, color=SOFT, va="bottom")
            axes.spines[:].set_visible(True)
            _draw_points(axes, plot, len(block.classes))
        bottom = top - -(-len(block.plots) // block.columns) * cell
        add_legend(figure, own, 2 * block.columns, (left + width / 2, bottom, width))
    return figure


def _draw_points(axes: "Axes", plot: Panel, classes: int) -> None:
    """Draw the points of a plot; the SVG id of a group of points is ``points-CLASS-AUGMENTED``."""
    axes.set(xticks=[], yticks=[])  # distances in a t-SNE plane have no unit
    axes.set_aspect("equal", adjustable="datalim")
    for c in range(classes):
        colour, shape = COLOURS[c % 8], marker(c)
        size = {"*": 62, "P": 40, "X": 40}.get(shape, 30)
        hollow = {"s": 0.6 * size, "facecolors": "none", "edgecolors": colour, "linewidths": 0.8, "alpha": 0.8}
        solid = {"s": size, "facecolors": colour, "edgecolors": "white", "linewidths": 0.6}
        for augmented, look in ((1, hollow), (0, solid)):
            x, y = plot.places[plot.members(c, bool(augmented))].T
            own: dict[str, Any] = {"gid": f"points-{c}-{augmented}", "zorder": 3 - augmented, **look}
            axes.scatter(x, y, marker=shape, **own)


def scatter_fragment(block: Block, thumbnails: npt.NDArray[np.uint8], names: Sequence[str]) -> str:
    """Render scatter plots, for a page, whose points show their image when pointed at, focused or tapped.

    `thumbnails` (N, side, side, 3) and `names` are those of the images.
    """
    # all thumbnails in one picture, of which the page shows a part
    count, side = thumbnails.shape[:2]
    columns = math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    tiles = np.zeros((rows * columns, side, side, 3), dtype=np.uint8)
    tiles[:count] = thumbnails
    sheet = tiles.reshape(rows, columns, side, side, 3).swapaxes(1, 2).reshape(rows * side, columns * side, 3)
    return fragment(
        "scatter.html",
        heading=block.title,
        panels=[(plot, Markup(_interactive(plot, block.classes, names))) for plot in block.plots],
        classes=block.classes,
        augmented=any(any(plot.augmented) for plot in block.plots),
        sheet={"uri": data_uri(Image.fromarray(sheet), quality=78), "columns": columns, "rows": rows},
    )


@style()
def _interactive(plot: Panel, classes: Sequence[str], names: Sequence[str]) -> str:
    """The SVG of a scatter plot without title, frame and legend, with the data of each point for the script."""
    figure, [axes] = panels(1, 1, (3.8, 3.8), (0.1, 0.1, 0.05, 0.1))
    axes.spines[:].set_visible(False)
    _draw_points(axes, plot, len(classes))
    svg = to_svg(figure, "").replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    root = ElementTree.fromstring(svg)
    label = f"{clean(plot.title)}: {len(plot.places)} features; use the arrow keys to go from point to point"
    root.attrib |= {"class": "cloud", "role": "group", "aria-label": label}
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
                label = f"{clean(name)}, {hint}"
                mark.attrib |= {"class": "point", "role": "img", "tabindex": tabindex, "aria-label": label}
                mark.attrib |= {"data-class": str(c), "data-name": clean(name), "data-hint": hint}
                mark.set("data-image", str(plot.images[i]))
                tabindex = "-1"
    return ElementTree.tostring(root, encoding="unicode")
