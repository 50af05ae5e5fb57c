"""Data sets as the rest of the library sees them: classes, and splits of labelled images."""

import hashlib
import io
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from semaug.data.birds import Birds
from semaug.util.errors import DataError, SemaugError
from semaug.util.names import class_titles, printable
from semaug.util.untrusted import open_regular

Select = Literal["val", "last", "test"]
"""How the epoch to keep is chosen."""
HEIF_PACKAGE = "pillow_heif"  # makes Pillow read the photos of iPhones, where it is installed
IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
    + ((".avif",) if find_spec("PIL._avif") else ())
    + ((".heic", ".heif") if find_spec(HEIF_PACKAGE) else ())
)
"""Names of image files end so, in capitals or not; the format is recognised by the content."""
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP") + (("HEIF",) if find_spec(HEIF_PACKAGE) else ())
"""Formats that are decoded. Pillow knows more, and would run Ghostscript for one of them (EPS)."""
MAX_PIXELS = 178_956_970
"""Larger images are refused before they are decoded: Pillow's own limit, which a program may have lifted."""
MAX_IMAGE_BYTES = 2**30
"""Larger image files are refused: so many pixels of 16 bits in three channels take as much."""


class Samples(Protocol):
    """The images of one split, in a fixed order, with the class index of each in `labels`."""

    @property
    def labels(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def load(self, i: int) -> Image.Image:
        """Image `i` in RGB, upright."""

    def name(self, i: int) -> str:
        """A name for image `i` that a person recognises: its path, as a rule."""

    def fingerprint(self, *, dates: bool = True) -> str:
        """A digest that changes whenever an image does; computed without reading all images.

        Args:
            dates: Whether the dates of files count, or only their names and sizes.
        """


@dataclass(frozen=True)
class DataSet:
    """A data set: its class names, indexed by label, and the splits "train" and, if it has them, "val" and "test".

    Every table, figure and prediction shows the names as they are here, by :func:`semaug.util.names.class_title`.
    """

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Samples]
    ignored: Mapping[str, int] = field(default_factory=dict)  # number of files of other types, by suffix

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", class_titles(self.classes))

    def fingerprint(self) -> str:
        """A digest of the classes, and of the names, sizes and labels of all images."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for split, samples in self.splits.items():
            digest.update(f"\0{split}\0{samples.fingerprint(dates=False)}".encode())
            digest.update(np.array(samples.labels, dtype=np.int64).tobytes())
        return digest.hexdigest()


def ignored_files(ignored: Mapping[str, int]) -> str:
    """A phrase about files that are not images of a known type.

    Args:
        ignored: Their number by suffix.

    Returns:
        Such as "3 files of other types ignored (.heic)"; empty if there are none.
    """
    if not ignored:
        return ""
    suffixes = sorted(ignored, key=lambda suffix: (-ignored[suffix], suffix))
    types = ", ".join(printable(suffix) or "no suffix" for suffix in suffixes[:5]) + (
        ", …" if len(suffixes) > 5 else ""
    )
    count = sum(ignored.values())
    hint = "; pip install pillow-heif to read .heic" if {".heic", ".heif"} & set(ignored) else ""
    return f"{count} {'file of another type' if count == 1 else 'files of other types'} ignored ({types}){hint}"


def load_image(path: Path | str) -> Image.Image:
    """Load an image file: the first frame, upright, in RGB, on white where it is transparent.

    Args:
        path: The file.

    Returns:
        The decoded image.

    Raises:
        DataError: The file is missing, is not an image of a known format, is damaged or has too many pixels.
    """
    return _loaded(Path(path), path, MAX_PIXELS)


def image_in(content: bytes, name: str = "", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Load an image from memory, as :func:`load_image` does from a file.

    Args:
        content: The bytes of an image file.
        name: Its name, for the message of an error.
        max_pixels: Larger images are refused before they are decoded.

    Returns:
        The decoded image.

    Raises:
        DataError: The image cannot be read.
    """
    return _loaded(io.BytesIO(content), name, max_pixels)


def _loaded(source: Path | BinaryIO, name: Path | str, max_pixels: int) -> Image.Image:
    try:
        with (
            open_regular(source, MAX_IMAGE_BYTES) if isinstance(source, Path) else source as file,
            _opened(file, max_pixels) as image,
        ):
            image.load()
            return _in_rgb(_upright(image))
    except Exception as error:  # decoders raise exceptions of many kinds on damaged files
        what = f"the image {printable(name)}" if name else "the image"
        raise DataError(f"cannot read {what}: {why_unreadable(error)}") from error


def why_unreadable(error: Exception) -> str:
    """Why an image cannot be read, on one line and without its path, from what a loader raised."""
    cause: BaseException = error
    while isinstance(cause, SemaugError) and cause.__cause__ is not None:
        cause = cause.__cause__
    text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
    return printable(" ".join(text.split())) or type(cause).__name__


def _opened(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Open an image without decoding it."""
    if not isinstance(file, io.BytesIO) and os.fstat(file.fileno()).st_size == 0:
        raise OSError("the file is empty")
    too_large = f"it has more than {max_pixels} pixels"
    try:
        image = Image.open(file, formats=_formats())
    except UnidentifiedImageError as error:
        raise OSError("it is not an image of a known format") from error
    except Image.DecompressionBombError as error:
        raise OSError(too_large) from error
    tags = getattr(image, "tag_v2", {})
    tile = int(tags.get(322, 0)) * int(tags.get(323, 0))  # TIFF decodes whole tiles, however small the image is
    if max(image.width * image.height, tile) > max_pixels:
        image.close()
        raise OSError(too_large)
    return image


@cache
def _formats() -> tuple[str, ...]:
    """The formats that the installed Pillow knows."""
    Image.init()
    if "HEIF" in FORMATS:
        import_module(HEIF_PACKAGE).register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _upright(image: Image.Image) -> Image.Image:
    """Turn the image as its EXIF data say; damaged EXIF data are ignored."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        return _eight_bit(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _eight_bit(image: Image.Image) -> Image.Image:
    """Scale grey of 16 or 32 bits to 8 bits; Pillow would clip nearly all of it to white."""
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values, nan=0.0)
        values = values * 255 if values.max(initial=0) <= 1 else values
    elif image.mode.startswith("I;16") or values.max(initial=0) > 255:
        values = values >> 8
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


@dataclass(frozen=True)
class ImageFiles:
    """A split of image files; names are relative to `root`."""

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

    def fingerprint(self, *, dates: bool = True) -> str:
        digest = hashlib.sha256()
        for i, file in enumerate(self.files):
            try:
                status = file.stat()
                state = f"{status.st_size}\0{status.st_mtime_ns if dates else ''}"
            except OSError:
                state = "absent"
            digest.update(f"{self.name(i)}\0{state}\n".encode())
        return digest.hexdigest()


def embedded_birds(
    num_species: int = 20, train_per_species: int = 40, test_per_species: int = 20, size: int = 96, seed: int = 0
) -> DataSet:
    """The embedded data set: procedural birds, split into "train" and "test".

    Args:
        num_species: Number of classes.
        train_per_species: Training images of each.
        test_per_species: Test images of each.
        size: Side of the images in pixels, at least 32.
        seed: Seed of species and images.

    Returns:
        The data set; its images are drawn on access.
    """
    train = Birds(num_species, train_per_species, "train", size, seed)
    test = Birds(num_species, test_per_species, "test", size, seed)
    return DataSet("birds", tuple(train.classes), {"train": train, "test": test})


@dataclass(frozen=True)
class Subset:
    """Some images of a split; made by :func:`subset`. Indices are in arrays, as there may be millions."""

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

    def fingerprint(self, *, dates: bool = True) -> str:
        whole = self.whole.fingerprint(dates=dates)
        return hashlib.sha256(f"{whole}{tuple(self.indices)}".encode()).hexdigest()


def subset(samples: Samples, indices: Sequence[int]) -> Subset:
    """The images of a split at `indices`, in that order."""
    return Subset(samples, array("q", indices))
