"""Drawing with matplotlib: colours, markers, and pictures as PNG and SVG, the same on every run."""

import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Okabe and Ito's colours for all readers, the yellow and the light ones darkened for a white ground; the shapes differ
# too. templates/fragment.css has the same order.
COLOURS = ("#0072b2", "#d55e00", "#00805f", "#9a4c95", "#8a6d00", "#4d5560", "#3aa0dc", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, SOFT, RULE = "#1c1e21", "#5a6069", "#d9dce1"
DASHES = ("-", (0, (6, 2)), (0, (3, 1.5)), (0, (6, 2, 1, 2)), (0, (1.5, 1.5)), (0, (9, 2)))

Points = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Panel:
    """One scatter plot: places (N, 2), the class of each, and whether each is an augmented feature."""

    title: str
    subtitle: str
    places: Points
    labels: Sequence[int]  # places in the list of classes
    images: Sequence[int]  # the thumbnail of each point
    augmented: Sequence[bool]


def canvas(width: float, height: float) -> "Canvas":
    """An empty figure of so many inches, not bound to any window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")


def files(figure: "Canvas", vector: bool = True) -> tuple[bytes, str | None]:
    """The figure as PNG and SVG, without a date in them; a vector figure is cut out to just what was drawn."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with (
        matplotlib.rc_context({"svg.hashsalt": "semaug", "svg.fonttype": "path", "path.simplify": True}),
        _missing_letters_told_once(),
    ):
        raster = io.BytesIO()
        if not vector:
            figure.savefig(raster, format="png", metadata={"Software": None})
            return raster.getvalue(), None
        drawn = io.StringIO()
        figure.savefig(raster, format="png", metadata={"Software": None}, bbox_inches="tight", pad_inches=0.15)
        metadata = {"Date": None, "Creator": None}
        figure.savefig(drawn, format="svg", metadata=metadata, bbox_inches="tight", pad_inches=0.15)
    return raster.getvalue(), drawn.getvalue()


@contextmanager
def _missing_letters_told_once() -> Iterator[None]:
    """One warning for all letters that matplotlib's font lacks, instead of one for each, time and again."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    letters: dict[str, None] = {}
    for warning in caught:
        missing = re.match(r"Glyph (\d+) .* missing from font", str(warning.message))
        if missing is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        else:
            letters[chr(int(missing[1]))] = None
    if letters:
        shown = "".join(letters)
        warnings.warn(
            f"semaug: the pictures show boxes for {shown}, which their font lacks; the pages do not", stacklevel=4
        )


def wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width)) or text


def plain_axes(axes: "Axes") -> None:
    """A frame without ticks: distances in a t-SNE plane have no unit."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color(RULE)


def scatter(panels: Sequence[Panel], classes: Sequence[str]) -> tuple[bytes, str | None]:
    """Panels side by side with one legend below; augmented features are hollow."""
    from matplotlib.lines import Line2D

    columns = 2 if len(panels) == 4 else min(3, max(1, len(panels)))
    rows = -(-len(panels) // columns)
    legend_columns = min(len(classes), 2 * columns)
    legend_rows = -(-(len(classes) + 2 * any(any(p.augmented) for p in panels)) // legend_columns)
    figure = canvas(4.1 * columns, 4.5 * rows + 0.22 * legend_rows + 0.1)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    mixed = any(any(panel.augmented) for panel in panels)
    for axis, panel in zip(axes, panels, strict=False):
        plain_axes(axis)
        axis.set_box_aspect(1)
        axis.set_aspect("equal", adjustable="datalim")
        axis.set_title(panel.title, fontsize=12, color=INK, loc="left", pad=20, fontweight="bold")
        axis.text(0, 1.02, panel.subtitle, transform=axis.transAxes, fontsize=8.5, color=SOFT, va="bottom")
        labels, moved = np.asarray(panel.labels), np.asarray(panel.augmented, dtype=bool)
        for place in range(len(classes)):
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            size = {"*": 62, "P": 40, "X": 40}.get(marker, 30)
            x, y = panel.places[(labels == place) & moved].T
            axis.scatter(
                x, y, s=0.6 * size, marker=marker, facecolors="none", edgecolors=colour, linewidths=0.8, alpha=0.8
            )
            x, y = panel.places[(labels == place) & ~moved].T
            axis.scatter(x, y, s=size, marker=marker, c=colour, edgecolors="white", linewidths=0.6)
    handles = [
        Line2D([], [], ls="", marker=MARKERS[i % len(MARKERS)], ms=6.5, mec="white", mew=0.5,
               color=COLOURS[i % len(COLOURS)], label=name)
        for i, name in enumerate(classes)
    ]  # fmt: skip
    if mixed:
        handles.append(Line2D([], [], ls="", marker="o", ms=6, color=SOFT, label="original feature"))
        handles.append(Line2D([], [], ls="", marker="o", ms=6, mfc="none", mec=SOFT, label="augmented feature"))
    figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns, frameon=False, fontsize=9,
                  labelcolor=INK, handletextpad=0.2, columnspacing=1.4)  # fmt: skip
    return files(figure)


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo at a place of a sheet, in inches from its upper left corner; `frame` is a colour."""

    left: float
    top: float
    side: float
    picture: npt.NDArray[np.uint8]
    text: str = ""
    frame: str | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Note:
    """Text on a sheet, its upper left corner in inches."""

    left: float
    top: float
    text: str
    size: float = 9
    colour: str = INK
    bold: bool = False


def sheet(width: float, height: float, photos: Sequence[Photo], notes: Sequence[Note]) -> bytes:
    """Photos and texts on a white sheet, as PNG."""
    from matplotlib.patches import Rectangle

    figure = canvas(width, height)
    figure.set_layout_engine("none")
    for photo in photos:
        bounds = (photo.left / width, 1 - (photo.top + photo.side) / height, photo.side / width, photo.side / height)
        axes = figure.add_axes(bounds)
        axes.set_axis_off()
        axes.imshow(photo.picture, interpolation="antialiased", aspect="auto")
        if photo.frame is not None:
            style = (0, (2.2, 1.1)) if photo.dashed else "-"
            axes.add_patch(
                Rectangle((0, 0), 1, 1, transform=axes.transAxes, fill=False, ec=photo.frame, lw=3, ls=style,
                          clip_on=False)
            )  # fmt: skip
        x, y = (photo.left + photo.side / 2) / width, 1 - (photo.top + photo.side + 0.06) / height
        figure.text(x, y, photo.text, ha="center", va="top", fontsize=6.5, color=SOFT, linespacing=1.1)
    for note in notes:
        figure.text(note.left / width, 1 - note.top / height, note.text, ha="left", va="top", fontsize=note.size,
                    color=note.colour, fontweight="bold" if note.bold else "normal", linespacing=1.25)  # fmt: skip
    return files(figure, vector=False)[0]
