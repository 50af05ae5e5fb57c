"""A run's figures in TensorBoard or Weights & Biases, beside the files of the run directory.

Each tracker takes the same: the settings when it starts, a row of metrics for each epoch, and the evaluation at the
end. A run that goes on, goes on in the same tracked run, where an epoch that is made again counts once.
"""

import importlib.util
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from semaug.util.errors import SemaugError
from semaug.util.files import read_json, write_json

Track = Literal["tensorboard", "wandb"]


class Tracker:
    """Where nothing is tracked."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Take the metrics of an epoch."""

    def evaluation(self, split: str, epoch: int, scores: Mapping[str, float]) -> None:
        """Take the scores, on a split, of the epoch that is kept."""

    def close(self) -> None:
        """Write out what there is."""


class TensorBoard(Tracker):
    """Event files in the run directory's folder `tensorboard`."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], epochs_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What was written of later epochs by a process that was killed does not count.
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=epochs_done + 1)
        listing = "".join(f"    {line}\n" for line in json.dumps(settings, indent=2).splitlines())
        self.writer.add_text("config", listing)

    def epoch(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "epoch":
                self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()

    def evaluation(self, split: str, epoch: int, scores: Mapping[str, float]) -> None:
        for name, value in scores.items():
            self.writer.add_scalar(f"evaluation/{split}_{name}", value, epoch)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases(Tracker):
    """A run of the project $WANDB_PROJECT, or semaug; $WANDB_MODE=offline keeps it in the folder `wandb` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], epochs_done: int) -> None:
        import wandb

        file = folder / "tracking.json"
        if not file.exists():
            write_json(file, {"wandb": secrets.token_hex(4)})
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "semaug"),
                id=read_json(file)["wandb"],
                name=folder.name,
                dir=folder,
                config=dict(settings),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise SemaugError(
                f"wandb does not start ({reason}); run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.run.log({name: value for name, value in row.items() if name != "epoch"}, step=row["epoch"])

    def evaluation(self, split: str, epoch: int, scores: Mapping[str, float]) -> None:
        self.run.summary.update({f"{split}_{name}": value for name, value in scores.items()} | {"best_epoch": epoch})

    def close(self) -> None:
        self.run.finish()


def check_installed(track: Track | None) -> None:
    """See that the package is there, before training starts."""
    if track is not None and importlib.util.find_spec(track) is None:
        raise SemaugError(f"--track {track} needs the package {track}; pip install 'semaug[{track}]'")


def make_tracker(track: Track | None, folder: Path, settings: Mapping[str, Any], epochs_done: int) -> Tracker:
    """What takes the figures of a run that has made so many epochs."""
    if track is None:
        return Tracker()
    kind = TensorBoard if track == "tensorboard" else WeightsAndBiases
    return kind(folder, settings, epochs_done)
