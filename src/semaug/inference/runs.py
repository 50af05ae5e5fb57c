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

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, Required, TypedDict

from semaug.data.annotations import MAX_CLASS_NAME
from semaug.data.images import Preprocessing
from semaug.util.errors import RunError
from semaug.util.ranges import Count, CountOrZero, Positive, Seed, Share, Side, Workers
from semaug.util.untrusted import read_json, read_json_lines

FORMAT = 1  # of the run directory; raised when an older version of semaug would misread it
# Limits for folders from unknown sources: memory is allocated for these sizes before the weights are read.
MAX_CLASSES = 100_000


class _Preprocessing(TypedDict):
    resize: Side
    crop: Side
    shape: NotRequired[Literal["squash", "aspect"]]
    mean: NotRequired[tuple[float, float, float]]
    std: NotRequired[tuple[Positive, Positive, Positive]]


class Settings(TypedDict, total=False):
    """The part of config.json that is read back; in an exported folder much of it is absent."""

    model: Required[str]
    preprocessing: Required[_Preprocessing]
    composite: Literal["p2p"] | None
    version: str
    data: str | None
    data_root: str | None
    method: str
    epochs: Count
    seed: Seed
    select: Literal["val", "last", "test"]
    val_per_class: CountOrZero | None
    val_fraction: Share
    on_bad_image: Literal["stop", "skip"]
    workers: Workers
    cache: str | None
    augmentation: dict[str, Any]


class _Evaluation(TypedDict, total=False):
    """The part of evaluation.json that a model card shows."""

    split: Required[str]
    count: int
    top1: float
    top5: float
    mean_class_accuracy: float
    cross_entropy: float
    calibration_error: float


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
    file = folder / "config.json"
    version = read_json(file, dict[str, Any]).get("format")
    if version != FORMAT:
        raise RunError(f"{folder} has format {str(version)[:20]}, and this version of semaug reads format {FORMAT}")
    config: dict[str, Any] = read_json(file, Settings)
    classes = read_json(folder / "classes.json", list[str])
    if not 1 <= len(set(classes)) == len(classes) <= MAX_CLASSES:
        raise RunError(f"{folder / 'classes.json'} must have 1 to {MAX_CLASSES} names, none twice")
    if max(map(len, [config["model"], *classes])) > MAX_CLASS_NAME:
        raise RunError(f"the name of a class or network in {folder} has more than {MAX_CLASS_NAME} characters")
    try:
        preprocessing = Preprocessing.from_json(config["preprocessing"])
    except TypeError as error:  # unknown keys
        raise RunError(f"{file} does not describe how images are prepared for the network") from error
    return Description(config["model"], tuple(classes), preprocessing, config)


def read_evaluation(run: Path) -> dict[str, Any] | None:
    """Read the scores in the evaluation.json of a run directory; None if there is none."""
    file = run / "evaluation.json"
    return dict(read_json(file, _Evaluation)) if file.exists() else None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of all epochs of a run directory, in order; none if no epoch has finished."""
    file = run / "metrics.jsonl"
    return read_json_lines(file, dict[str, Any]) if file.exists() else []


def split_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select from a run's config.json the keyword arguments of :func:`semaug.data.readers.training_splits`."""
    names = ("select", "val_per_class", "val_fraction", "seed")
    return {name: config[name] for name in names if name in config}
