"""Geometry of a confusion matrix."""

from dataclasses import dataclass

from semaug.report.charts import Tick, shortened, text_width
from semaug.report.reading import ReportedRun, number

EDGES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # shares at which the shade changes
NAMED = 40  # classes up to which rows and columns have names, and cells their counts
NAME_ROOM = 200  # for the name of a class
WIDEST = 2000  # pixels: with more classes than that, cells of at least a pixel overlap
_MARGIN = 14


@dataclass(frozen=True)
class Shade:
    """All cells of one colour, as one SVG path."""

    kind: str  # "right" on the diagonal, "wrong" off it
    level: int
    path: str


@dataclass(frozen=True)
class Count:
    x: float
    y: float
    text: str
    strong: bool  # on a dark cell


@dataclass(frozen=True)
class Matrix:
    """A heat map: rows are true classes, columns predicted ones."""

    side: float
    cell: float
    left: float
    top: float
    width: float
    height: float
    shades: list[Shade]
    counts: list[Count]
    rows: list[Tick]
    columns: list[Tick]


def confusion_matrix(run: ReportedRun) -> Matrix | None:
    """The heat map of a run's evaluation; None if the run has none."""
    names = [str(row.get("name")) for row in run.evaluation.get("classes") or [] if isinstance(row, dict)]
    entries = [entry for entry in run.evaluation.get("confusion") or [] if _is_entry(entry, len(names))]
    if not entries:
        return None
    cell = max(18.0, 100 / len(names)) if len(names) <= NAMED else max(600 / len(names), min(1.0, WIDEST / len(names)))
    drawn = max(cell, 1.0)
    images: dict[int, float] = {}
    for true, _, count in entries:
        images[true] = images.get(true, 0) + count
    paths: dict[tuple[str, int], list[str]] = {}
    counts = []
    for true, predicted, count in entries:
        share = count / images[true]
        level = next(i for i, edge in enumerate(EDGES) if share <= edge + 1e-9)
        kind = "right" if true == predicted else "wrong"
        path = f"M{predicted * cell:.2f} {true * cell:.2f}h{drawn:.2f}v{drawn:.2f}h-{drawn:.2f}z"
        paths.setdefault((kind, level), []).append(path)
        if len(names) <= NAMED:
            counts.append(Count((predicted + 0.5) * cell, (true + 0.5) * cell, f"{count}", level >= 3))
    shades = [Shade(kind, level, "".join(parts)) for (kind, level), parts in sorted(paths.items())]
    ticks, room = _ticks(names, cell)
    side, left = cell * len(names), room + _MARGIN
    return Matrix(side, cell, left, 4, left + side + 4, side + room + _MARGIN + 8, shades, counts, ticks, ticks)


def _is_entry(entry: object, classes: int) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 3
        and all(isinstance(value, int) for value in entry)
        and all(0 <= place < classes for place in entry[:2])
        and (number(entry[2]) or 0) > 0
    )


def _ticks(names: list[str], cell: float) -> tuple[list[Tick], float]:
    """Labels along an axis and the room that they need: names of few classes, else numbers of some."""
    if len(names) <= NAMED:
        texts = [shortened(name, NAME_ROOM) for name in names]
        return [Tick((i + 0.5) * cell, text) for i, text in enumerate(texts)], 10 + max(map(text_width, texts))
    step = next(step for step in (20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000) if len(names) / step <= 12)
    return [Tick((i - 0.5) * cell, str(i)) for i in range(step, len(names) + 1, step)], 38
