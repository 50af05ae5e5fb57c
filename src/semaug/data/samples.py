"""What a data set is to the rest of the library: classes, and splits of images with labels."""

import hashlib
import io
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from semaug.data import birds
from semaug.util.errors import SemaugError, printable

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What an image may be in, whatever its name ends with. Pillow knows more, and runs Ghostscript for one (EPS)."""
IMAGE_SUFFIXES = frozenset((".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
MAX_PIXELS = 178_956_970
"""An image with more is refused before it is decoded: Pillow's own limit, kept where a program has lifted that."""


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


def load_image(path: Path | str) -> Image.Image:
    """The image in a file, in RGB and turned upright; a :class:`SemaugError` if it cannot be read.

    Of an animation it is the first frame; what is transparent becomes white.
    """
    return _loaded(lambda: _opened(_file(Path(path)), MAX_PIXELS), path)


def image_in(content: bytes, name: str = "", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The same of an image that is in memory; `name` is what to call it. One of more pixels is not decoded."""
    return _loaded(lambda: _opened(io.BytesIO(content), max_pixels), name)


def _loaded(opened: Callable[[], Image.Image], name: Path | str) -> Image.Image:
    try:
        with opened() as image:
            image.load()
            return _in_rgb(_upright(image))
    except Exception as error:  # decoders meet garbage with many kinds of exception
        what = f"the image {printable(name)}" if name else "the image"
        raise SemaugError(f"cannot read {what}: {why_unreadable(error)}") from error


def why_unreadable(error: Exception) -> str:
    """Why an image cannot be read, on one line: what :func:`load_image` or a decoder raised, without the path."""
    cause = error.__cause__ if isinstance(error, SemaugError) and error.__cause__ else error
    text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
    return printable(" ".join(text.split())) or type(cause).__name__


def _file(path: Path) -> Path:
    if not path.is_file():  # a pipe would wait for a writer for ever
        raise OSError("it is not a file" if path.exists() else "there is no such file")
    if path.stat().st_size == 0:
        raise OSError("the file is empty")
    return path


def _opened(source: Path | BinaryIO, max_pixels: int) -> Image.Image:
    """An image of which nothing is decoded yet."""
    try:
        image = Image.open(source, formats=_formats())
    except UnidentifiedImageError as error:
        raise OSError("it is not an image, or in a format that is not known") from error
    except Image.DecompressionBombError as error:
        raise OSError(f"it has more than {max_pixels} pixels") from error
    if image.width * image.height > max_pixels or _tile_pixels(image) > max_pixels:
        image.close()
        raise OSError(f"it has more than {max_pixels} pixels")
    return image


@cache
def _formats() -> tuple[str, ...]:
    """Those of the formats that this Pillow knows."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _tile_pixels(image: Image.Image) -> int:
    """The size of the tiles of a TIFF file, which are decoded whole, however small the image is."""
    tags = getattr(image, "tag_v2", {})
    return int(tags.get(322, 0)) * int(tags.get(323, 0))


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF data say; as it is where these are damaged."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # as many kinds as there are ways to damage them
        return image


def _in_rgb(image: Image.Image) -> Image.Image:
    """The image in 8 bits per colour, on white where it is transparent."""
    if image.mode.startswith(("I", "F")):
        return _from_deep_grey(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _from_deep_grey(image: Image.Image) -> Image.Image:
    """Grey of 16 or 32 bits in 8 bits; Pillow itself would make white of nearly all of it."""
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values, nan=0.0)
        values = values * 255 if values.max(initial=0) <= 1 else values
    elif image.mode.startswith("I;16") or values.max(initial=0) > 255:
        values = values >> 8
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


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
            try:
                status = file.stat()
                seen = f"{status.st_size}\0{status.st_mtime_ns}"
            except OSError:
                seen = "absent"
            digest.update(f"{self.name(i)}\0{seen}\n".encode())
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
    return Subset(samples, array("q", indices))


@dataclass(frozen=True)
class Subset:
    """Some of the images of a split. There may be millions: their numbers are in arrays, 8 bytes each."""

    whole: Samples
    indices: "array[int]"
    labels: "array[int]" = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", array("q", (self.whole.labels[i] for i in self.indices)))

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, i: int) -> Image.Image:
        return self.whole.load(self.indices[i])

    def name(self, i: int) -> str:
        return self.whole.name(self.indices[i])

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.whole.fingerprint()}{tuple(self.indices)}".encode()).hexdigest()
