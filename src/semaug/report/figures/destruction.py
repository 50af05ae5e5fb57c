"""How often image-level augmentation destroys the only cue, measured on the embedded birds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from semaug.data.destruction import LEFT, Destruction, measure
from semaug.report.canvas import to_png, to_svg
from semaug.report.charts import Series, percent, rows
from semaug.report.figures.figure import Figure, fragment
from semaug.report.figures.photos import Photo

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Chart


def _bars(measured: Sequence[Destruction]) -> "Chart":
    shares, errors = [row.share for row in measured], [row.standard_error for row in measured]
    series = Series("", 1, shares, spread=errors, texts=[f"{100 * share:.1f} %" for share in shares])
    return rows([row.name for row in measured], [series], text=percent, x_label="images that lose their only cue")


def _photos(row: Destruction) -> list[Photo]:
    """An image, its look-alike, with a circle around the only difference, and the augmented image."""
    left, top, right, bottom = row.example.pair.box
    radius = max(right - left, bottom - top) / 2 + 5
    first, second = (value.replace("absent", "none") for value in row.example.pair.values)

    def circled(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        image, scale = Image.fromarray(pixels).resize((192, 192), Image.Resampling.BILINEAR), 192 / len(pixels)
        corners = [(left + right) / 2 - radius, (top + bottom) / 2 - radius]
        corners += [(left + right) / 2 + radius, (top + bottom) / 2 + radius]
        for width, colour in ((7, "black"), (3, "white")):
            ImageDraw.Draw(image).ellipse([scale * corner for corner in corners], outline=colour, width=width)
        return np.asarray(image)

    outcome = "destroyed" if row.example.destroyed else "still there"
    return [
        Photo(circled(row.example.original), f"image, {row.example.pair.trait.replace('_', ' ')}: {first}", "image"),
        Photo(circled(row.example.look_alike), f"look-alike: {second}", "look-alike"),
        Photo(row.example.augmented, f"augmented: the cue is {outcome}", "augmented image"),
    ]


def destruction_fragment(measured: Sequence[Destruction]) -> str:
    """Render the measurement as a part of a page: bars, and an example of each augmentation."""
    from semaug.report.html import chart

    bars = chart(_bars(measured), "Share of images that lose their only cue, by augmentation")
    return fragment("destruction.html", bars=bars, examples=[(row, _photos(row)) for row in measured])


def destruction_chart(num_species: int = 20, per_species: int = 20, *, seed: int = 0) -> Figure:
    """Draw how often each augmentation destroys the only cue; see :mod:`semaug.data.destruction` for the measurement.

    Numbers, by augmentation: `share` and `standard_error`.

    Args:
        num_species: Number of species.
        per_species: Images of each species.
        seed: Seed of the drawings and augmentations.
    """
    measured = sorted(measure(num_species, per_species, seed), key=lambda row: -row.share)
    worst, title = measured[0], "What image-level augmentation destroys"
    numbers: dict[str, Any] = {
        "pairs": worst.count,
        "seed": seed,
        "augmentations": {row.name: {"share": row.share, "standard_error": row.standard_error} for row in measured},
    }
    caption = (
        f"How often an image-level augmentation destroys the only trait in which two look-alike species differ, on "
        f"{worst.count} pairs of drawn birds: most often {worst.name} ({100 * worst.share:.1f} %). The cue is "
        f"destroyed when less than {100 * LEFT:.0f} % of the difference between an image and its look-alike is left "
        "after both were augmented alike. Semantic augmentation does not change pixels. Lines are standard errors."
    )
    drawn, html = _bars(measured), destruction_fragment(measured)
    return Figure("destruction", title, caption, numbers, to_png(drawn), to_svg(drawn, title), html)
