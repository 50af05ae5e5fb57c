"""`semaug report`: write a page about runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from semaug.cli.common import Command, show
from semaug.util.errors import SettingError


@dataclass(frozen=True)
class Report(Command):
    """Write one HTML page about a run, or a comparison of several runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories."""
    output: Path = Path("report.html")
    """The page to write."""

    def run(self) -> None:
        from semaug.report import write_report

        if not self.runs:
            raise SettingError("name at least one run directory")
        write_report(list(self.runs), self.output)
        show(self.output)
