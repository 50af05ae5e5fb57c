"""Run directories: their files, and how settings and metrics are read back.

config.json          all settings, the version of semaug, the composite model and the preprocessing; base: the path from
                     the run directory to the working directory of the training, where relative paths begin
classes.json         class names in the order of the outputs
split.json           the validation images by class, if they were drawn from the training images
manifest.json        name of the run, fingerprint of its data, and checksums of the other files
bad_images.json      unreadable images, if there are any
metrics.jsonl        one line per epoch; metrics.csv holds the same as a table
checkpoints/last     where training resumes; checkpoints/best: the best epoch so far on the validation split; both are
                     deleted when the run is complete
model.safetensors    the trained weights, those of the best epoch
evaluation.json      scores on the test split; samples.json: a few images with their predictions
calibration.json     the temperature of the logits, and confidences on the validation split, if it was calibrated
report.html          curves and pictures
tensorboard, wandb   the same metrics for these tools, if requested; tracking.json: the name of the run at W&B
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Required, TypedDict

from semaug.data.annotations import MAX_CLASS_NAME
from semaug.data.images import Preprocessing
from semaug.data.readable import OnBadImage
from semaug.data.readers import KNOWN, data_root, read_data, training_splits
from semaug.data.samples import DataSet, Samples, Select, Subset
from semaug.inference.manifest import NAME as MANIFEST
from semaug.inference.manifest import read_manifest, verify
from semaug.util.errors import DataError, FileError, RunError
from semaug.util.files import write_json
from semaug.util.names import shown, some
from semaug.util.ranges import Accuracy, Count, CountOrZero, NotNegative, Range, Seed, Share
from semaug.util.untrusted import read_json, read_json_lines

FORMAT = 1  # of the run directory; raised when an older version of semaug would misread it
# Limits for folders from unknown sources: memory is allocated for these sizes before the weights are read.
MAX_CLASSES = 100_000


class Settings(TypedDict, total=False):
    """The part of config.json that is read back; in an exported folder much of it is absent."""

    model: Required[str]
    preprocessing: Required[Preprocessing]
    composite: Literal["p2p"] | None
    version: str
    data: str | None
    data_root: str | None
    base: str
    method: str
    epochs: Count
    seed: Seed
    select: Select
    val_per_class: CountOrZero | None
    val_fraction: Share
    on_bad_image: OnBadImage
    augmentation: dict[str, Any]


class _Evaluation(TypedDict, total=False):
    """The part of evaluation.json that is read back."""

    split: Required[str]
    best_epoch: Count
    count: int
    top1: Required[Accuracy]
    top5: Accuracy
    mean_class_accuracy: Accuracy
    macro_precision: Accuracy
    macro_f1: Accuracy
    cross_entropy: float
    calibration_error: float
    best_of_test: Accuracy


class Epoch(TypedDict, total=False):
    """The part of a line of metrics.jsonl that is read back."""

    epoch: Count
    seconds: NotNegative
    train_accuracy: Accuracy
    val_top1: Accuracy
    val_mean_class_accuracy: Accuracy


class Reliability(TypedDict):
    """How far confidence is from accuracy."""

    cross_entropy: NotNegative
    calibration_error: Accuracy
    bins: list[tuple[CountOrZero, Accuracy, Accuracy]]  # images, mean confidence and accuracy


class Calibration(TypedDict):
    """The content of calibration.json."""

    temperature: Annotated[float, Range(0.01, 100)]
    images: Count  # of the validation split
    before: NotRequired[Reliability]  # on these images, without the temperature; absent in an exported folder, as is …
    after: NotRequired[Reliability]  # … with it
    right: list[Accuracy]  # confidence, with the temperature, of each right answer on these images
    wrong: list[Accuracy]  # and of each wrong one


class Description(NamedTuple):
    """Description of a network in a run directory or an exported folder."""

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
        raise RunError(f"{file} does not describe the preprocessing of images") from error
    verify(folder, "config.json", "classes.json")
    return Description(config["model"], tuple(classes), preprocessing, config)


def read_evaluation(run: Path) -> dict[str, Any] | None:
    """Read the scores in the evaluation.json of a run directory; None if there is none."""
    content: dict[str, Any] | None = _read_verified(run / "evaluation.json", _Evaluation)
    return content


def read_calibration(folder: Path) -> Calibration | None:
    """Read calibration.json of a run directory or an exported folder; None if there is none."""
    try:
        content: Calibration | None = _read_verified(folder / "calibration.json", Calibration)
    except RunError as error:  # also if calibrating was interrupted
        raise RunError(f"{error}; delete it, and calibrate the run again") from error
    return content


def _read_verified(file: Path, form: Any) -> Any:
    """The content of a JSON file that has a checksum in the manifest beside it; None if there is no such file."""
    if not file.exists():
        return None
    content = read_json(file, form)
    verify(file.parent, file.name)
    return content


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of all epochs of a run directory, in order; none if no epoch has finished."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    rows = read_json_lines(file, Epoch)
    if (run / MANIFEST).is_file() and file.name in read_manifest(run)["files"]:  # from the end of training on
        verify(run, file.name)
    return rows


def split_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select from a run's config.json the keyword arguments of :func:`semaug.data.readers.training_splits`."""
    names = ("select", "val_per_class", "val_fraction", "seed")
    return {name: config[name] for name in names if name in config}


def read_run_dataset(folder: Path | None, config: Mapping[str, Any], root: Path | None = None) -> DataSet:
    """Read the data set that a run was trained on, also from another working directory.

    Args:
        folder: The run directory or exported folder, or None.
        config: Its config.json.
        root: Folder of the named data sets. Default: that of the training.

    Returns:
        The data set. Relative paths begin where the training was started or, if there is nothing, here.

    Raises:
        RunError: The run does not say which data it was trained on.
        DataError: The data set is missing, damaged or incomplete.
    """
    if config.get("data") is None:
        raise RunError(f"{folder or 'the run'} does not record its training data; name the images with `data`")
    base = folder / config["base"] if folder is not None and "base" in config else Path()

    name, stored = config["data"], config.get("data_root")
    if name == "birds" or name in KNOWN:
        known = data_root(None if stored is None else Path(stored))
        return read_data(name, root or (base / known if os.path.exists(base / known) else known))
    path = Path(os.path.expanduser(name))
    places = [place for place in (base / path, path) if os.path.exists(place)]
    if not places:
        raise DataError(
            f"the images that {folder} was trained on are neither at {shown(os.path.normpath(base / path))} nor at "
            f"{shown(name)}; run the command in the folder that has them"
        )
    return read_data(str(places[0]))


def changed_images(folder: Path | None, data: DataSet) -> str | None:
    """Compare images with those that a run was trained on, by the fingerprint in its manifest.json.

    Args:
        folder: The run directory or exported folder, or None.
        data: The data set, as :func:`read_run_dataset` returns it.

    Returns:
        A sentence if they differ, as after images were added, or where a moved run reaches other images under the same
        name; None if they are the same, or the folder has no fingerprint.
    """
    stored = None if folder is None else read_manifest(folder).get("data")
    if stored is None or stored == data.fingerprint():
        return None
    return f"the images of {data.name} are not those that {folder} was trained on (names, sizes or labels)"


def write_split(folder: Path, data: DataSet, settings: Mapping[str, Any]) -> None:
    """Write the validation images of a run to split.json; if they are a split of the data set, remove an old one.

    Args:
        folder: The run directory.
        data: The data set.
        settings: As :func:`split_settings` returns them.
    """
    if settings.get("select", "val") != "val" or "val" in data.splits:
        (folder / "split.json").unlink(missing_ok=True)
        return
    held_out = training_splits(data, **settings)["val"]
    names: dict[str, list[str]] = {}
    for i, label in enumerate(held_out.labels):
        names.setdefault(data.classes[label], []).append(held_out.name(i))
    write_json(folder / "split.json", names)


def shared_splits(
    runs: Sequence[tuple[Path | None, Mapping[str, Any]]], data: DataSet, *, for_test: bool = False
) -> dict[str, Samples]:
    """The splits of several runs on the same data, which must have held out the same validation images.

    Args:
        runs: Folder and config.json of each, as for :func:`splits_of_run`.
        data: The data set.
        for_test: Whether only the test split is used; the runs may have held out different images then.

    Raises:
        RunError: If the runs were trained on different data, or held out different images.
        DataError: See :func:`splits_of_run`.
    """
    for folder, config in runs[1:]:
        if not _have_same_data(runs[0], (folder, config)):
            raise RunError(f"{folder} and {runs[0][0]} were trained on different data; name the images with `data`")
    splits = [splits_of_run(folder, config, data) for folder, config in runs]
    held_out = [{own["val"].name(i) for i in range(len(own["val"]))} if "val" in own else set() for own in splits]
    for (folder, _), names in zip(runs[1:], held_out[1:], strict=True):
        if not for_test and names != held_out[0]:
            raise RunError(
                f"{folder} was trained on images that {runs[0][0]} held out for validation; train runs with the same "
                "`seed`, or on data with a validation split of its own"
            )
    return splits[0]


def _have_same_data(*runs: tuple[Path | None, Mapping[str, Any]]) -> bool:
    """Whether runs have the same fingerprint of their data or, if one has none, the same name of the data."""
    fingerprints = {None if folder is None else read_manifest(folder).get("data") for folder, _ in runs}
    return len({config.get("data") for _, config in runs} if None in fingerprints else fingerprints) == 1


def splits_of_run(folder: Path | None, config: Mapping[str, Any], data: DataSet) -> dict[str, Samples]:
    """The splits of a run, with the validation images that it held out; images added since count as training images.

    Args:
        folder: The run directory or exported folder; None for a classifier without one, whose validation images are
            drawn.
        config: Its config.json.
        data: The data set.

    Returns:
        "train", "val" and, if the data set has one, "test". An exported folder has no split.json: if its validation
        images were drawn, it is unknown which, and there is no "val".

    Raises:
        DataError: Validation images of the run are missing or have other labels now.
        FileError: split.json is missing.
        SettingError: There is no test split to select on.
    """
    if folder is None or config.get("select", "val") != "val" or "val" in data.splits:
        return training_splits(data, **split_settings(config))
    splits = dict(data.splits)
    if "split.json" not in read_manifest(folder)["files"]:
        return splits
    wanted, pool, keys = _held_out(folder), data.splits["train"], _training_images(data)
    missing = sorted(wanted - set(keys))
    if missing:
        names = some(name for _, name in missing)
        raise DataError(f"validation images of {folder} are missing or have another label in {data.name}: {names}")
    splits["val"] = Subset(pool, [i for i, key in enumerate(keys) if key in wanted])
    splits["train"] = Subset(pool, [i for i, key in enumerate(keys) if key not in wanted])
    return splits


def _held_out(folder: Path) -> set[tuple[str, str]]:
    """Class and name of each validation image that split.json lists."""
    verify(folder, "split.json")
    stored: dict[str, list[str]] = read_json(folder / "split.json", dict[str, list[str]])
    return {(label, name) for label, names in stored.items() for name in names}


def _training_images(data: DataSet) -> list[tuple[str, str]]:
    """Class and name of each training image."""
    return [(data.classes[label], data.splits["train"].name(i)) for i, label in enumerate(data.splits["train"].labels)]


def origin_of_weights(weights: Path) -> Path | None:
    """The run directory or exported folder that weights come from; None for another file."""
    if weights.name != "model.safetensors":
        return weights if (weights / MANIFEST).is_file() else None
    try:  # a file of this name may lie beside the manifest.json of another program
        is_signed = weights.name in read_manifest(weights.parent)["files"]
    except FileError:
        return None
    return weights.parent if is_signed else None


def check_not_trained_on(origin: Path, config: Mapping[str, Any], data: DataSet, fingerprint: str) -> str | None:
    """Check that the run whose weights another one starts from was not trained on that one's validation images.

    Args:
        origin: Run directory or exported folder with the weights.
        config: Settings of the new run.
        data: Its data set.
        fingerprint: The fingerprint of that.

    Returns:
        A warning if it is unknown which of the images the weights were trained on: those of an exported folder, or of a
        run before images were added, removed or changed. None if the data is another one: its name differs, and it
        lacks images that the earlier run held out.

    Raises:
        RunError: The weights were trained on some of the validation images.
    """
    if config.get("select", "val") != "val" or "val" in data.splits:
        return None
    earlier, manifest = read_description(origin).config, read_manifest(origin)
    is_same = manifest.get("data") == fingerprint
    if not is_same or "run" not in manifest:  # an exported folder does not say which images were held out
        names_of_data = {Path(os.path.normpath(str(own.get("data")))).name for own in (earlier, config)}
        held_out_before = _held_out(origin) if "split.json" in manifest["files"] else None
        is_grown = held_out_before is not None and held_out_before <= set(_training_images(data))
        if len(names_of_data) > 1 and not is_same and not is_grown:
            return None
        why = "they have changed since" if "run" in manifest else "it was exported"
        return (
            f"it is unknown on which images of {data.name} {origin} was trained, because {why}; if this run holds out "
            "some of them for validation, its validation accuracy is too high"
        )
    trained = splits_of_run(origin, earlier, data)["train"]
    held_out = training_splits(data, **split_settings(config))["val"]
    names = {trained.name(i) for i in range(len(trained))}
    count = sum(held_out.name(i) in names for i in range(len(held_out)))
    if count:
        raise RunError(
            f"{origin} was trained on {count} of the {len(held_out)} images that this run would hold out for "
            "validation; use the seed and validation settings of that run, other `weights`, or data with a validation "
            "split of its own"
        )
    return None
