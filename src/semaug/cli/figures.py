"""`semaug figures`: draw figures of runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from semaug.cli.common import Command, choose_device, show
from semaug.isda.precision import LARGEST_STRENGTH
from semaug.report.figures import FigureName, describe_figures
from semaug.util.ranges import Range, Seed, setting


@dataclass(frozen=True)
class Figures(Command):
    """Draw figures of runs, the paper's and others: PNG, SVG (except for photos) and an interactive HTML page."""

    figure: Annotated[FigureName, tyro.conf.Positional]
    """What to draw."""
    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run directories. LABEL=RUN gives a run a name in the figure."""
    output: Path = setting(Path("figures"), "main")
    """The folder to write to."""
    group: str | None = setting(None, "main")
    """Name of the group of look-alike classes (tsne, augmentations). Default: all groups of more than five
    classes (tsne), or the largest group."""
    groups: Path | None = setting(None, "main")
    """CSV file with the columns class and group. Default: classes whose names end with the same word."""
    covariance: Literal["run", "classwise"] = setting("run", "method")
    """The run's own Σ, or the class-wise Σ of its final features (neighbours, augmentations)."""
    strength: Annotated[float, Range(above=0, most=LARGEST_STRENGTH)] | None = setting(None, "method")
    """Strength λ of augmentation (neighbours, augmentations). Default: that of the end of training."""
    seed: Seed = setting(0, "method")
    """Seed of all random numbers."""
    device: str | None = setting(None, "hardware")
    """Device: cpu, cuda or cuda:N. Default: cuda if available, else cpu."""

    def run(self) -> None:
        from semaug.report.figures import draw, write

        names = ("group", "groups", "covariance", "strength", "seed")
        options = {name: getattr(self, name) for name in names} | {"device": choose_device(self.device)}
        for figure in draw(self.figure, self.runs, options):
            files = write(figure, self.output)
            for line in (*figure.caption.splitlines(), *files):
                show(line)


Figures.__doc__ = describe_figures()  # the help names every figure in the table
