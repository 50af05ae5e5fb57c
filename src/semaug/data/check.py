"""A report on a data set before training: its sizes and its problems."""

import dataclasses
import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from semaug.data.samples import DataSet, Samples, ignored_files, why_unreadable
from semaug.util.names import counted, folded, listed, printable
from semaug.util.processes import ordered_map
from semaug.util.progress import ProgressCallback

TINY_CLASS = 5
"""A class with fewer training images is reported."""
UNEVEN = 10
"""A largest class with so many times the training images of the smallest one is reported."""
NAMED = 3
"""Number of examples in the sentence about a problem."""


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum of some numbers."""

    minimum: float
    median: float
    maximum: float


@dataclass(frozen=True)
class SplitReport:
    """A split: its images, the classes that have some, images per such class, and sides of the readable ones."""

    images: int
    classes: int
    per_class: Spread | None
    widths: Spread | None
    heights: Spread | None


@dataclass(frozen=True)
class ImageName:
    """An image by split, name and class."""

    split: str
    name: str
    class_name: str


def image_name(data: DataSet, split: str, i: int) -> ImageName:
    """Name image `i` of a split."""
    samples = data.splits[split]
    return ImageName(split, samples.name(i), data.classes[samples.labels[i]])


@dataclass(frozen=True)
class UnreadableImage:
    """An image that cannot be decoded, and why."""

    image: ImageName
    reason: str


@dataclass(frozen=True)
class NearDuplicate:
    """Two images that look the same, and the cosine of their features."""

    first: ImageName
    second: ImageName
    similarity: float


@dataclass(frozen=True)
class Report:
    """The result of :func:`check_data`."""

    name: str
    classes: int
    splits: dict[str, SplitReport]
    unreadable: tuple[UnreadableImage, ...]
    duplicates_across: tuple[tuple[ImageName, ...], ...]
    """Groups of images with the same pixels that are in more than one split."""
    duplicates_within: tuple[tuple[ImageName, ...], ...]
    """The other groups of images with the same pixels."""
    missing_classes: dict[str, tuple[str, ...]]
    """By split, the classes that have images in another split but not in this one."""
    tiny_classes: dict[str, int]
    """Classes with fewer than TINY_CLASS training images, with their number."""
    ignored: dict[str, int]
    """Number of files of other types, by suffix."""
    same_names: tuple[tuple[str, ...], ...] = ()
    """Groups of classes whose names are the same by :func:`semaug.util.names.folded`."""
    near_duplicates: tuple[NearDuplicate, ...] = ()
    """Images of different splits that look the same (:mod:`semaug.data.near_duplicates`)."""

    @property
    def problems(self) -> list[str]:
        """A sentence about each problem, the most serious first."""
        problems: list[str] = []

        def report(
            things: Collection[Any], noun: str, what: str, example: Callable[[Any], str], verbs: str = "is are"
        ) -> None:
            if things:
                problems.append(f"{_count(things, noun, verbs)} {what}: {listed(map(example, things), NAMED)}.")

        if self.classes == 1:
            problems.append("There is a single class; training needs at least two.")

        groups = (*self.duplicates_across, *self.duplicates_within)
        contradictory = [group for group in groups if len({image.class_name for image in group}) > 1]
        why = "in more than one split, which makes the accuracy measured on them meaningless"
        report(self.duplicates_across, "image", why, _equal)
        alike = "alike, which makes the accuracy measured on them too good"
        report(self.near_duplicates, "pair of images", alike, _alike, "looks look")
        report(self.unreadable, "image", "unreadable", lambda item: f"{_place(item.image)} ({item.reason})")
        report(contradictory, "image", "in more than one class", _equal)
        stored = "only in case, spaces, zeros or how Unicode stores their letters"
        report(self.same_names, "group of classes", f"names that differ {stored}", _names, "has have")
        for split, missing in self.missing_classes.items():
            report(missing, "class", f"without images in {split}", printable)
        report(self.duplicates_within, "image", "more than once in a split", _equal)
        few = f"fewer than {TINY_CLASS} training images"
        sizes = [f"{printable(name)} ({count})" for name, count in self.tiny_classes.items()]
        report(sizes, "class", few, str, "has have")
        training = self.splits["train"].per_class if "train" in self.splits else None
        if training is not None and training.maximum >= UNEVEN * training.minimum:
            problems.append(
                f"The classes have {training.minimum:.0f} to {training.maximum:.0f} training images: train with a "
                "square-root sampler or class weights, and select by the mean of classes."
            )
        if self.ignored:
            problems.append(f"{ignored_files(self.ignored)}.")
        return problems

    def to_json(self) -> str:
        """The report and its problems as JSON."""
        return json.dumps(dataclasses.asdict(self) | {"problems": self.problems}, indent=2)


def check_data(data: DataSet, workers: int = 0, progress: ProgressCallback | None = None) -> Report:
    """Decode every image of a data set, and report on them.

    Images are the same if their pixels are, whatever their files.

    Args:
        data: The data set.
        workers: Number of processes; 0 decodes in this one.
        progress: Called with the number of images done and their total.

    Returns:
        The report.
    """
    total, done = sum(len(samples) for samples in data.splits.values()), 0
    splits: dict[str, SplitReport] = {}
    unreadable: list[UnreadableImage] = []
    by_digest: dict[bytes, list[tuple[str, int]]] = {}
    counts = {split: Counter(samples.labels) for split, samples in data.splits.items()}

    for split, samples in data.splits.items():
        sizes = []
        for i, result in enumerate(ordered_map(partial(_examine, samples), range(len(samples)), workers)):
            if isinstance(result, str):
                unreadable.append(UnreadableImage(image_name(data, split, i), result))
            else:
                sizes.append(result[:2])
                by_digest.setdefault(result[2], []).append((split, i))
            done += 1
            if progress is not None:
                progress(done, total)
        per_class = list(counts[split].values())
        widths, heights = ([size[side] for size in sizes] for side in (0, 1))
        splits[split] = SplitReport(len(samples), len(per_class), _spread(per_class), _spread(widths), _spread(heights))
    groups = [tuple(image_name(data, *place) for place in places) for places in by_digest.values() if len(places) > 1]
    present = set().union(*counts.values())
    missing = {
        split: tuple(data.classes[label] for label in sorted(present - count.keys())) for split, count in counts.items()
    }
    training = counts.get("train", Counter())
    return Report(
        name=data.name,
        classes=len(data.classes),
        splits=splits,
        unreadable=tuple(unreadable),
        duplicates_across=tuple(group for group in groups if len({image.split for image in group}) > 1),
        duplicates_within=tuple(group for group in groups if len({image.split for image in group}) == 1),
        missing_classes={split: names for split, names in missing.items() if names},
        tiny_classes={
            data.classes[label]: training[label] for label in sorted(training) if training[label] < TINY_CLASS
        },
        ignored=dict(data.ignored),
        same_names=_same_names(data.classes),
    )


def _same_names(classes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    by_key: dict[str, list[str]] = {}
    for name in classes:
        by_key.setdefault(folded(name), []).append(name)
    return tuple(tuple(group) for group in by_key.values() if len(group) > 1)


def _names(group: Sequence[str]) -> str:
    """Names that may look the same, in a form in which they differ."""
    return " = ".join(ascii(name) for name in group)


def _examine(samples: Samples, i: int) -> tuple[int, int, bytes] | str:
    """Width, height and a digest of the pixels of an image, or why it cannot be read."""
    try:
        image = samples.load(i)
        pixels = image.tobytes()
    except Exception as error:  # of whatever kind: the other images must still be checked
        return why_unreadable(error)
    digest = hashlib.blake2b(f"{image.width}x{image.height}".encode() + pixels, digest_size=16).digest()
    return image.width, image.height, digest


def _spread(numbers: Sequence[int]) -> Spread | None:
    return Spread(min(numbers), statistics.median(numbers), max(numbers)) if numbers else None


def _place(image: ImageName) -> str:
    return f"{image.split}: {printable(image.name)}"


def _alike(pair: NearDuplicate) -> str:
    return f"{_place(pair.first)} ≈ {_place(pair.second)} ({pair.similarity:.2f})"


def _equal(group: Sequence[ImageName]) -> str:
    several = len({image.class_name for image in group}) > 1
    places = (f"{_place(image)} ({printable(image.class_name)})" if several else _place(image) for image in group)
    return listed(places, NAMED, " = ")


def _count(things: Collection[Any], noun: str, verbs: str) -> str:
    """Such as "1 image is" and "2 images are", with the verbs "is are"."""
    singular, plural = verbs.split()
    return f"{counted(len(things), noun)} {singular if len(things) == 1 else plural}"
