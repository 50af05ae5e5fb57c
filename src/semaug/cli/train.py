"""`semaug train`: train a classifier."""

from dataclasses import dataclass
from typing import ClassVar

from semaug.cli.common import Command, show, show_ranges
from semaug.training.methods import Augmentation
from semaug.training.settings import TrainConfig
from semaug.util import distributed

show_ranges(TrainConfig, Augmentation)


@dataclass(frozen=True)
class Train(TrainConfig, Command):
    """Train a classifier of look-alike classes. Without options: on the embedded birds.

    The run directory holds the settings, metrics, checkpoints, the trained model and a report. Run the same command
    again to resume an interrupted run.
    """

    resumable: ClassVar[bool] = True
    distributed: ClassVar[bool] = True

    def run(self) -> None:
        from semaug.report import write_report
        from semaug.training.trainer import train

        folder = train(self)
        if distributed.is_rank_zero():
            write_report([folder], folder / "report.html")
            show(f"{folder}: model.safetensors, report.html")
