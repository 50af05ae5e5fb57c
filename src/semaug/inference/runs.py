"""Run directories: their files, and how settings and metrics are read back.

config.json          all settings, the version of semaug, the composite model and the preprocessing
classes.json         class names in the order of the outputs
bad_images.json      unreadable images, if there are any
metrics.jsonl        one line per epoch; metrics.csv holds the same as a table
checkpoints/last     where training resumes; checkpoints/best: the best epoch so far on the validation split
model.safetensors    the trained weights, those of the best epoch
evaluation.json      scores on the test split; samples.json: a few images with their predictions
report.html          curves and pictures
tensorboard, wandb   the same metrics for these tools, if requested; tracking.json: the name of the run at W&B
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from semaug.data.images import Preprocessing
from semaug.util.errors import RunError
from semaug.util.files import read_json

FORMAT = 1  # of the run directory; raised when an older version of semaug would misread it
# Limits for folders from unknown sources: memory is allocated for these sizes before the weights are read.
MAX_CLASSES, MAX_SIDE = 100_000, 8192


class Description(NamedTuple):
    """What a run directory or an exported folder states about its network."""

    name: str  # of the architecture
    classes: tuple[str, ...]  # in the order of the outputs
    preprocessing: Preprocessing
    config: dict[str, Any]  # all of config.json


def read_description(folder: Path) -> Description:
    """Read config.json and classes.json of a run directory or an exported folder.

    The folder may come from an unknown source: whatever it contains, the outcome is a description or a SemaugError.
    """
    if not folder.exists():
        raise RunError(f"there is no run directory {folder}")
    if not (folder / "config.json").is_file():
        raise RunError(f"{folder} is not a run directory: it has no config.json")
    config = read_json(folder / "config.json")
    version = config.get("format") if isinstance(config, dict) else None
    if version != FORMAT:
        raise RunError(f"{folder} has format {version}, and this version of semaug reads format {FORMAT}")
    classes = read_json(folder / "classes.json")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise RunError(f"{folder / 'classes.json'} is not a list of names")
    if not 1 <= len(set(classes)) == len(classes) <= MAX_CLASSES:
        raise RunError(f"{folder / 'classes.json'} must have 1 to {MAX_CLASSES} names, none twice")
    if not isinstance(config.get("model"), str):
        raise RunError(f"{folder / 'config.json'} does not name the network")
    preprocessing = _read_preprocessing(config.get("preprocessing"))
    if preprocessing is None:
        raise RunError(f"{folder / 'config.json'} does not describe how images are prepared for the network")
    return Description(config["model"], tuple(classes), preprocessing, config)


def _read_preprocessing(values: Any) -> Preprocessing | None:
    """The preprocessing in a config.json; None if it is not a valid one."""
    try:
        result = Preprocessing.from_json(values)
        valid = all(type(side) is int and side <= MAX_SIDE for side in (result.resize, result.crop))
        valid = valid and len(result.mean) == len(result.std) == 3 and min(result.std) > 0
        return result if valid and all(map(math.isfinite, (*result.mean, *result.std))) else None
    except (AttributeError, TypeError):
        return None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of all epochs of a run directory, in order; none if no epoch has finished."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        return []
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise RunError(f"{file} is damaged: {error}") from error


def split_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select from a run's config.json the keyword arguments of :func:`semaug.data.readers.training_splits`."""
    names = ("select", "val_per_class", "val_fraction", "seed")
    return {name: config[name] for name in names if name in config}
