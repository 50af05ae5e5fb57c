"""Figures of finished runs, the paper's and others: each function returns a :class:`Figure`.

To add a figure, write such a function and add a row to :data:`FIGURES`: `semaug figures` then offers it.

| module                                 | subject                                                            |
|----------------------------------------|--------------------------------------------------------------------|
| `neighbours`, `tsne`, `augmentations`  | features: nearest images, look-alike classes, augmented features   |
| `diagnostics`, `confusions`, `parts`   | Σ during training, confused classes, the parts of a P2P-Net         |
| `cam`                                  | class-activation maps                                              |
| `destruction`                          | how often image-level augmentation destroys the only cue           |
| `figure`                               | a figure, its page and its files                                   |
| `runs`, `groups`                       | runs with Σ, features of their images; groups of look-alike classes |

All are deterministic: the same runs, images and seed give the same figure on the same machine.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from semaug.report.figures.augmentations import augmentations
from semaug.report.figures.cam import cam
from semaug.report.figures.confusions import confusions
from semaug.report.figures.destruction import destruction_chart
from semaug.report.figures.diagnostics import diagnostics
from semaug.report.figures.figure import Figure, page, write
from semaug.report.figures.neighbours import neighbours
from semaug.report.figures.parts import parts
from semaug.report.figures.tsne import tsne
from semaug.report.reading import read_runs
from semaug.util.errors import SettingError
from semaug.util.progress import Progress

__all__ = [
    "FIGURES",
    "Figure",
    "FigureKind",
    "FigureName",
    "augmentations",
    "cam",
    "confusions",
    "describe_figures",
    "destruction_chart",
    "diagnostics",
    "draw",
    "neighbours",
    "page",
    "parts",
    "tsne",
    "write",
]


@dataclass(frozen=True)
class FigureKind:
    """A row of the table.

    ``"all"`` is one figure of all runs, which `draw` takes as a mapping from labels to run directories; ``"each"`` is a
    figure of each run, whose directory it takes.
    """

    draw: Callable[..., Figure]  # its keyword arguments are the options of the figure
    runs: Literal["all", "each", "none"]
    summary: str  # what the figure shows, in one line


FIGURES: dict[str, FigureKind] = {
    "neighbours": FigureKind(neighbours, "all", "real images nearest to an augmented feature"),
    "tsne": FigureKind(tsne, "all", "features of groups of look-alike classes, one panel for each run"),
    "augmentations": FigureKind(
        augmentations, "all", "original and augmented features in the network of a run, with its Σ or a second run's"
    ),
    "diagnostics": FigureKind(diagnostics, "all", "Σ during training"),
    "cam": FigureKind(cam, "each", "where the network looks: class-activation maps over photos"),
    "confusions": FigureKind(confusions, "each", "the most confused classes, with photos"),
    "parts": FigureKind(parts, "each", "the parts that a P2P-Net finds in its images"),
    "destruction": FigureKind(
        destruction_chart, "none", "how often image-level augmentation destroys the only cue of a species"
    ),
}
"""All figures by name."""

if TYPE_CHECKING:
    FigureName = str
else:
    FigureName = Literal[tuple(FIGURES)]  # the command line offers exactly the names in the table


def draw(name: str, runs: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> list[Figure]:
    """Draw a figure of runs.

    Args:
        name: A name of :data:`FIGURES`.
        runs: Run directories, each as ``RUN`` or as ``LABEL=RUN``; the label is that of the report by default.
        options: Options; those that the figure does not take are ignored.

    Returns:
        One figure, or one for each run.

    Raises:
        SettingError: If there is no such figure, or the runs are not what it needs.
        SemaugError: If the figure cannot be drawn.
    """
    if name not in FIGURES:
        raise SettingError(f"there is no figure {name!r}; there are {', '.join(FIGURES)}")
    kind = FIGURES[name]
    known = inspect.signature(kind.draw).parameters
    chosen = {option: value for option, value in (options or {}).items() if option in known}
    if kind.runs == "none":
        if runs:
            raise SettingError(f"the figure {name} takes no run directory")
        return [kind.draw(**chosen)]
    if not runs:
        raise SettingError("give at least one run directory")
    named, paths = zip(*map(_label_and_path, runs), strict=True)
    if len({path.resolve() for path in paths}) < len(paths):
        raise SettingError("a run directory appears twice")
    labels = [label or run.label for label, run in zip(named, read_runs(paths), strict=True)]
    if len(set(labels)) < len(labels):
        raise SettingError(f"two runs have the same name: {', '.join(labels)}")
    with Progress().task("computing features", 0) as advance:
        if "progress" in known:
            chosen["progress"] = advance
        if kind.runs == "all":
            return [kind.draw(dict(zip(labels, paths, strict=True)), **chosen)]
        figures = [kind.draw(path, **chosen) for path in paths]
    if len(figures) == 1:
        return figures
    files = [label or path.resolve().name for label, path in zip(named, paths, strict=True)]
    files = files if len(set(files)) == len(files) else labels
    return [
        replace(figure, name=f"{figure.name}-{_safe(file)}", title=f"{figure.title}: {label}")
        for figure, file, label in zip(figures, files, labels, strict=True)
    ]


def describe_figures() -> str:
    """Describe all figures, for the help of the command line."""
    first = "Draw figures of runs, the paper's and others: PNG, SVG (except for photos) and an interactive HTML page."
    return "\n\n".join([first, *(f"{name}: {kind.summary}." for name, kind in FIGURES.items())])


def _label_and_path(text: str) -> tuple[str, Path]:
    """LABEL=RUN, unless a folder has that name."""
    label, sign, path = text.partition("=")
    return (label, Path(path)) if sign and not Path(text).exists() else ("", Path(text))


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
