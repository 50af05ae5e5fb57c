"""What there is to know about a data set before hours are spent on it: its sizes, and what is wrong with it."""

import dataclasses
import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from semaug.data.samples import DataSet, Samples, why_unreadable
from semaug.util.errors import printable
from semaug.util.processes import each

TINY_CLASS = 5
"""A class with fewer training images is reported."""
NAMED = 3
"""So many examples are named in the sentence about a problem."""


@dataclass(frozen=True)
class Spread:
    """The extent of some numbers."""

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
    """An image, by the split it is in, its name there, and its class."""

    split: str
    name: str
    class_name: str


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be decoded, and why."""

    image: ImageName
    reason: str


@dataclass(frozen=True)
class Report:
    """What :func:`check_data` found."""

    name: str
    classes: int
    splits: dict[str, SplitReport]
    unreadable: tuple[Unreadable, ...]
    duplicates_across: tuple[tuple[ImageName, ...], ...]
    """Groups of images with the same pixels that are in more than one split."""
    duplicates_within: tuple[tuple[ImageName, ...], ...]
    """The other groups of images with the same pixels."""
    missing_classes: dict[str, tuple[str, ...]]
    """By split, the classes that have images in another split but not in this one."""
    tiny_classes: dict[str, int]
    """Classes with fewer than TINY_CLASS training images, with their number."""

    @property
    def problems(self) -> list[str]:
        """A sentence for everything that should be looked at, the gravest first."""
        found = []
        if self.duplicates_across:
            examples = _some(_equal(group) for group in self.duplicates_across)
            found.append(
                f"{_count(self.duplicates_across, 'image')} in more than one split, which makes the accuracy measured "
                f"on them meaningless: {examples}."
            )
        if self.unreadable:
            examples = _some(f"{_place(item.image)} ({item.reason})" for item in self.unreadable)
            found.append(f"{_count(self.unreadable, 'image')} unreadable: {examples}.")
        groups = (*self.duplicates_across, *self.duplicates_within)
        contradictory = [group for group in groups if len({image.class_name for image in group}) > 1]
        if contradictory:
            examples = _some(_equal(group) for group in contradictory)
            found.append(f"{_count(contradictory, 'image')} in more than one class: {examples}.")
        for split, missing in self.missing_classes.items():
            found.append(f"{_count(missing, 'class')} without images in {split}: {_some(map(printable, missing))}.")
        if self.duplicates_within:
            examples = _some(_equal(group) for group in self.duplicates_within)
            found.append(f"{_count(self.duplicates_within, 'image')} more than once in a split: {examples}.")
        if self.tiny_classes:
            examples = _some(f"{printable(name)} ({count})" for name, count in self.tiny_classes.items())
            found.append(
                f"{_count(self.tiny_classes, 'class')} with fewer than {TINY_CLASS} training images: {examples}."
            )
        return found

    def to_json(self) -> str:
        """All of it, with the problems, as JSON."""
        return json.dumps(dataclasses.asdict(self) | {"problems": self.problems}, indent=2)


@dataclass(frozen=True)
class Examined:
    """One image: its size and a digest of its pixels, or why it cannot be read."""

    width: int
    height: int
    digest: bytes
    reason: str | None = None


def check_data(data: DataSet, workers: int = 0, progress: Callable[[int, int], None] | None = None) -> Report:
    """Decode every image of a data set, in `workers` processes (0: in this one), and report on them.

    Images are the same if their pixels are, whatever file they are in. `progress` is called with the number of images
    done and their total.
    """
    total, done = sum(len(samples) for samples in data.splits.values()), 0
    splits: dict[str, SplitReport] = {}
    unreadable: list[Unreadable] = []
    same: dict[bytes, list[tuple[str, int]]] = {}
    counts = {split: Counter(samples.labels) for split, samples in data.splits.items()}

    def named(split: str, i: int) -> ImageName:
        samples = data.splits[split]
        return ImageName(split, samples.name(i), data.classes[samples.labels[i]])

    for split, samples in data.splits.items():
        widths, heights = [], []
        for i, examined in enumerate(each(partial(_examine, samples), len(samples), workers)):
            if examined.reason is None:
                widths.append(examined.width)
                heights.append(examined.height)
                same.setdefault(examined.digest, []).append((split, i))
            else:
                unreadable.append(Unreadable(named(split, i), examined.reason))
            done += 1
            if progress is not None:
                progress(done, total)
        per_class = list(counts[split].values())
        splits[split] = SplitReport(len(samples), len(per_class), _spread(per_class), _spread(widths), _spread(heights))
    groups = [tuple(named(*place) for place in places) for places in same.values() if len(places) > 1]
    across = [group for group in groups if len({image.split for image in group}) > 1]
    within = [group for group in groups if len({image.split for image in group}) == 1]
    present = set().union(*counts.values())
    missing = {
        split: tuple(data.classes[label] for label in sorted(present - count.keys())) for split, count in counts.items()
    }
    training = counts.get("train", Counter())
    tiny = {data.classes[label]: training[label] for label in sorted(training) if training[label] < TINY_CLASS}
    return Report(
        name=data.name,
        classes=len(data.classes),
        splits=splits,
        unreadable=tuple(unreadable),
        duplicates_across=tuple(across),
        duplicates_within=tuple(within),
        missing_classes={split: names for split, names in missing.items() if names},
        tiny_classes=tiny,
    )


def _examine(samples: Samples, i: int) -> Examined:
    try:
        image = samples.load(i)
        pixels = image.tobytes()
    except Exception as error:  # decoders meet garbage with many kinds of exception, and the check has to go on
        return Examined(0, 0, b"", why_unreadable(error))
    digest = hashlib.blake2b(f"{image.width}x{image.height}".encode() + pixels, digest_size=16).digest()
    return Examined(image.width, image.height, digest)


def _spread(numbers: Sequence[int]) -> Spread | None:
    return Spread(min(numbers), statistics.median(numbers), max(numbers)) if numbers else None


def _place(image: ImageName) -> str:
    return f"{image.split}: {printable(image.name)}"


def _equal(group: Sequence[ImageName]) -> str:
    several = len({image.class_name for image in group}) > 1
    return _some(
        (f"{_place(image)} ({printable(image.class_name)})" if several else _place(image) for image in group), " = "
    )


def _count(things: Sequence[object] | dict[str, int], noun: str) -> str:
    """Such as: 1 image is, 2 images are."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"1 {noun} is" if len(things) == 1 else f"{len(things)} {plural} are"


def _some(examples: Iterable[str], separator: str = ", ") -> str:
    shown = list(examples)
    return separator.join(shown[:NAMED]) + (f" and {len(shown) - NAMED} more" if len(shown) > NAMED else "")
