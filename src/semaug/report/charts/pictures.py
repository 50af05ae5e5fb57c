"""Scatter plots, the confusion matrix and grids of photos."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from semaug.report.charts.style import CHARACTER, COLOURS, INK, MARKERS, SOFT, add_legend, panels, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED_CLASSES = 40  # a confusion matrix of more classes has no names and counts
_PIXELS = 400  # a confusion matrix of more classes has several in a cell


@dataclass(frozen=True, eq=False)
class Panel:
    """One scatter plot.

    Args:
        title: Heading.
        subtitle: Line below it.
        places: Coordinates (N, 2).
        labels: Class of each point.
        images: Number of the image of each point.
        augmented: Whether each point is an augmented feature, which is drawn hollow.
    """

    title: str
    subtitle: str
    places: npt.NDArray[np.float64]
    labels: Sequence[int]
    images: Sequence[int]
    augmented: Sequence[bool]


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo of a grid.

    Args:
        picture: Pixels, uint8 (H, W, 3).
        text: Caption.
        file: Name of the image.
        good: True for a solid blue frame, False for a dashed orange one, None for no frame.
    """

    picture: npt.NDArray[np.uint8]
    text: str
    file: str
    good: bool | None = None


@dataclass(frozen=True, eq=False)
class PhotoBlock:
    """A block of a grid of photos.

    Args:
        title: Heading, or empty.
        query: A larger photo on the left, or None.
        rows: Label, note and photos of each row.
    """

    title: str
    query: Photo | None
    rows: Sequence[tuple[str, str, Sequence[Photo]]]


@style()
def scatter(plots: Sequence[Panel], classes: Sequence[str], *, titles: bool = True) -> "Figure":
    """Draw scatter plots side by side; colour and marker show the class.

    The points of class c have the SVG id ``points-P-c-0`` in plot P, augmented ones ``points-P-c-1``.

    Args:
        plots: The plots.
        classes: Names of the classes.
        titles: Whether to draw titles and a legend.

    Returns:
        The figure.
    """
    from matplotlib.lines import Line2D

    columns = 2 if len(plots) == 4 else min(3, len(plots))
    figure, axes = panels(len(plots), columns, (3.8, 3.8), (0.1, 0.1, 0.5 * titles + 0.05, 0.1), 0.3 * titles)
    for p, (own, plot) in enumerate(zip(axes, plots, strict=True)):
        own.set(xticks=[], yticks=[])  # distances in a t-SNE plane have no unit
        own.set_aspect("equal", adjustable="datalim")
        own.spines[:].set_visible(titles)
        if titles:
            own.set_title(plot.title, pad=19)
            own.text(0, 1.02, plot.subtitle, transform=own.transAxes, color=SOFT, va="bottom")
        labels, augmented = np.asarray(plot.labels), np.asarray(plot.augmented, dtype=bool)
        for c in range(len(classes)):
            colour, marker = COLOURS[c % 8], MARKERS[c % 8]
            size = {"*": 62, "P": 40, "X": 40}.get(marker, 30)
            hollow = {"s": 0.6 * size, "facecolors": "none", "edgecolors": colour, "linewidths": 0.8, "alpha": 0.8}
            solid = {"s": size, "facecolors": colour, "edgecolors": "white", "linewidths": 0.6}
            for kind, look in ((1, hollow), (0, solid)):  # originals above augmented features
                x, y = plot.places[(labels == c) & (augmented == kind)].T
                own.scatter(x, y, marker=marker, gid=f"points-{p}-{c}-{kind}", zorder=3 - kind, **look)
    if titles:
        handles = [
            Line2D([], [], ls="", marker=MARKERS[c % 8], ms=6.5, mew=0, color=COLOURS[c % 8], label=name)
            for c, name in enumerate(classes)
        ]
        if any(any(plot.augmented) for plot in plots):
            handles.append(Line2D([], [], ls="", marker="o", ms=6, color=SOFT, label="original feature"))
            handles.append(Line2D([], [], ls="", marker="o", ms=6, mfc="none", mec=SOFT, label="augmented feature"))
        add_legend(figure, handles, 2 * columns)
    return figure


@style()
def confusion_matrix(names: Sequence[str], entries: Sequence[tuple[int, int, int]]) -> "Figure":
    """Draw how often each class was taken for each other one, as shares of the images of each class.

    Args:
        names: Names of the classes; up to 40 are shown, more are numbered.
        entries: True class, predicted class and number of images of each cell that is not zero.

    Returns:
        The figure: right answers are blue, wrong ones orange.
    """
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    named, count = len(names) <= NAMED_CLASSES, len(names)
    true, predicted, images = np.array(entries).T
    share = images / np.bincount(true, images, count)[true]
    side = min(count, _PIXELS)
    cells = np.ones((side, side, 4))
    norm = PowerNorm(0.6, -0.15, 1)  # the smallest shares are visible
    for right, colours in ((False, "Oranges"), (True, "Blues")):
        own = np.flatnonzero((true == predicted) == right)
        own = own[np.argsort(share[own], kind="stable")]  # the largest share of a cell counts
        cells[true[own] * side // count, predicted[own] * side // count] = matplotlib.colormaps[colours](
            norm(share[own])
        )
    size = max(1.6, 0.26 * count) if named else 5.5
    shown = [name if len(name) <= 24 else f"{name[:23]}…" for name in names] if named else []
    room = 0.4 + CHARACTER * max(map(len, shown), default=2)
    figure, [axes] = panels(1, 1, (size, size), (room, 0.9, 0.1, room))
    axes.imshow(cells, interpolation="none", extent=(0, count, count, 0))
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    axes.set_xlabel("predicted class", color=INK)
    axes.set_ylabel("true class", color=INK)
    if named:
        places = np.arange(count) + 0.5
        axes.set_xticks(places, shown, rotation=90, size=7.5)
        axes.set_yticks(places, shown, size=7.5)
        for x, y, number, part in zip(predicted, true, images, share, strict=True):
            colour = "white" if part > 0.45 else INK
            axes.text(x + 0.5, y + 0.5, str(number), ha="center", va="center", size=7, color=colour)
    height = min(1.2, 0.4 * size)
    for k, (colours, label) in enumerate((("Blues", "right"), ("Oranges", "wrong"))):
        place = ((room + size + 0.2 + 0.5 * k) / (room + size + 1.1), 1 - (0.3 + height) / (size + room + 0.1))
        scale = figure.add_axes((*place, 0.12 / (room + size + 1.1), height / (size + room + 0.1)))
        figure.colorbar(
            ScalarMappable(norm, colours), scale, ticks=[0, 0.25, 1], format=lambda v, _: f"{100 * v:.0f} %"
        )
        scale.set_ylim(0, 1)
        scale.set_title(label, size=8, weight="normal", color=SOFT)
        scale.tick_params(labelsize=6.5, length=2)
    return figure


@style()
def photo_grid(blocks: Sequence[PhotoBlock]) -> "Figure":
    """Draw blocks of rows of photos, two blocks side by side.

    Args:
        blocks: The blocks, with the same number of rows.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    side, step, line = 0.9, 1.0, 1.24  # inches, of a photo, from photo to photo and from row to row
    longest = max(len(photos) for block in blocks for *_, photos in block.rows)
    start = 1.47 if blocks[0].query else 0.0  # of the labels
    head = 0.4 if any(block.title for block in blocks) else 0.0
    block_width = start + 1.5 + longest * step + 0.3
    block_height = head + max(len(blocks[0].rows) * line, 1.75 if blocks[0].query else 0.0) + 0.15
    width, height = min(2, len(blocks)) * block_width, -(-len(blocks) // 2) * block_height
    figure = Figure(figsize=(width, height), facecolor="white")

    def write(x: float, y: float, text: str, **look: Any) -> None:
        figure.text(x / width, 1 - y / height, text, va="top", linespacing=1.15, **look)

    def show(photo: Photo, x: float, y: float, size: float) -> None:
        axes = figure.add_axes((x / width, 1 - (y + size) / height, size / width, size / height))
        axes.set_axis_off()
        axes.imshow(photo.picture, interpolation="antialiased", aspect="auto")
        if photo.good is not None:
            look: dict[str, Any] = {"ec": COLOURS[0]} if photo.good else {"ec": COLOURS[1], "ls": (0, (2.2, 1.1))}
            axes.add_patch(Rectangle((0, 0), 1, 1, transform=axes.transAxes, fill=False, lw=3, clip_on=False, **look))
        write(x + size / 2, y + size + 0.06, _wrapped(photo.text, 17), ha="center", size=6.5, color=SOFT)

    for i, block in enumerate(blocks):
        x, y = i % 2 * block_width, i // 2 * block_height
        write(x, y, _wrapped(block.title, 60), size=10, weight="bold")
        y += head
        if block.query:
            show(block.query, x, y, 1.25)
        for label, note, photos in block.rows:
            lines = _wrapped(label, 18)
            write(x + start, y + 0.1, lines, size=9, weight="bold")
            write(x + start, y + 0.28 + 0.15 * lines.count("\n"), _wrapped(note, 24), size=7, color=SOFT)
            for k, photo in enumerate(photos):
                show(photo, x + start + 1.5 + k * step, y, side)
            y += line
    return figure


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width)) or text
