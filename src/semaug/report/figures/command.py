"""From the words of the command line to figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from semaug.report.figures.augmented import augmentations
from semaug.report.figures.destroyed import destruction_chart
from semaug.report.figures.embedding import tsne
from semaug.report.figures.figure import Figure
from semaug.report.figures.mistakes import confusions
from semaug.report.figures.nearest import neighbours
from semaug.report.figures.parts import parts
from semaug.report.figures.training import diagnostics
from semaug.report.reading import read_runs
from semaug.util.errors import SemaugError
from semaug.util.progress import Progress

# which of the options each figure knows
_KNOWN = {
    "neighbours": ("covariance", "strength", "seed", "device"),
    "tsne": ("group", "groups", "seed", "device"),
    "augmentations": ("group", "groups", "covariance", "strength", "seed", "device"),
    "diagnostics": (),
    "confusions": ("seed", "device"),
    "parts": ("seed", "device"),
    "destruction": ("seed",),
}


def draw(kind: str, named: Sequence[str], options: Mapping[str, Any]) -> list[Figure]:
    """The figures of a kind: one of all runs, or one of each run.

    Runs are given as RUN, which is then named as in the report, or as NAME=RUN.
    """
    known = {name: value for name, value in options.items() if name in _KNOWN[kind]}
    if kind == "destruction":
        if named:
            raise SemaugError("destruction is measured on the embedded birds and takes no run directory")
        return [destruction_chart(**known)]
    if not named:
        raise SemaugError("name at least one run directory")
    names, paths = zip(*map(_name_and_path, named), strict=True)
    if len({path.resolve() for path in paths}) < len(paths):
        raise SemaugError("a run directory is named twice")
    labels = [name or run.label for name, run in zip(names, read_runs(paths), strict=True)]
    if len(set(labels)) < len(labels):
        raise SemaugError(f"two runs have the same name: {', '.join(labels)}")
    runs = dict(zip(labels, paths, strict=True))
    if kind == "diagnostics":
        return [diagnostics(runs)]
    with Progress().task("looking at images", 0) as advance:
        if kind in ("neighbours", "tsne"):
            return [(neighbours if kind == "neighbours" else tsne)(runs, progress=advance, **known)]
        by_kind: dict[str, Callable[..., Figure]]
        by_kind = {"augmentations": augmentations, "confusions": confusions, "parts": parts}
        each = by_kind[kind]
        figures = {label: each(path, progress=advance, **known) for label, path in runs.items()}
    return [figure if len(runs) == 1 else _named(figure, label) for label, figure in figures.items()]


def _name_and_path(text: str) -> tuple[str, Path]:
    """NAME=RUN; a folder that has such a name is meant by it."""
    name, sign, path = text.partition("=")
    return (name, Path(path)) if sign and not Path(text).exists() else ("", Path(text))


def _named(figure: Figure, label: str) -> Figure:
    """One of several figures of a kind."""
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in label)
    return replace(figure, name=f"{figure.name}-{safe}", title=f"{figure.title}: {label}")
