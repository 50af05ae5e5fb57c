"""Grids of photos: a picture, and a part of a page."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from semaug.inference.pictures import data_uri
from semaug.report.canvas import COLOURS, SOFT, clean, panels, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo of a grid."""

    picture: npt.NDArray[np.uint8]  # (H, W, 3)
    text: str  # caption
    file: str  # name of the image
    good: bool | None = None  # True: solid blue frame; False: dashed orange frame; None: no frame

    @property
    def uri(self) -> str:
        """The photo as a data URI."""
        return data_uri(Image.fromarray(self.picture), quality=85)


@dataclass(frozen=True, eq=False)
class PhotoBlock:
    """A block of a grid."""

    title: str  # may be empty
    query: Photo | None  # a larger photo on the left
    rows: Sequence[tuple[str, str, Sequence[Photo]]]  # label, note and photos


@style()
def photo_grid(blocks: Sequence[PhotoBlock]) -> "Figure":
    """Draw blocks of photos, two side by side; all have the same number of rows."""
    from matplotlib.patches import Rectangle

    side, step, line = 0.9, 1.0, 1.24  # inches: of a photo, from photo to photo, from row to row
    longest = max(len(photos) for block in blocks for *_, photos in block.rows)
    start = 1.47 if blocks[0].query else 0.0  # of the labels
    head = 0.4 if any(block.title for block in blocks) else 0.0
    block_width = start + 1.5 + longest * step + 0.3
    block_height = head + max(len(blocks[0].rows) * line, 1.75 if blocks[0].query else 0.0) + 0.15
    width, height = min(2, len(blocks)) * block_width, -(-len(blocks) // 2) * block_height
    figure, [axes] = panels(1, 1, (width, height), (0, 0, 0, 0))

    def write(x: float, y: float, text: str, **look: Any) -> None:
        axes.text(x, y, text, va="top", linespacing=1.15, **look)

    def show(photo: Photo, corner: tuple[float, float], size: float) -> None:
        x, y = corner
        axes.imshow(photo.picture, interpolation="antialiased", extent=(x, x + size, y + size, y))
        if photo.good is not None:
            look: dict[str, Any] = {"ec": COLOURS[0]} if photo.good else {"ec": COLOURS[1], "ls": (0, (2.2, 1.1))}
            axes.add_patch(Rectangle((x, y), size, size, fill=False, lw=3, clip_on=False, **look))
        write(x + size / 2, y + size + 0.06, _wrapped(photo.text, 16), ha="center", size=6.5, color=SOFT)

    for i, block in enumerate(blocks):
        x, y = i % 2 * block_width, i // 2 * block_height
        write(x, y, _wrapped(block.title, 60), size=10, weight="bold")
        y += head
        if block.query:
            show(block.query, (x, y), 1.25)
        for label, note, photos in block.rows:
            lines = _wrapped(label, 16)
            write(x + start, y + 0.1, lines, size=9, weight="bold")
            write(x + start, y + 0.28 + 0.15 * lines.count("\n"), _wrapped(note, 24), size=7, color=SOFT)
            for k, photo in enumerate(photos):
                show(photo, (x + start + 1.5 + k * step, y), side)
            y += line
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="auto")
    axes.set_axis_off()
    return figure


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(clean(text), width))
