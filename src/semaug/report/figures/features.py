"""The images of a figure: which ones, their thumbnails, and their features under networks."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from semaug.data.images import ProgressCallback
from semaug.data.readable import readable_splits
from semaug.data.samples import Samples, subset
from semaug.inference.classifier import Classifier
from semaug.inference.evaluation import match_classes
from semaug.inference.loop import decode_samples
from semaug.inference.runs import read_run_dataset, splits_of_run
from semaug.util.errors import DataError, TrainingError
from semaug.util.progress import Progress

_BATCH = 32


def run_images(classifier: Classifier, split: Literal["train", "evaluation"] = "evaluation") -> Samples:
    """Open the images that a run was trained or evaluated on, labelled by its classes.

    Evaluation is the test split, or the validation split if there is no test split. Images that training skipped are
    left out.

    Raises:
        RunError: If the run does not say which data it was trained on.
    """
    config = classifier.config
    data = read_run_dataset(classifier.folder, config)
    splits = splits_of_run(classifier.folder, config, data)
    name = "train" if split == "train" else "test" if "test" in splits else "val"
    samples = splits[name]
    if config.get("on_bad_image") == "skip":
        # without the cache that the settings name: a run of unknown origin must not choose what is read and written
        readable, message = readable_splits({name: samples}, data.classes, classifier.preprocessing, "skip")
        samples = readable[name]
        if message is not None:
            Progress().say(message)
    relabelled, order = subset(samples, range(len(samples))), match_classes(classifier.classes, data.classes)
    for i, label in enumerate(samples.labels):
        relabelled.labels[i] = order[label]
    return relabelled


def choose_images(samples: Samples, limit: int, seed: int, classes: Sequence[int] | None = None) -> list[int]:
    """Choose images at random, as evenly from the classes as possible.

    Args:
        samples: The images.
        limit: Most images to choose.
        seed: Seed of the choice.
        classes: Classes to choose from; all by default.

    Returns:
        Indices of the chosen images, in order.
    """
    wanted = set(samples.labels if classes is None else classes)
    indices = [i for i, label in enumerate(samples.labels) if label in wanted]
    if len(indices) <= limit:
        return indices
    by_class: dict[int, list[int]] = {}
    for i in np.random.default_rng(seed).permutation(indices).tolist():
        by_class.setdefault(samples.labels[i], []).append(i)
    # the first image of each class, then the second of each, and so on
    turns = sorted((turn, i) for members in by_class.values() for turn, i in enumerate(members))
    return sorted(i for _, i in turns[:limit])


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """Images and their features."""

    labels: Tensor  # (N,)
    names: tuple[str, ...]
    features: dict[str, Tensor]  # (N, D) by name of the function
    thumbnails: npt.NDArray[np.uint8]  # (N, side, side, 3)
    digests: tuple[bytes, ...]  # of the pixels, equal for equal images


def compute_features(
    samples: Samples,
    indices: Sequence[int],
    classifier: Classifier,
    functions: Mapping[str, Callable[[Tensor], Tensor]],
    side: int = 96,
    progress: ProgressCallback | None = None,
) -> ImageFeatures:
    """Compute features of images under several functions; each image is loaded once.

    Args:
        samples: The images.
        indices: Which of them.
        classifier: Its preprocessing prepares the pixels.
        functions: By name, from pixels uint8 (N, resize, resize, 3) to features (N, D).
        side: Side of the thumbnails.
        progress: Called with the numbers of finished and of all images.

    Raises:
        DataError: If there is no image, or one cannot be read.
        TrainingError: If features are not finite.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in functions}
    thumbnails, digests = [], []
    for pixels in decode_samples(samples, indices, classifier.preprocessing, _BATCH):
        digests += [hashlib.sha256(p.tobytes()).digest() for p in pixels]
        thumbnails += [np.asarray(Image.fromarray(p).resize((side, side), Image.Resampling.BOX)) for p in pixels]
        stacked = torch.from_numpy(np.stack(pixels))
        for name, function in functions.items():
            parts[name].append(function(stacked))
        if progress is not None:
            progress(len(thumbnails), len(indices))
    if not thumbnails:
        raise DataError("there are no images to show")
    features = {name: torch.cat(own) for name, own in parts.items()}
    for name, values in features.items():
        if not values.isfinite().all():
            raise TrainingError(f"the features of {name} are not finite numbers: its training has diverged")
    labels = torch.tensor([samples.labels[i] for i in indices])
    names = tuple(samples.name(i) for i in indices)
    return ImageFeatures(labels, names, features, np.stack(thumbnails), tuple(digests))
