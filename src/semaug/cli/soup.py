"""`semaug soup`: average the weights of runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from semaug.cli.common import Command, choose_device, say, show
from semaug.util.errors import SettingError
from semaug.util.names import counted, percent
from semaug.util.ranges import Range, setting


@dataclass(frozen=True)
class Soup(Command):
    """Average the weights of runs of one architecture, adding each run that improves validation (a greedy soup).

    The result is a run directory with one network: it costs no more to use than each of the runs. They should start
    from the same pretrained weights, and differ in settings.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories, at least two, which held out the same validation images."""
    output: Path
    """The run directory to write."""
    device: str | None = setting(None, "hardware")
    """Device: cpu, cuda or cuda:N. Default: cuda if available, else cpu."""
    batch_size: Annotated[int, Range(2, 1_000_000)] = setting(64, "hardware")
    """Images per batch."""

    def run(self) -> None:
        from semaug.inference.soup import soup
        from semaug.report import write_report

        if len(self.runs) < 2:
            raise SettingError("a soup needs at least two runs")
        result = soup(self.runs, self.output, choose_device(self.device), self.batch_size, say)
        if len(result.ingredients) == 1:
            show(f"no average validates better than {result.ingredients[0]} alone; nothing was written")
            return
        write_report([self.output], self.output / "report.html")
        gain = f"{percent(result.accuracy, 2)} on validation instead of {percent(result.best, 2)}"
        show(f"{self.output}: the average of {counted(len(result.ingredients), 'run')}, {gain}")
