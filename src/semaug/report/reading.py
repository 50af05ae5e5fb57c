"""The files of a run directory, read so that an incomplete or damaged run is shown as far as possible."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from semaug.inference.manifest import NAME as MANIFEST
from semaug.inference.manifest import read_manifest, verify
from semaug.inference.runs import Calibration, Epoch, read_calibration
from semaug.report.canvas import slots
from semaug.training.methods import METHODS
from semaug.util.errors import RunError, SemaugError
from semaug.util.names import counted, some
from semaug.util.untrusted import MAX_JSON_BYTES, parse_json, read_bytes, read_json

_LARGEST = 1e100  # numbers beyond are nonsense, and axes cannot show them
_PICTURE = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/]+=*")


@dataclass(frozen=True)
class ReportedRun:
    """The contents of a run directory; missing files are empty."""

    path: Path
    label: str  # name in legends and tables
    slot: int  # decides the colour; see `semaug.report.canvas.slots`
    config: dict[str, Any]
    classes: list[str]
    metrics: list[dict[str, Any]]  # of each epoch
    evaluation: dict[str, Any]
    samples: list[dict[str, Any]]  # pictures with predictions
    calibration: Calibration | None = None
    notes: list[str] = field(default_factory=list)  # what is missing or unusual
    data: str = ""  # fingerprint of the data set
    held_out: str = ""  # checksum of the list of validation images, if they were drawn

    @property
    def method(self) -> str:
        """The title of the method."""
        return method_title(as_text(self.config.get("method")))

    def text(self, key: str) -> str:
        """Write a setting as text; a dash if the run does not have it."""
        return as_text(self.config.get(key))

    def score(self, key: str) -> float | None:
        """Look up a number of the evaluation."""
        return number(self.evaluation.get(key))

    @property
    def seconds(self) -> float | None:
        """The time of all epochs together."""
        known = [time for row in self.metrics if (time := number(row.get("seconds"))) is not None]
        return sum(known) if known else None

    def shares_images(self, other: Self) -> bool:
        """Whether both runs were evaluated on the same images, as far as their directories say."""
        if any(self.evaluation.get(key) != other.evaluation.get(key) for key in ("split", "count")):
            return False
        if self.evaluation.get("split") == "val" and self.held_out != other.held_out:
            return False
        # Training images may have been added since, and a relative path may be another folder.
        return self.text("data") == other.text("data") and (self.data == other.data or self._place == other._place)

    @property
    def _place(self) -> str:
        """The absolute path of the data set, if it is a path."""
        return os.path.normpath(Path(os.path.realpath(self.path), str(self.config.get("base", "")), self.text("data")))

    def table(self, key: str, *columns: str) -> list[dict[str, Any]]:
        """Look up the rows of a table of the evaluation that have certain columns."""
        rows = self.evaluation.get(key)
        rows = rows if isinstance(rows, list) else []
        return [row for row in rows if isinstance(row, dict) and all(column in row for column in columns)]

    def class_accuracy(self) -> dict[str, float]:
        """Look up the accuracy of each class that has images."""
        accuracies = {str(row["name"]): number(row.get("accuracy")) for row in self.table("classes", "name")}
        return {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}


def number(value: Any) -> float | None:
    """Convert a value of a JSON file: a number that a chart can show, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return float(value)


def as_text(value: Any) -> str:
    """Write a value of a JSON file as people write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(as_text, value)) if isinstance(value, list) else str(value)


def method_title(name: str) -> str:
    """Look up the title of a method; the name itself if it is unknown, as in a run directory of unknown origin."""
    return METHODS[name].title if name in METHODS else name


def confusion_entries(evaluation: Any, classes: int) -> list[tuple[int, int, int]]:
    """Read the confusion matrix in the contents of evaluation.json, whatever they are.

    Returns true class, predicted class and number of images of each entry that is well formed.
    """
    entries = evaluation.get("confusion") if isinstance(evaluation, dict) else None
    return [
        (entry[0], entry[1], entry[2])
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, list)
        and [type(value) for value in entry] == [int] * 3
        and max(entry[:2]) < classes
        and min(*entry[:2], entry[2] - 1) >= 0
        and entry[2] < 2**31
    ]


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read run directories; runs are named by method, or by directory where methods repeat.

    Raises:
        RunError: If there is no path, or one is not a run directory.
    """
    if not paths:
        raise RunError("a report needs at least one run directory")
    configs = [_config(path) for path in paths]
    methods = [as_text(config.get("method")) for config in configs]
    labels = [method_title(method) for method in methods]
    if len(set(labels)) < len(paths):
        labels = [path.resolve().name for path in paths]
    repeated = Counter(labels)
    labels = [str(path) if repeated[label] > 1 else label for path, label in zip(paths, labels, strict=True)]
    return [_read_run(*parts) for parts in zip(paths, labels, slots(methods), configs, strict=True)]


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise RunError(f"there is no run directory {path}")
    if not (path / "config.json").is_file():
        raise RunError(f"{path} is not a run directory: it has no config.json")
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise RunError(f"{path / 'config.json'} does not hold the settings of a run")
    return config


def _read_run(path: Path, label: str, slot: int, config: dict[str, Any]) -> ReportedRun:
    notes: list[str] = []
    classes = _optional(path / "classes.json", list, notes)
    metrics = _metrics(path / "metrics.jsonl", notes)
    evaluation = _optional(path / "evaluation.json", dict, notes)
    samples = [sample for sample in _optional(path / "samples.json", list, notes) if _is_sample(sample)]
    epochs = number(config.get("epochs"))
    if not evaluation and epochs is not None and len(metrics) < epochs:
        notes.append(f"no evaluation: training has not finished (epoch {len(metrics)} of {epochs:.0f})")
    elif not evaluation:
        notes.append("no evaluation: there is no evaluation.json")
    elif evaluation.get("split") == "val":
        notes.append(
            "the data has no test split; scores are from the validation split, which also chose the best epoch"
        )
    rows = evaluation.get("classes")
    missing = [str(row["name"]) for row in rows if _has_no_images(row)] if isinstance(rows, list) else []
    if missing:
        notes.append(f"{counted(len(missing), 'class')} without images in the evaluation: {some(missing)}")
    calibration = None
    try:
        calibration = read_calibration(path)
    except SemaugError as error:
        notes.append(str(error))
    if config.get("select") == "test":
        notes.append("the best epoch was chosen on the test split: its scores are too good")
    if (optimistic := number(evaluation.get("best_of_test"))) is not None:
        notes.append(f"best of test, chosen on the test split and too good: {100 * optimistic:.2f} %")
    if evaluation and not samples:
        notes.append("there are no pictures")
    data = held_out = ""
    try:
        if evaluation and (path / MANIFEST).is_file():
            manifest = read_manifest(path)
            data, held_out = manifest.get("data", ""), manifest["files"].get("split.json", "")
            listed = [name for name in manifest["files"] if not name.endswith(".safetensors")]
            verify(path, "classes.json", "evaluation.json", *listed)
    except SemaugError as error:
        notes.append(str(error))
    names = [str(name) for name in classes]
    return ReportedRun(
        path, label, slot, config, names, metrics, evaluation, samples, calibration, notes, data, held_out
    )


def _has_no_images(row: Any) -> bool:
    return isinstance(row, dict) and "name" in row and row.get("images") == 0


def _optional(path: Path, kind: type, notes: list[str]) -> Any:
    """The contents of a JSON file; empty if it is missing, and with a note if it is damaged."""
    try:
        content = read_json(path) if path.is_file() else kind()
    except SemaugError as error:
        notes.append(str(error))
        return kind()
    if isinstance(content, kind):
        return content
    notes.append(f"{path.name} does not hold what it should")
    return kind()


def _metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    text = read_bytes(path, MAX_JSON_BYTES).decode(errors="replace") if path.is_file() else ""
    for line in filter(str.strip, text.splitlines()):
        try:
            rows.append(parse_json(line.encode(), path, Epoch))
        except SemaugError:
            notes.append(f"a line of {path.name} cannot be read and is left out")
    return rows


def _is_sample(sample: Any) -> bool:
    """Whether a sample holds its picture and, if it has one, its map: the browser would fetch an address."""
    if not isinstance(sample, dict):
        return False
    pictures = [sample.get("image"), *([sample["map"]] if "map" in sample else [])]
    return all(_PICTURE.fullmatch(str(picture)) for picture in pictures)
