"""The run directory: what training writes, and how a trained classifier is read back.

config.json          all settings, the version, and the preprocessing
classes.json         class names in the order of the outputs
bad_images.json      images that could not be read, where there are such
metrics.jsonl        one line per epoch; metrics.csv holds the same as a table
checkpoints/last     to go on from; checkpoints/best: the best so far on the validation split
model.safetensors    the trained weights: the best epoch's
report.html          curves and pictures
tensorboard, wandb   the same metrics for these tools, where asked for; tracking.json: W&B's name of the run
"""

import errno
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semaug.data.images import Preprocessing
from semaug.errors import UserError
from semaug.methods import dressed
from semaug.models import build_model, read_weights

FORMAT = 1  # of the run directory; raised when an older reader would misread it


def write_atomically(path: Path, *content: bytes | memoryview, keep: Path | None = None) -> None:
    """Write a file such that readers, and a machine that fails, see the old content or the new, never a part.

    What was there before is moved to `keep` if that is given, once the new content is safe.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            path.replace(keep)
        unfinished.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder as safe as the content of its files, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def leftovers(folder: Path) -> list[Path]:
    """What writers that were killed have left in a folder."""
    found = [(file, re.fullmatch(r"\..+\.(\d+)\.part", file.name)) for file in folder.glob(".*.part")]
    return [file for file, name in found if name is not None and not _runs(int(name[1]))]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return process != os.getpid()


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The epochs' metrics of a run, in order."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


@dataclass
class Classifier:
    """A trained network with all that is needed to use it."""

    model: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    name: str  # of the architecture
    config: dict[str, Any]

    @torch.inference_mode()
    def probabilities(self, pixels: Tensor) -> Tensor:
        """Class probabilities (N, C) of uint8 pixels (N, resize, resize, 3), see :class:`Preprocessing`."""
        device = next(self.model.parameters()).device
        inputs = self.preprocessing.evaluation_input(pixels.to(device, non_blocking=True))
        logits: Tensor = self.model(inputs)
        return logits.float().softmax(1).cpu()


def split_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What in a run's config.json says how its data was split."""
    names = ("select", "val_per_class", "val_fraction", "seed")
    return {name: config[name] for name in names if name in config}


def load_classifier(run: Path, device: str | torch.device = "cpu") -> Classifier:
    """The trained classifier of a run directory, in evaluation mode."""
    if not run.exists():
        raise UserError(f"there is no run directory {run}")
    if not (run / "config.json").is_file():
        raise UserError(f"{run} is not a run directory: it has no config.json")
    config, classes = read_json(run / "config.json"), read_json(run / "classes.json")
    if config.get("format") != FORMAT:
        raise UserError(f"{run} has format {config.get('format')}, and this version of semaug reads {FORMAT}")
    if not (run / "model.safetensors").is_file():
        raise UserError(f"{run} has no model.safetensors: its training has not finished; run the same command again")
    preprocessing = Preprocessing.from_json(config["preprocessing"])
    model = dressed(
        config.get("method", ""), build_model(config["model"], len(classes), preprocessing.crop), len(classes)
    )
    model.load_state_dict(read_weights(run / "model.safetensors"))
    return Classifier(model.to(device).eval(), tuple(classes), preprocessing, config["model"], config)
