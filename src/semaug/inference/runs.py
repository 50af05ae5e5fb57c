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

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semaug.data.images import Preprocessing
from semaug.network.models import build_model, read_weights
from semaug.util.errors import ModelError, SemaugError
from semaug.util.files import read_json

FORMAT = 1  # of the run directory; raised when an older reader would misread it
MAX_CLASSES, MAX_SIDE = 100_000, 8192  # of a classifier that is read: memory is taken for them before weights are seen


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
        device = next(self.model.parameters(), pixels).device
        inputs = self.preprocessing.evaluation_input(pixels.to(device, non_blocking=True))
        logits: Tensor = self.model(inputs)
        return logits.float().softmax(1).cpu()


def as_composite(composite: str | None, model: nn.Module, num_classes: int) -> nn.Module:
    """Build a composite model around a network.

    Args:
        composite: ``"p2p"`` for a P2P-Net, or None for the network itself.
        model: The network.
        num_classes: Number of classes.

    Returns:
        The composite model, or the network.

    Raises:
        ValueError: If the network has no stages to build a P2P-Net of.
        ModelError: If the composite model is unknown.
    """
    if composite is None:
        return model
    if composite != "p2p":
        raise ModelError(f"unknown composite model {composite!r}")
    from semaug.p2p import P2PNet

    return P2PNet(model, num_classes)


def split_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What in a run's config.json says how its data was split."""
    names = ("select", "val_per_class", "val_fraction", "seed")
    return {name: config[name] for name in names if name in config}


def load_classifier(run: Path, device: str | torch.device = "cpu") -> Classifier:
    """The trained classifier of a run directory or of an exported folder, in evaluation mode.

    The folder may come from a stranger: whatever is in it, the outcome is a classifier or a :class:`SemaugError`.
    """
    name, classes, preprocessing, config = read_description(run)
    if not (run / "model.safetensors").is_file():
        raise SemaugError(f"{run} has no model.safetensors: its training has not finished; run the same command again")
    weights = read_weights(run / "model.safetensors")
    if not any(value.ndim and value.shape[0] == len(classes) for value in weights.values()):
        raise SemaugError(f"nothing in {run / 'model.safetensors'} is for the {len(classes)} classes of {run}")
    try:
        built = build_model(name, len(classes), preprocessing.crop)
        model = as_composite(config.get("composite"), built, len(classes))
        model.load_state_dict(weights)
    except SemaugError:
        raise
    except Exception as error:  # of the libraries that build networks, at options that do not go together
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise SemaugError(f"{run} does not hold a {name} as it says: {reason}") from error
    return Classifier(model.to(device).eval(), classes, preprocessing, name, config)


def read_description(folder: Path) -> tuple[str, tuple[str, ...], Preprocessing, dict[str, Any]]:
    """The name of the network, the classes, the preprocessing and all settings, from config.json and classes.json."""
    if not folder.exists():
        raise SemaugError(f"there is no run directory {folder}")
    if not (folder / "config.json").is_file():
        raise SemaugError(f"{folder} is not a run directory: it has no config.json")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else None
        raise SemaugError(f"{folder} has format {found}, and this version of semaug reads {FORMAT}")
    classes = read_json(folder / "classes.json")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise SemaugError(f"{folder / 'classes.json'} is not a list of names")
    if not 1 <= len(set(classes)) == len(classes) <= MAX_CLASSES:
        raise SemaugError(f"{folder / 'classes.json'} must have 1 to {MAX_CLASSES} names, none twice")
    if not isinstance(config.get("model"), str):
        raise SemaugError(f"{folder / 'config.json'} does not say which network it is for")
    return config["model"], tuple(classes), _read_preprocessing(folder / "config.json", config), config


def _read_preprocessing(file: Path, config: Mapping[str, Any]) -> Preprocessing:
    values = config.get("preprocessing")
    try:
        found = Preprocessing.from_json(values)  # type: ignore[arg-type]
        sides = [found.resize, found.crop]
        colours = [*found.mean, *found.std]
        fits = all(type(side) is int and side <= MAX_SIDE for side in sides) and len(found.mean) == len(found.std) == 3
        fits = fits and all(math.isfinite(value) for value in colours) and min(found.std) > 0
    except (AttributeError, TypeError):
        fits = False
    if not fits:
        raise SemaugError(f"{file} does not say how images are prepared for the network")
    return found
