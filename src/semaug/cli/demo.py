"""`semaug demo`: train on the embedded birds."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from semaug.cli.common import Command
from semaug.util.ranges import Count, Seed


@dataclass(frozen=True)
class Demo(Command):
    """Train on the embedded birds, a small drawn data set, and write a report with pictures.

    It takes two to three minutes on two CPU cores, and needs no data. It shows how semaug works; so few drawn images
    cannot show which method is better.
    """

    resumable: ClassVar[bool] = True

    output: Path = Path("runs/demo")
    """Folder of the runs and the report."""
    methods: tuple[str, ...] = ("isda",)
    """Methods to train with."""
    epochs: Count = 30
    """Epochs of each run."""
    seed: Seed = 0
    """Seed of all random numbers."""

    def run(self) -> None:
        from semaug.studies.demo import demo

        table, lines = demo(self.output, self.methods, self.epochs, self.seed)
        console = Console(highlight=False)
        console.print(table)
        console.print("\n".join(lines), markup=False, soft_wrap=True)
