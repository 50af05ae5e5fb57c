"""The interactive form of scatter panels: points that show their image when pointed at, focused or tapped."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from semaug.inference.pictures import data_uri
from semaug.report.charts import SHAPES  # in the order of drawing.MARKERS
from semaug.report.figures.drawing import Panel
from semaug.report.figures.figure import fragment

SIDE, EDGE = 360, 14  # of a panel, and its margin, in units of the view box


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
    address, columns = sprite(thumbnails)
    return fragment(
        "scatter.html",
        panels=[{"panel": panel, "points": _points(panel, classes, names)} for panel in panels],
        classes=[{"name": name, "shape": _shape(i), "place": i % 8} for i, name in enumerate(classes)],
        mixed=any(any(panel.augmented) for panel in panels),
        circle=SHAPES[0],
        sprite=address,
        sheet=columns,
        rows=-(-len(thumbnails) // columns),
        side=SIDE,
    )


def _shape(place: int) -> str:
    return SHAPES[place % len(SHAPES)]


def _points(panel: Panel, classes: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
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
            "shape": _shape(label),
        }
        for (x, y), label, image, moved in zip(scaled, panel.labels, panel.images, panel.augmented, strict=True)
    ]
    return sorted(points, key=lambda point: not point["augmented"])  # originals above
