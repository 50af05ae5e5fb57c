"""What the report knows of a run: its files, read such that a run that is not complete can be shown as far as it is."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semaug.util.errors import SemaugError
from semaug.util.files import read_json

_PICTURE = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/]+=*")


@dataclass(frozen=True)
class ReportedRun:
    """The contents of a run directory; what is missing is empty and told in `notes`."""

    path: Path
    label: str  # names the run in legends and tables
    place: int  # among the runs of the report; chooses the colour
    config: dict[str, Any]
    classes: list[str]
    metrics: list[dict[str, Any]]
    evaluation: dict[str, Any]
    samples: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    def text(self, key: str) -> str:
        """A setting as text; a dash if the run does not tell."""
        return as_text(self.config.get(key))

    def score(self, key: str) -> float | None:
        """A number of the evaluation."""
        return number(self.evaluation.get(key))

    @property
    def seconds(self) -> float | None:
        """Time of all epochs together."""
        times = [number(row.get("seconds")) for row in self.metrics]
        known = [time for time in times if time is not None]
        return sum(known) if known else None

    def class_accuracy(self) -> dict[str, float]:
        """Accuracy by class, of the classes that have images."""
        rows = self.evaluation.get("classes")
        found = {row["name"]: number(row.get("accuracy")) for row in rows or [] if isinstance(row, dict)}
        return {name: accuracy for name, accuracy in found.items() if accuracy is not None}


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def as_text(value: Any) -> str:
    """A setting as people write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(as_text(part) for part in value)
    return str(value)


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read run directories, in the order given; runs are named by method, and by directory where that is not enough."""
    if not paths:
        raise SemaugError("a report needs at least one run directory")
    configs = [_config(path) for path in paths]
    methods = [as_text(config.get("method")) for config in configs]
    names = [path.resolve().name for path in paths]
    labels = methods if len(set(methods)) == len(paths) else names
    repeated = Counter(labels)
    labels = [str(path) if repeated[label] > 1 else label for path, label in zip(paths, labels, strict=True)]
    return [
        _read_run(path, label, place, config)
        for place, (path, label, config) in enumerate(zip(paths, labels, configs, strict=True))
    ]


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise SemaugError(f"there is no run directory {path}")
    if not (path / "config.json").is_file():
        raise SemaugError(f"{path} is not a run directory: it has no config.json")
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise SemaugError(f"{path / 'config.json'} does not hold the settings of a run")
    return config


def _read_run(path: Path, label: str, place: int, config: dict[str, Any]) -> ReportedRun:
    notes: list[str] = []
    classes = _optional(path / "classes.json", list, notes)
    metrics = _metrics(path / "metrics.jsonl", notes)
    evaluation = _optional(path / "evaluation.json", dict, notes)
    samples = [sample for sample in _optional(path / "samples.json", list, notes) if _is_sample(sample)]
    if not evaluation:
        planned = number(config.get("epochs"))
        notes.append(
            f"no evaluation: training has not finished (epoch {len(metrics)} of {planned:.0f})"
            if planned is not None and len(metrics) < planned
            else "no evaluation: it has not been made, or has been removed"
        )
    elif evaluation.get("split") == "val":
        notes.append("the data has no test split: scores are those of the validation split that chose the best epoch")
    if config.get("select") == "test":
        notes.append("the best epoch was chosen on the test split: its scores are too good")
    if evaluation and not samples:
        notes.append("no pictures were kept")
    return ReportedRun(path, label, place, config, [str(c) for c in classes], metrics, evaluation, samples, notes)


def _optional(path: Path, kind: type, notes: list[str]) -> Any:
    """The content of a JSON file; empty, with a note unless the file is just not there, if it cannot be had."""
    if not path.is_file():
        return kind()
    try:
        content = read_json(path)
    except SemaugError as error:
        notes.append(str(error))
        return kind()
    if isinstance(content, kind):
        return content
    notes.append(f"{path.name} does not hold what it should")
    return kind()


def _metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            notes.append(f"a line of {path.name} cannot be read and is left out")
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _is_sample(sample: Any) -> bool:
    """Whether a sample has a picture that is in the file itself: an address would be fetched when the page is read."""
    return isinstance(sample, dict) and _PICTURE.fullmatch(str(sample.get("image"))) is not None
