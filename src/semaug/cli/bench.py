"""`semaug bench`: measure the cost of a training step."""

from dataclasses import dataclass

from rich.console import Console

from semaug.cli.common import Command
from semaug.studies.bench.settings import BenchConfig


@dataclass(frozen=True)
class Bench(BenchConfig, Command):
    """Measure the cost of a training step on this machine: time and memory of each variant relative to plain training.

    All variants take turns in one run, on images of noise. Then the meta-gradients of the two engines are compared. The
    default sizes take a minute or two, on a GPU or on two CPU cores.
    """

    def run(self) -> None:
        from semaug.studies.bench import bench

        console = Console(highlight=False)
        results = bench(self)
        timed = next(results)
        console.print("\n".join(timed.heading()), markup=False, soft_wrap=True)
        console.print(timed.costs())
        console.print(f"{self.output}: bench.json, bench.svg", markup=False, soft_wrap=True)
        console.print(next(results).comparison())
