"""The interactive form of scatter panels: points that show their image when pointed at, focused or tapped."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from semaug.figures.drawing import Panel
from semaug.figures.figure import fragment
from semaug.report.pictures import data_uri

SIDE, EDGE = 360, 14  # of a panel, and its margin, in units of the view box

# shapes of about the same area around (0, 0), in the order of drawing.MARKERS
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
TRIANGLE = "M0-4.6L4.3 3.2H-4.3Z"


def sprite(thumbnails: npt.NDArray[np.uint8], quality: int = 78) -> tuple[str, int]:
    """All thumbnails in one JPEG inside its own address, row by row, and the number of columns."""
    count, side = thumbnails.shape[:2]
    columns = math.ceil(math.sqrt(count))
    sheet = np.zeros((-(-count // columns) * side, columns * side, 3), dtype=np.uint8)
    for i, picture in enumerate(thumbnails):
        top, left = i // columns * side, i % columns * side
        sheet[top : top + side, left : left + side] = picture
    return data_uri(Image.fromarray(sheet), quality=quality), columns


def scatter_html(
    panels: Sequence[Panel], classes: Sequence[str], thumbnails: npt.NDArray[np.uint8], names: Sequence[str]
) -> str:
    """Panels whose points show their image; the same image is marked in all panels at once."""
    mixed = any(any(panel.augmented) for panel in panels)
    address, columns = sprite(thumbnails)
    return fragment(
        "scatter.html",
        panels=[{"panel": panel, "points": _points(panel, classes, names, mixed)} for panel in panels],
        classes=[{"name": name, "shape": _shape(i, mixed), "place": i % 8} for i, name in enumerate(classes)],
        mixed=mixed,
        triangle=TRIANGLE,
        circle=SHAPES[0],
        sprite=address,
        sheet=columns,
        rows=-(-len(thumbnails) // columns),
        side=SIDE,
    )


def _shape(place: int, mixed: bool) -> str:
    return SHAPES[0] if mixed else SHAPES[place % len(SHAPES)]


def _points(panel: Panel, classes: Sequence[str], names: Sequence[str], mixed: bool) -> list[dict[str, Any]]:
    low, high = panel.places.min(0), panel.places.max(0)
    middle, reach = (low + high) / 2, max(float((high - low).max()), 1e-9)
    scaled = SIDE / 2 + (panel.places - middle) * [1, -1] * (SIDE - 2 * EDGE) / reach
    points = [
        {
            "x": f"{x:.1f}",
            "y": f"{y:.1f}",
            "label": label,
            "place": label % 8,
            "name": classes[label],
            "hint": names[image] + (", augmented" if moved else ""),
            "image": image,
            "augmented": moved,
            "shape": TRIANGLE if moved else _shape(label, mixed),
        }
        for (x, y), label, image, moved in zip(scaled, panel.labels, panel.images, panel.augmented, strict=True)
    ]
    return sorted(points, key=lambda point: not point["augmented"])  # originals above
