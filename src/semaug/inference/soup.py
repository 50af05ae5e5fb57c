"""Greedy soups: average the weights of runs, adding each that improves validation (Wortsman et al., ICML 2022)."""

import copy
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.optim.swa_utils import update_bn

from semaug.data.readable import readable_splits
from semaug.data.samples import DataSet, Samples
from semaug.inference.classifier import Classifier, load_classifier
from semaug.inference.evaluation import evaluate
from semaug.inference.loop import decode_samples
from semaug.inference.manifest import FILES, read_manifest, sign
from semaug.inference.manifest import NAME as MANIFEST
from semaug.inference.pictures import sample_pictures
from semaug.inference.runs import changed_images, read_run_dataset, shared_splits
from semaug.util.errors import FileError, RunError
from semaug.util.files import write_atomically, write_json
from semaug.util.locks import LOCK, locked
from semaug.util.names import percent
from semaug.util.untrusted import read_json

_OUR_FILES = {*FILES, "samples.json"}


@dataclass(frozen=True)
class Soup:
    """The result of :func:`soup`."""

    ingredients: tuple[Path, ...]  # the runs whose weights are averaged, the best first; a single one if none helped
    best: float  # validation accuracy of the best run
    accuracy: float  # of the average


def soup(
    runs: Sequence[Path],
    output: Path,
    device: str = "cpu",
    batch_size: int = 64,
    say: Callable[[str], None] = lambda message: None,
) -> Soup:
    """Average the weights of runs, in the order of their validation accuracy, and write the average as a run.

    A run is added if the average with it validates better than without. The statistics of BatchNorm do not average:
    they are computed again, from the training images. If no average is better than the best run, nothing is written.

    Args:
        runs: Run directories of one architecture that held out the same validation images, at least two.
        output: The run directory to write; new or empty.
        device: Where to compute.
        batch_size: Images per batch, ≥ 2.
        say: Called with a message about each run.

    Returns:
        Which runs are in the average, and its validation accuracy.

    Raises:
        RunError: If the runs do not go together, or have no validation images.
        FileError: If the output is not empty.

    Example:
        >>> soup([Path("runs/a"), Path("runs/b")], Path("runs/soup"))  # doctest: +SKIP
    """
    _refuse_content(output)
    places = [run.resolve() for run in runs]
    twice = next((run for run, place in zip(runs, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise RunError(f"the run {twice} is named twice")
    members = [load_classifier(run, device) for run in runs]
    data, splits = _common_data(members)
    if (changed := changed_images(members[0].folder, data)) is not None:
        say(f"warning: {changed}")
    if members[0].config.get("on_bad_image") == "skip":
        splits, message = readable_splits(splits, data.classes, members[0].preprocessing, "skip")
        if message is not None:
            say(message)
    accuracy = "mean_class_accuracy" if members[0].config.get("select_by") == "mean-of-classes" else "top1"

    def validated(classifier: Classifier) -> float:
        result = evaluate(classifier, splits["val"], batch_size, data_classes=data.classes)
        return result.scores.numbers()[accuracy]

    scores = {id(member): validated(member) for member in members}
    first, *others = sorted(members, key=lambda member: -scores[id(member)])  # equal ones in the order of the user
    best = score = scores[id(first)]
    say(f"{first.folder}: {percent(score, 2)} on validation, the best")
    chosen, kept = [first], first
    for other in others:
        average = _average([*chosen, other], splits["train"], batch_size)
        reached = validated(average)
        say(f"{other.folder}: {percent(scores[id(other)], 2)} alone, {percent(reached, 2)} in the average")
        if reached > score:
            chosen, kept, score = [*chosen, other], average, reached
    folders = tuple(member.folder for member in chosen if member.folder is not None)
    if len(chosen) > 1:
        _write(output, replace(kept, folder=output), folders, data, splits)
    return Soup(folders, best, score)


def _refuse_content(output: Path) -> None:
    """Refuse an output that is a file, or that holds anything but a soup whose writing was interrupted."""
    if not output.exists():
        return
    names = {file.name for file in output.iterdir() if file.suffix != ".part"} - {LOCK} if output.is_dir() else {""}
    if "config.json" in names and MANIFEST not in names and names <= _OUR_FILES:
        with suppress(FileError):
            names = set() if "soup" in read_json(output / "config.json", dict[str, object]) else names
    if names:
        raise FileError(f"{output} is not empty; choose another `output`")


def _common_data(members: Sequence[Classifier]) -> tuple[DataSet, dict[str, Samples]]:
    """The data of runs of one architecture, and the splits that they share."""
    first = members[0]
    for member in members:
        if (member.name, member.config.get("composite")) != (first.name, first.config.get("composite")):
            raise RunError(f"{member.folder} holds a {member.name} and {first.folder} a {first.name}, whose weights "
                           "cannot be averaged")  # fmt: skip
        # crops for training may differ
        own, other = (replace(each.preprocessing, padding=0, crop_scale=None) for each in (member, first))
        if (member.classes, own) != (first.classes, other):
            raise RunError(f"{member.folder} and {first.folder} do not have the same classes and image sizes")
        if member.config.get("select", "val") != "val" or "run" not in member.config:
            raise RunError(f"{member.folder} held out no validation images, which a soup needs")
    data = read_run_dataset(first.folder, first.config)
    return data, shared_splits([(member.folder, member.config) for member in members], data)


def _average(members: Sequence[Classifier], train: Samples, batch_size: int) -> Classifier:
    first, model = members[0], copy.deepcopy(members[0].model)
    states = [member.model.state_dict() for member in members]
    mean = {name: torch.stack([state[name].double() for state in states]).mean(0).to(value.dtype)
            for name, value in states[0].items()}  # fmt: skip
    model.load_state_dict(mean)
    device = next(model.parameters()).device

    def inputs() -> Iterator[Tensor]:
        for pixels in decode_samples(train, range(len(train)), first.preprocessing, batch_size):
            if len(pixels) > 1:
                yield first.preprocessing.evaluation_input(pixels.to(device))

    update_bn(inputs(), model)  # reads no image if there is no BatchNorm
    return replace(first, model=model.eval(), temperature=1.0)


def _write(
    output: Path, classifier: Classifier, folders: Sequence[Path], data: DataSet, splits: dict[str, Samples]
) -> None:
    """Write the files of a run directory: settings of the best run, the average, and its evaluation."""
    best, split = folders[0], "test" if "test" in splits else "val"
    result = evaluate(classifier, splits[split], data_classes=data.classes)
    run, now = secrets.token_hex(8), datetime.now(UTC).isoformat(timespec="seconds")
    names = [str(folder.resolve()) for folder in folders]
    config = {**classifier.config, "run": run, "started": now, "output": str(output), "soup": names}
    if "base" in config:  # where relative paths begin, from the folder of the run
        config["base"] = os.path.relpath((best / config["base"]).resolve(), output.resolve())
    with locked(output):
        _refuse_content(output)  # another process may have written a run since the beginning
        write_json(output / "config.json", config)
        write_json(output / "classes.json", list(classifier.classes))
        if (best / "split.json").exists():
            write_json(output / "split.json", read_json(best / "split.json", dict[str, list[str]]))
        tensors = {name: value.detach().cpu().contiguous() for name, value in classifier.model.state_dict().items()}
        write_atomically(output / "model.safetensors", save(tensors))
        write_json(output / "samples.json", sample_pictures(classifier, splits[split], int(config.get("seed", 0))))
        write_json(output / "evaluation.json", {"split": split, **result.to_json()})
        sign(output, run=run, data=read_manifest(best).get("data"))
