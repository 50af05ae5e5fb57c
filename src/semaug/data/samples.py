"""What a data set is to the rest of the library: classes, and splits of images with labels."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from PIL import Image, ImageOps

from semaug.data import birds
from semaug.errors import UserError


class Samples(Protocol):
    """The images of one split, in a fixed order, with the index of each one's class."""

    @property
    def labels(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def load(self, i: int) -> Image.Image:
        """Image `i` in RGB, upright."""

    def name(self, i: int) -> str:
        """A name for image `i` that a person recognises: its path, as a rule."""

    def fingerprint(self) -> str:
        """A digest that changes whenever any of the images does, without reading them all."""


@dataclass(frozen=True)
class DataSet:
    """Class names, and the splits ("train", and "val" or "test" where the data set has them)."""

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Samples]


def load_image(path: Path) -> Image.Image:
    """The image in a file, in RGB and turned upright; a :class:`UserError` if it cannot be read."""
    try:
        with Image.open(path) as image:
            image.load()
            return _upright(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        raise UserError(f"cannot read the image {path}: {error}") from error


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF data say; as it is where these are damaged."""
    try:
        return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, struct.error):
        return image


@dataclass(frozen=True)
class ImageFiles:
    """Images in files; names are relative to `root`."""

    root: Path
    files: tuple[Path, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def load(self, i: int) -> Image.Image:
        return load_image(self.files[i])

    def name(self, i: int) -> str:
        file = self.files[i]
        return str(file.relative_to(self.root)) if file.is_relative_to(self.root) else str(file)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for i, file in enumerate(self.files):
            status = file.stat()
            digest.update(f"{self.name(i)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class DrawnBirds:
    """A split of the embedded data set, drawn when asked for."""

    birds: birds.Birds
    labels: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(int(label) for label in self.birds.labels))

    def __len__(self) -> int:
        return len(self.birds)

    def load(self, i: int) -> Image.Image:
        return Image.fromarray(self.birds.drawing(i).image)

    def name(self, i: int) -> str:
        return f"{self.birds.split}/{self.birds.classes[self.labels[i]]}/{i}"

    def fingerprint(self) -> str:
        b = self.birds
        parameters = (birds.VERSION, b.split, len(b.species), len(b), b.size, b.seed)
        return hashlib.sha256(repr(parameters).encode()).hexdigest()


def embedded_birds(
    num_species: int = 20, train_per_species: int = 40, test_per_species: int = 20, size: int = 96, seed: int = 0
) -> DataSet:
    """The embedded data set: procedural birds, split into "train" and "test"."""
    counts = {"train": train_per_species, "test": test_per_species}
    splits: dict[str, Samples] = {
        split: DrawnBirds(birds.Birds(num_species, count, split, size, seed)) for split, count in counts.items()
    }
    return DataSet("birds", tuple(birds.Birds(num_species, 1, "train", size, seed).classes), splits)


def subset(samples: Samples, indices: Sequence[int]) -> "Subset":
    """The images of `samples` at `indices`, in that order."""
    return Subset(samples, tuple(indices))


@dataclass(frozen=True)
class Subset:
    """Some of the images of a split."""

    whole: Samples
    indices: tuple[int, ...]
    labels: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(self.whole.labels[i] for i in self.indices))

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, i: int) -> Image.Image:
        return self.whole.load(self.indices[i])

    def name(self, i: int) -> str:
        return self.whole.name(self.indices[i])

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.whole.fingerprint()}{self.indices}".encode()).hexdigest()
