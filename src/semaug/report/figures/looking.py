"""The images of a figure: which ones, and what networks see in them."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from semaug.data.images import ProgressCallback
from semaug.data.readable import readable_splits
from semaug.data.readers import read_data, training_splits
from semaug.data.samples import Samples
from semaug.inference.classifier import Classifier
from semaug.inference.evaluation import match_classes
from semaug.inference.runs import split_settings
from semaug.util.errors import SemaugError
from semaug.util.progress import Progress

BATCH = 32

Look = Callable[[Tensor], Tensor]
"""From the pixels of a batch, uint8 (N, resize, resize, 3), to features (N, D)."""


def run_samples(classifier: Classifier, split: Literal["train", "evaluation"] = "evaluation") -> Samples:
    """The images that a run was evaluated on (the test split, or without one the validation split), or trained on.

    Labels are indices of the run's own classes. Where the run was trained without images that cannot be read, these are
    left out here too.
    """
    config = classifier.config
    if config.get("data") is None:
        raise SemaugError("the run does not say what it was trained on; give it the images")
    root = config.get("data_root")
    data = read_data(config["data"], None if root is None else Path(root))
    splits = training_splits(data, **split_settings(config))
    name = "train" if split == "train" else "test" if "test" in splits else "val"
    found = splits[name]
    if config.get("on_bad_image") == "skip":
        cache = Path(config["cache"]).expanduser() if config.get("cache") is not None else None
        left, told = readable_splits(
            {name: found}, data.classes, classifier.preprocessing, "skip",
            cache=cache if cache is not None and cache.is_dir() else None,  # in which training has noted them
            workers=config.get("workers", 0),
        )  # fmt: skip
        found = left[name]
        if told is not None:
            Progress().say(told)
    order = match_classes(classifier.classes, data.classes)
    return _Relabelled(found, tuple(order[label] for label in found.labels))


@dataclass(frozen=True)
class _Relabelled:
    """Images with the indices that their classes have in a run."""

    whole: Samples
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, i: int) -> Image.Image:
        return self.whole.load(i)

    def name(self, i: int) -> str:
        return self.whole.name(i)

    def fingerprint(self) -> str:
        return self.whole.fingerprint()


def with_images(classes: Sequence[int], samples: Samples) -> list[int]:
    """Those of the classes that have images; there must be two."""
    present = set(samples.labels)
    found = [label for label in classes if label in present]
    if len(found) < 2:
        raise SemaugError(f"only {len(found)} of the {len(classes)} classes of the group have images here")
    return found


def choose(samples: Samples, limit: int, seed: int, classes: Sequence[int] | None = None) -> list[int]:
    """At most `limit` images of all classes or of some, as many of each as possible, drawn at random."""
    wanted = None if classes is None else set(classes)
    indices = [i for i, label in enumerate(samples.labels) if wanted is None or label in wanted]
    if len(indices) <= limit:
        return indices
    # class by class in turns, so that no class loses all of its images
    order: dict[int, list[int]] = {}
    for i in np.random.default_rng(seed).permutation(indices).tolist():
        order.setdefault(samples.labels[i], []).append(i)
    turns = sorted((turn, i) for members in order.values() for turn, i in enumerate(members))
    return sorted(i for _, i in turns[:limit])


@dataclass(frozen=True, eq=False)
class Seen:
    """Images as seen by one or several networks."""

    indices: tuple[int, ...]  # among the samples
    labels: Tensor  # (N,)
    names: tuple[str, ...]
    features: dict[str, Tensor]  # by look: (N, D)
    thumbnails: npt.NDArray[np.uint8]  # (N, side, side, 3)
    same: tuple[bytes, ...]  # a digest of each image: equal for the same pixels


def look(
    samples: Samples,
    indices: Sequence[int],
    classifier: Classifier,
    looks: Mapping[str, Look],
    side: int = 96,
    progress: ProgressCallback | None = None,
) -> Seen:
    """Load each image once, batch by batch, and keep its features under every look, and a thumbnail.

    All looks see the pixels that `classifier` asks for.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in looks}
    thumbnails, digests = [], []
    for batch in _batches(samples, indices):
        pixels = [classifier.preprocessing.pixels(image) for image in batch]
        digests += [hashlib.sha256(p.tobytes()).digest() for p in pixels]
        thumbnails += [np.asarray(Image.fromarray(p).resize((side, side), Image.Resampling.BOX)) for p in pixels]
        stacked = torch.from_numpy(np.stack(pixels))
        for name, see in looks.items():
            found[name].append(see(stacked))
        if progress is not None:
            progress(len(thumbnails), len(indices))
    if not thumbnails:
        raise SemaugError("there are no images to show")
    features = {name: torch.cat(parts) for name, parts in found.items()}
    for name, values in features.items():
        if not values.isfinite().all():
            raise SemaugError(f"the features of {name} are not finite numbers: its training has diverged")
    labels = torch.tensor([samples.labels[i] for i in indices])
    names = tuple(samples.name(i) for i in indices)
    return Seen(tuple(indices), labels, names, features, np.stack(thumbnails), tuple(digests))


def _batches(samples: Samples, indices: Sequence[int]) -> Iterator[list[Image.Image]]:
    for start in range(0, len(indices), BATCH):
        images = []
        for i in indices[start : start + BATCH]:
            try:
                images.append(samples.load(i))
            except (OSError, ValueError, SyntaxError) as error:  # of samples that do not report it themselves
                raise SemaugError(f"cannot read the image {samples.name(i)}: {error}") from error
        yield images
