"""Data sets as the rest of the library sees them: classes, and splits of labelled images."""

import hashlib
import io
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from semaug.data.birds import Birds
from semaug.util.errors import DataError, SemaugError
from semaug.util.names import class_titles, listed, printable
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
MAX_SIDE = 1_000_000
"""Longer images are refused: the weights of resizing one of any width take 16 bytes for each pixel of a row."""
LARGE_PIXELS, PIXELS_PER_BYTE = 100_000_000, 50
"""Images of more pixels than the first are refused if their file has fewer bytes than pixels / the second: no photo is
so small, and an empty drawing of a few bytes would take gigabytes."""
MAX_SCANNED_PIXELS = 10**10
"""Limit of pixels × scans of a JPEG file: a scan of a few bytes goes through all pixels, and photos have about ten."""
MAX_COMMENTS = 1000
"""Limit of comments in a text file of pixels (PPM), from which Pillow removes each by copying the rest."""
_STRIP_PIXELS = 2**20  # converted at a time
_PART_BYTES = 2**16  # searched at a time


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
    ignored: Mapping[str, int] = field(default_factory=dict)  # see `ignored_files`

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
    """A phrase about files that are not used.

    Args:
        ignored: The number of files that are not images of a known type, by suffix; and that of images that belong to
            no class or split, by the place where they are, which ends with a slash.

    Returns:
        Such as "3 files of other types ignored (.heic)"; empty if there are none.
    """
    phrases = []
    for is_place, one, several in (
        (True, "image outside of classes and splits", "images outside of classes and splits"),
        (False, "file of another type", "files of other types"),
    ):
        counts = {key: count for key, count in ignored.items() if key.endswith("/") == is_place}
        keys = sorted(counts, key=lambda key: (-counts[key], key))
        if count := sum(counts.values()):
            names = listed(printable(key) or "no suffix" for key in keys)
            phrases.append(f"{count} {one if count == 1 else several} ignored ({names})")
    hint = ["pip install pillow-heif to read .heic"] if {".heic", ".heif"} & set(ignored) else []
    return "; ".join(phrases + hint)


def load_image(path: Path | str) -> Image.Image:
    """Load an image file: the first frame, upright, in RGB, on white where it is transparent.

    Args:
        path: The file.

    Returns:
        The decoded image.

    Raises:
        DataError: The file is missing, is not an image of a known format, is damaged or has too many pixels.
    """
    return _loaded(Path(path), f"the image {printable(path)}", MAX_PIXELS)


def image_in(content: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Load an image from memory, as :func:`load_image` does from a file.

    Args:
        content: The bytes of an image file.
        max_pixels: Larger images are refused before they are decoded.

    Returns:
        The decoded image.

    Raises:
        DataError: The image cannot be read.
    """
    return _loaded(io.BytesIO(content), "the image", max_pixels)


def _loaded(source: Path | BinaryIO, what: str, max_pixels: int) -> Image.Image:
    try:
        with (
            open_regular(source, MAX_IMAGE_BYTES) if isinstance(source, Path) else source as file,
            _opened(file, max_pixels) as image,
        ):
            image.load()
            return _in_rgb(_upright(image), *_grey_scale(image))
    except Exception as error:  # decoders raise exceptions of many kinds on damaged files
        raise DataError(f"cannot read {what}: {why_unreadable(error)}") from error


def why_unreadable(error: Exception) -> str:
    """Why an image cannot be read, on one line and without its path, from the error of a loader."""
    cause: BaseException = error
    while isinstance(cause, SemaugError) and cause.__cause__ is not None:
        cause = cause.__cause__
    text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
    return printable(" ".join(text.split())) or type(cause).__name__


def _opened(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Open an image without decoding it."""
    size = file.getbuffer().nbytes if isinstance(file, io.BytesIO) else os.fstat(file.fileno()).st_size
    if size == 0:
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
    pixels = max(image.width * image.height, tile)
    if pixels > max_pixels:
        raise OSError(too_large)
    if max(image.size) > MAX_SIDE:
        raise OSError(f"it has a side of more than {MAX_SIDE} pixels")
    if pixels > max(LARGE_PIXELS, size * PIXELS_PER_BYTE):
        raise OSError(f"it has {pixels} pixels in {size} bytes, like a decompression bomb")
    is_jpeg = image.format in ("JPEG", "MPO") or tags.get(259) in (6, 7)  # or a TIFF file with JPEG inside
    if is_jpeg and pixels * _count(file, b"\xff\xda") > MAX_SCANNED_PIXELS:
        raise OSError("it has too many scans")
    if image.tile[:1] and image.tile[0][0] == "ppm_plain" and _count(file, b"#") > MAX_COMMENTS:
        raise OSError(f"it has more than {MAX_COMMENTS} comments")
    if image.format == "PNG" and "transparency" in image.info and image.tile:
        image.info["transparency"] = _of_eight_bits(image.info["transparency"], image.tile[0][3])
    return image


def _of_eight_bits(key: Any, raw_mode: Any) -> Any:
    """Scale a PNG file's transparent grey value or colour as Pillow scales its pixels: from 2, 4 or 16 bits to 8."""
    if raw_mode == "RGB;16B":
        return tuple(value >> 8 for value in key)
    return key * {"L;2": 85, "L;4": 17}.get(raw_mode, 1)


def _count(file: BinaryIO, mark: bytes) -> int:
    """About how often a mark occurs in a file: one that lies across two parts is not counted."""
    file.seek(0)
    count = 0
    while part := file.read(_PART_BYTES):
        count += part.count(mark)
    return count


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
        if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
            return image  # Pillow would copy it
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _grey_scale(image: Image.Image) -> tuple[int | None, bool]:
    """The bits of grey values of more than 8 bits, None if the file does not say, and whether 0 is white."""
    tags = getattr(image, "tag_v2", {})
    if image.mode.startswith("I;16"):
        return tags.get(258, (16,))[0], tags.get(262) == 0  # Pillow neither scales 12 bits nor inverts these
    if image.mode == "I" and tags.get(258, (0,))[0] == 16:  # with a sign
        return 15, False
    return (16 if image.format == "PPM" else None), False


def _in_rgb(image: Image.Image, bits: int | None, zero_is_white: bool) -> Image.Image:
    """Convert an image to RGB in strips: large ones take no memory beside both images."""
    if image.mode.startswith(("I", "F")):
        largest = max((float(_values(strip).max(initial=0)) for _, strip in _strips(image)), default=0.0)
        smallest = min((float(_values(strip).min(initial=0)) for _, strip in _strips(image)), default=0.0)
        # Filters leave floating-point values a little beyond the ends of their scale.
        beyond = 0.05 if image.mode == "F" else 0.0
        scale = next((scale for scale in (1, 255, 65535) if largest <= scale * (1 + beyond)), 0)
        if smallest < -beyond * scale or not scale or (image.mode == "F" and 1 + beyond < largest <= 2):
            raise OSError(f"its grey values from {smallest:g} to {largest:g} fit no usual scale; convert it to 8 bits")
        convert: Callable[[Image.Image], Image.Image] = partial(
            _eight_bit, scale=scale, bits=bits or (16 if largest > 255 else 8), zero_is_white=zero_is_white
        )
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        convert = _on_white
    else:
        return image.convert("RGB")
    result = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        result.paste(convert(strip), (0, top))
    return result


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """The first row of each strip of an image, and the strip."""
    rows = max(1, _STRIP_PIXELS // max(1, image.width))
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _on_white(image: Image.Image) -> Image.Image:
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _values(image: Image.Image) -> npt.NDArray[Any]:
    return np.nan_to_num(np.asarray(image), nan=0.0) if image.mode == "F" else np.asarray(image)


def _eight_bit(image: Image.Image, scale: int, bits: int, zero_is_white: bool) -> Image.Image:
    """Scale grey of 16 or 32 bits to 8 bits; Pillow would clip nearly all of it to white.

    Args:
        image: The image, or a part of it.
        scale: White, of floating-point values.
        bits: The number of bits of a whole number, from 8.
        zero_is_white: Whether the largest possible value is black.
    """
    values = _values(image)
    if image.mode == "F":
        values = values * (255 / scale)
    else:
        transparent, values = values == image.info.get("transparency"), values >> (bits - 8)
        values = np.where(transparent, 255, 255 - values if zero_is_white else values)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")


def file_dates(status: os.stat_result) -> tuple[int, int]:
    """When a file was written, which archives set, and when its state changed, which only the system sets."""
    return status.st_mtime_ns, status.st_ctime_ns


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
                state = f"{status.st_size}\0{file_dates(status) if dates else ''}"
            except OSError:
                state = "absent"
            digest.update(f"{self.name(i)}\0{state}\n".encode())
        return digest.hexdigest()


def embedded_birds(
    num_species: int = 20, train_per_species: int = 40, test_per_species: int = 20, size: int = 96, seed: int = 0
) -> DataSet:
    """The embedded data set: drawn birds, split into "train" and "test".

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
    """The images of a split at `indices`, in that order; these are stored as an array, as there may be millions."""

    whole: Samples
    indices: Sequence[int]
    labels: "array[int]" = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", array("q", self.indices))
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
