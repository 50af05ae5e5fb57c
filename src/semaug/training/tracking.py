"""Logging a run to TensorBoard or Weights & Biases, in addition to the files of the run directory.

A resumed run continues the same log, in which a repeated epoch counts once.
"""

import importlib.util
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from semaug.util.errors import MissingPackageError, SemaugError
from semaug.util.files import write_json
from semaug.util.untrusted import read_json

Track = Literal["tensorboard", "wandb"]


class Tracker:
    """A log of numbers; the base class logs nothing."""

    def log(self, epoch: int, numbers: Mapping[str, float], *, final: bool = False) -> None:
        """Log the metrics of an epoch or the scores of the final model.

        Args:
            epoch: The epoch, counted from 1; the best one if `final`.
            numbers: Metrics or scores by name.
            final: Whether these are the scores of the model of the best epoch.
        """

    def close(self) -> None:
        """Finish the log."""


class _TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run directory."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], epochs_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Discards later epochs, logged by a process that was killed before it saved them.
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=epochs_done + 1)
        self.writer.add_text("config", "".join(f"    {line}\n" for line in json.dumps(settings, indent=2).splitlines()))

    def log(self, epoch: int, numbers: Mapping[str, float], *, final: bool = False) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(f"evaluation/{name}" if final else name, value, epoch)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _WeightsAndBiases(Tracker):
    """A run of the project $WANDB_PROJECT, or semaug. With $WANDB_MODE=offline it stays in the folder `wandb`."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        file = folder / "tracking.json"
        if not file.exists():
            write_json(file, {"wandb": secrets.token_hex(4)})
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "semaug"),
                id=read_json(file, dict[str, str])["wandb"],
                name=folder.name,
                dir=folder,
                config=dict(settings),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise SemaugError(f"wandb does not start ({reason}); log in to wandb, or set WANDB_MODE=offline") from error

    def log(self, epoch: int, numbers: Mapping[str, float], *, final: bool = False) -> None:
        if final:
            self.run.summary.update({**numbers, "best_epoch": epoch})
        else:
            self.run.log(dict(numbers), step=epoch)

    def close(self) -> None:
        self.run.finish()


def check_installed(track: Track | None) -> None:
    """Raise a :class:`MissingPackageError` if the package of a tracker is not installed."""
    if track is not None and importlib.util.find_spec(track) is None:
        raise MissingPackageError(f"the `track` {track} needs a package: pip install '.[{track}]' in the clone")


def make_tracker(track: Track | None, folder: Path, settings: Mapping[str, Any], epochs_done: int) -> Tracker:
    """Start a log, or continue that of a resumed run.

    Args:
        track: Name of the tracker; None to log nothing.
        folder: The run directory.
        settings: Settings of the run.
        epochs_done: Number of completed epochs.

    Returns:
        The tracker.

    Raises:
        SemaugError: If Weights & Biases does not start.
    """
    if track == "tensorboard":
        return _TensorBoard(folder, settings, epochs_done)
    return Tracker() if track is None else _WeightsAndBiases(folder, settings)
