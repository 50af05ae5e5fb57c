"""The images of a training run: read the data set, check it, and decode the images."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from semaug.data.cache import cache_file, check_free_space, decoded, note_use
from semaug.data.images import Preprocessing
from semaug.data.readable import readable_splits
from semaug.data.readers import read_data, training_splits
from semaug.data.samples import DataSet, Samples
from semaug.inference.runs import split_settings
from semaug.training.batches import Images
from semaug.training.settings import TrainConfig, required
from semaug.util.errors import DataError
from semaug.util.files import expanded
from semaug.util.progress import Progress


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    classes: tuple[str, ...]
    splits: dict[str, Samples]  # "train", "val" and, if the data set has one, "test"
    train: Images
    val: Images
    preprocessing: Preprocessing  # how they become inputs of the network

    @property
    def class_images(self) -> list[int]:
        """Number of training images of each class."""
        return class_images(self.splits["train"], len(self.classes))


def class_images(samples: Samples, classes: int) -> list[int]:
    """Count the images of each class in a split."""
    counts = Counter(samples.labels)
    return [counts[label] for label in range(classes)]


def read_run_data(config: TrainConfig, progress: Progress) -> DataSet:
    """Read which images the data set of a run has.

    Raises:
        DataError: If the data set cannot be read, or has a single class.
    """
    output, folder = required(config.output), Path(os.path.expanduser(config.data))
    try:
        with progress.task(f"fetching {config.data}", 0) as advance:
            dataset = read_data(config.data, config.data_root, download=config.download, progress=advance)
    except DataError as error:
        if config.data and output.resolve().is_relative_to(folder.resolve()):  # where it is taken for a class
            raise DataError(f"{error}; {output} is inside the data: choose another `output`") from error
        raise
    if len(dataset.classes) < 2:
        raise DataError(f"{dataset.name} has a single class; training needs at least two")
    return dataset


def load_run_data(
    config: TrainConfig, dataset: DataSet, device: torch.device, progress: Progress, listing: Path | None
) -> RunData:
    """Decode the training and validation images of a run.

    Args:
        config: Resolved settings of the run.
        dataset: Its data set.
        device: Device of the network; it also holds the decoded images if they fit.
        progress: Shows progress and messages.
        listing: File for a list of unreadable images; None to write none.

    Returns:
        The data. With ``images_on="stream"``, and for a linear probe, nothing is decoded yet.

    Raises:
        DataError: If images cannot be read.
    """
    splits = training_splits(dataset, **split_settings(vars(config)))
    streams, preprocessing = config.images_on == "stream" or config.freeze == "all", config.preprocessing
    cache = None if config.cache is None else expanded(config.cache)
    hint = None if streams else check_free_space(splits, preprocessing, cache)
    if hint is not None:
        progress.say(hint)
    if not streams or config.on_bad_image == "skip":  # else the first unreadable image ends training when it is needed
        with progress.task("reading images", 0) as advance:
            splits, hint = readable_splits(
                splits, dataset.classes, preprocessing, config.on_bad_image,
                cache=cache, workers=config.workers, progress=advance, listing=listing, keep=not streams,
            )  # fmt: skip
        if hint is not None:
            progress.say(hint)
    counts = ", ".join(f"{len(samples)} {name}" for name, samples in splits.items())
    progress.say(f"{dataset.name}: {len(dataset.classes)} classes, {counts} images")

    def decode(split: str) -> Images:
        if streams:
            return splits[split]
        with progress.task(f"decoding {split}", len(splits[split])) as advance:
            pixels = decoded(splits[split], preprocessing, cache, config.workers, advance)
        if cache is not None:
            place = os.path.abspath(config.data) if os.path.exists(config.data) else dataset.name
            note_use(cache_file(splits[split], preprocessing, cache), f"{place}, {split}")
        return placed(pixels, config, device)

    return RunData(dataset.classes, splits, decode("train"), decode("val"), preprocessing)


def placed(images: Tensor, config: TrainConfig, device: torch.device) -> Tensor:
    """Move decoded images, or features, to the device if the settings say so or they take less than half of it."""
    if device.type != "cuda" or config.images_on == "ram":
        return images
    if config.images_on is None and images.nbytes > torch.cuda.mem_get_info(device)[0] / 2:
        return images
    return images.to(device)
