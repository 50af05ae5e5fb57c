"""How often an augmentation of images destroys the only cue, measured on the embedded birds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semaug.data.destruction import LEFT, Destruction, measure
from semaug.report.charts import Series, percent, rows, to_png, to_svg
from semaug.report.figures.figure import Figure, fragment
from semaug.report.html import chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Chart


def destruction_bars(measured: Sequence[Destruction]) -> "Chart":
    """Draw the share of images that lose their only cue, with standard errors.

    Args:
        measured: The measurements.

    Returns:
        The chart.
    """
    shares, errors = [row.share for row in measured], [row.standard_error for row in measured]
    series = Series("", 1, shares, spread=errors, texts=[f"{100 * share:.1f} %" for share in shares])
    return rows([row.name for row in measured], [series], text=percent, x_label="images that lose their only cue")


def destruction_chart(num_species: int = 20, per_species: int = 20, *, seed: int = 0) -> Figure:
    """Draw how often each augmentation destroys the only cue; see :mod:`semaug.data.destruction` for the measurement.

    Numbers, by augmentation: `share` and `standard_error`.

    Args:
        num_species: Number of species.
        per_species: Images of each species.
        seed: Seed of the drawings and augmentations.

    Returns:
        The figure.
    """
    measured = sorted(measure(num_species, per_species, seed), key=lambda row: -row.share)
    numbers: dict[str, Any] = {
        "pairs": measured[0].count,
        "seed": seed,
        "augmentations": {row.name: {"share": row.share, "standard_error": row.standard_error} for row in measured},
    }
    worst = measured[0]
    caption = (
        f"How often an augmentation of the image destroys the only trait in which two look-alike species differ, on "
        f"{worst.count} pairs of drawn birds: most often {worst.name} ({100 * worst.share:.1f} %). The cue is "
        f"destroyed when less than {100 * LEFT:.0f} % of the difference between an image and its look-alike is left "
        "after both were augmented alike. Semantic augmentation does not change pixels. Lines are standard errors."
    )
    drawn, title = destruction_bars(measured), "What augmentation of images destroys"
    html = fragment("destruction.html", rows=measured, chart=chart(drawn, title))
    return Figure("destruction", title, caption, numbers, to_png(drawn), to_svg(drawn, title), html)
