"""`semaug reproduce`: reproduce tables and figures of the paper."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from rich.console import Console

from semaug.cli.common import Command, command_line, with_flags
from semaug.data.samples import Select
from semaug.util.errors import TrainingError
from semaug.util.ranges import Count, Jobs, Seed, setting


@dataclass(frozen=True)
class Reproduce(Command):
    """Reproduce tables and figures of the paper. Without a name: list them.

    Each is a set of cells: one training run for each seed. Runs that several tables share are trained once, finished
    runs are not repeated, interrupted ones are resumed, and a failed one does not stop the others. All results,
    beside the paper's, are printed and written to report.html, results.json and results.md.
    """

    resumable: ClassVar[bool] = True

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """What to reproduce: "list", names from the list, or "all"."""
    scale: Literal["full", "small"] = setting("full", "main")
    """full: the paper's settings on its data sets. small: the same cells on drawn birds, with small networks and few
    epochs. It needs no data and no GPU, and says nothing about the paper's claims."""
    data: Path | None = setting(None, "main")
    """Folder that holds the paper's data sets. Default: $SEMAUG_DATA, or ./data. At small scale: a folder of images to
    use instead of the drawn birds."""
    output: Path = setting(Path("runs/reproduce"), "main")
    """Folder of the runs and the report."""
    dataset: tuple[str, ...] = setting((), "main")
    """Only cells on these data sets: cub, aircraft, cars, nabirds, imagenet. Default: all."""
    network: tuple[str, ...] = setting((), "main")
    """Only cells with these networks, as the paper writes them: ResNet-50, ViT-B/16, … Default: all."""
    method: tuple[str, ...] = setting((), "main")
    """Only cells of these methods: basic, isda, learnable, … Default: all."""
    seeds: tuple[Seed, ...] | None = setting(None, "main")
    """Seeds of each cell. Default: 0 1 2 at full scale, one or two seeds at small scale."""
    jobs: Jobs | None = setting(None, "hardware")
    """Number of runs at a time. Default: one for each GPU; without a GPU, at small scale one for each core."""
    epochs: Count | None = setting(None, "schedule")
    """Epochs of every run. Default: the scale's own number."""
    select: Select | None = setting(None, "schedule")
    """Which epoch's weights are saved as the model: of the best epoch on a validation split (val), of the last epoch,
    trained on all training images (last), or of the best epoch on the test split (test), as in much published code;
    its accuracy is too high. Default: last at full scale, val at small scale."""
    best_of_test: bool = setting(False, "main")
    """Also report the best epoch on the test split, as much published code does; this accuracy is too high. Runs that
    were trained without this option are repeated."""
    device: str | None = setting(None, "hardware")
    """Device: cpu, cuda or cuda:N. Default: cuda if available, else cpu."""

    def run(self) -> None:
        from semaug.studies.presets import all_experiments
        from semaug.studies.reproduce import Choice, reproduce
        from semaug.studies.scales import Setup

        if not self.names or self.names == ("list",):
            lines = {name: preset.line for name, preset in all_experiments().items()} | {"all": "all of them"}
            width = max(map(len, lines))
            print("\n".join(f"{name:{width}}  {line}" for name, line in lines.items()))
            return
        select = self.select or ("last" if self.scale == "full" or self.best_of_test else "val")
        setup = Setup(self.scale, self.output, self.data, self.epochs, select, self.best_of_test, self.device)
        choice = Choice(self.dataset, self.network, self.method, self.seeds)
        result = reproduce(self.names, setup, choice, self.jobs, self._command)
        console = Console(highlight=False)
        shown = [
            part for section in result.sections if section.experiment in result.chosen for part in section.terminal()
        ]
        for part in [*shown, *result.heading, f"{self.output}: report.html, results.json, results.md"]:
            text = with_flags(part, self) if isinstance(part, str) else part
            console.print(text, markup=False, soft_wrap=isinstance(part, str))
        if result.failed:
            raise TrainingError(f"{result.failed} of the runs and pictures failed; the report says why")

    def _command(self, name: str, seeds: Sequence[int]) -> str:
        """The command that repeats an experiment with all of its cells."""
        every: dict[str, Any] = {"dataset": (), "network": (), "method": (), "jobs": None, "device": None}
        return command_line("reproduce", replace(self, names=(name,), seeds=tuple(seeds) or None, **every))
