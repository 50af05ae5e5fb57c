"""`semaug train`: train a classifier."""

from dataclasses import dataclass
from typing import ClassVar

from semaug.cli.common import Command, show
from semaug.training.settings import TrainConfig
from semaug.util import distributed


@dataclass(frozen=True)
class Train(TrainConfig, Command):
    """Train a classifier of look-alike classes. Without options: on the embedded birds.

    The run directory holds the settings, metrics, checkpoints, the trained model and a report. Run the same command
    again to resume an interrupted run.
    """

    resumable: ClassVar[bool] = True
    distributed: ClassVar[bool] = True

    def run(self) -> None:
        from semaug.data.readers import refuse_ambiguity
        from semaug.report import write_report
        from semaug.training.trainer import train

        refuse_ambiguity(self.data, self.data_root)
        folder = train(self)
        if distributed.is_rank_zero():
            write_report([folder], folder / "report.html")
            show(f"{folder}: model.safetensors, report.html")
