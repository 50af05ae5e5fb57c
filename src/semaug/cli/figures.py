"""`semaug figures`: draw the pictures of the paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from semaug.cli.common import Command, choose_device


@dataclass(frozen=True)
class Figures(Command):
    """Draw the pictures of the paper from finished runs: PNG, SVG for vector graphics, and an interactive HTML page.

    neighbours: real images nearest to augmented features, for each run. tsne: features of look-alike classes, one panel
    per run. augmentations: original and augmented features of Random Erasing, RandAugment and ours, for each run.
    diagnostics: Σ during training. confusions: the most confused classes of each run, with photos. parts: the parts of
    images that a P2P-Net uses. destruction: how often an augmentation of images destroys the only cue, measured on the
    embedded birds; it needs no run.
    """

    figure: Annotated[
        Literal["neighbours", "tsne", "augmentations", "diagnostics", "confusions", "parts", "destruction"],
        tyro.conf.Positional,
    ]
    """What to draw."""
    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run directories. NAME=RUN gives a run a name in the figure."""
    output: Path = Path("figures")
    """The folder to write to."""
    group: str | None = None
    """Name of the group of look-alike classes (tsne, augmentations). Default: the largest group."""
    groups: Path | None = None
    """CSV file with the columns class and group. Default: the last words of the classes' names are the groups."""
    covariance: Literal["run", "classwise"] = "run"
    """The run's own Σ, or the class-wise Σ of its final features (neighbours, augmentations)."""
    strength: float | None = None
    """λ (neighbours, augmentations). Default: that of the end of training."""
    seed: int = 0
    """Seed of all random numbers."""
    device: str | None = None
    """Where to compute. Default: cuda if available, else cpu."""

    def run(self) -> None:
        from semaug.report.figures.command import draw
        from semaug.report.figures.figure import write

        names = ("group", "groups", "covariance", "strength", "seed")
        options = {name: getattr(self, name) for name in names} | {"device": choose_device(self.device)}
        for figure in draw(self.figure, self.runs, options):
            files = write(figure, self.output)
            print(figure.caption)
            print("\n".join(map(str, files)))
