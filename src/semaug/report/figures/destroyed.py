"""How often an augmentation of images destroys the only cue, measured on the embedded birds, as bars."""

from typing import Any

from semaug.data.destruction import LEFT, measure
from semaug.report.charts import bar_chart
from semaug.report.figures.drawing import COLOURS, INK, RULE, SOFT, canvas, files
from semaug.report.figures.figure import Figure, fragment


def destruction_chart(num_species: int = 20, per_species: int = 20, *, seed: int = 0) -> Figure:
    """Bars of the share of images whose only cue each augmentation destroys, with standard errors.

    Numbers, by augmentation: `share` and `standard_error`; see :mod:`semaug.data.destruction` for the measurement.
    """
    rows = sorted(measure(num_species, per_species, seed), key=lambda row: -row.share)
    numbers: dict[str, Any] = {
        "pairs": rows[0].count,
        "seed": seed,
        "augmentations": {row.name: {"share": row.share, "standard_error": row.standard_error} for row in rows},
    }
    figure = canvas(8.2, 0.46 * len(rows) + 0.9)
    axes = figure.subplots()
    places = list(range(len(rows)))
    shares = [100 * row.share for row in rows]
    axes.barh(places, shares, height=0.62, color=COLOURS[1])
    for place, row in zip(places, rows, strict=True):
        end = 100 * (row.share + row.standard_error)
        if row.standard_error:
            axes.plot([100 * (row.share - row.standard_error), end], [place, place], color=INK, lw=1.2)
        axes.text(end + 0.8, place, f"{100 * row.share:.1f} %", va="center", fontsize=9, color=INK)
    axes.set_yticks(places, [row.name for row in rows], fontsize=10, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max(10.0, 1.15 * max(shares) + 4))
    axes.set_xlabel("images that lose their only cue, %", fontsize=9, color=SOFT)
    axes.tick_params(axis="x", labelsize=8.5, colors=SOFT, color=RULE)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    png, svg = files(figure)
    worst = rows[0]
    caption = (
        f"How often an augmentation of the image destroys the only trait in which two look-alike species differ, on "
        f"{worst.count} pairs of drawn birds: most often {worst.name} ({100 * worst.share:.1f} %). The cue is "
        f"destroyed when less than {100 * LEFT:.0f} % of the difference between an image and its look-alike is left "
        "after both were augmented alike. Semantic augmentation leaves the pixels alone. Lines are standard errors."
    )
    chart = bar_chart(
        [row.name for row in rows],
        [(1, "destroyed", {row.name: row.share for row in rows})],
        {row.name: row.standard_error for row in rows},
    )
    html = fragment("destruction.html", rows=rows, chart=chart)
    return Figure("destruction", "What augmentation of images destroys", caption, numbers, png, svg, html)
