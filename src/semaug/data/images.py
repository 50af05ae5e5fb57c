"""From image files to batches: decode once into a cache of uint8 pixels, crop and flip on the device.

Two ways to a square image of `resize` pixels, kept in the cache: ``"squash"`` (the paper's: both sides to `resize`, the
aspect ratio not kept) and ``"aspect"`` (the shorter side to `resize`, then the middle square). Training takes a random
crop of `crop` pixels and flips half of them; evaluation takes the centre crop.
"""

import hashlib
import os
import platform
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from semaug.data.samples import Samples, why_unreadable
from semaug.util.errors import SemaugError, printable
from semaug.util.processes import each, is_running

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ProgressCallback = Callable[[int, int], None]
"""Called with the number of images done and their total."""
Unreadable = dict[int, str]
"""Images that cannot be read, by their place in a split, and why."""
_DECODER = 2  # to be raised when the same file gives other pixels, so that no cache of the old ones is used


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the network's input; part of a trained model."""

    resize: int
    crop: int
    shape: Literal["squash", "aspect"] = "squash"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resize:
            raise SemaugError(f"the crop ({self.crop} px) must not be larger than the resized image ({self.resize} px)")
        if self.shape not in ("squash", "aspect"):
            raise SemaugError(f"the shape must be 'squash' or 'aspect', not {self.shape!r}")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Preprocessing":
        """The settings that ``dataclasses.asdict`` gave, read back from JSON."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)

    def pixels(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        """The square of `resize` pixels that the cache keeps, (resize, resize, 3)."""
        if self.shape == "aspect":
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            box = (left, top, left + side, top + side)
        else:
            box = (0, 0, *image.size)
        resized = image.resize((self.resize, self.resize), Image.Resampling.BILINEAR, box=box)
        return np.asarray(resized, dtype=np.uint8)

    def evaluation_crops(self, pixels: Tensor) -> Tensor:
        """Centre crops of uint8 (N, resize, resize, 3): uint8 (N, 3, crop, crop)."""
        start = (self.resize - self.crop) // 2
        window = slice(start, start + self.crop)
        return pixels[:, window, window].permute(0, 3, 1, 2)

    def evaluation_input(self, pixels: Tensor) -> Tensor:
        """Centre crops of uint8 (N, resize, resize, 3), normalised: (N, 3, crop, crop)."""
        return self.normalised(self.evaluation_crops(pixels))

    def training_crops(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Random crops, half of them flipped, of uint8 (N, resize, resize, 3): uint8 (N, 3, crop, crop).

        The random numbers come from a CPU generator, so that they do not depend on the device.
        """
        return self.cropped(pixels, *self.draw_crops(len(pixels), generator))

    def draw_crops(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Where to crop so many images, and which to flip: corners (2, count), and a bool for each."""
        corners = torch.randint(self.resize - self.crop + 1, (2, count), generator=generator)
        return corners, torch.rand(count, generator=generator) < 0.5

    def cropped(self, pixels: Tensor, corners: Tensor, flipped: Tensor) -> Tensor:
        """Those crops of uint8 (N, resize, resize, 3): uint8 (N, 3, crop, crop)."""
        along = torch.arange(self.crop)
        rows = corners[0, :, None] + along
        columns = corners[1, :, None] + torch.where(flipped[:, None], along.flip(0), along)
        rows, columns = rows.to(pixels.device, non_blocking=True), columns.to(pixels.device, non_blocking=True)
        samples = torch.arange(len(pixels), device=pixels.device)
        return pixels[samples[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def normalised(self, crops: Tensor) -> Tensor:
        """uint8 (N, 3, crop, crop) as floats of about zero mean and unit variance; channels stay last in memory."""
        mean = torch.tensor(self.mean, device=crops.device)[:, None, None] * 255
        std = torch.tensor(self.std, device=crops.device)[:, None, None] * 255
        return (crops.float() - mean) / std


def decoded(
    samples: Samples,
    preprocessing: Preprocessing,
    cache: Path | None,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Tensor:
    """All images of a split as uint8 (N, resize, resize, 3): from the cache if it is there, else decoded into it.

    The cache is a memory-mapped file in the folder `cache` (None: in memory only), named by a digest of the files'
    names, sizes and times and of the preprocessing, so that runs share it and a change of any of them makes another.
    Images that cannot be read are a :class:`SemaugError` that tells of all of them, and nothing is kept.
    """
    if cache is None:
        pixels = np.empty(_shape(samples, preprocessing), dtype=np.uint8)
        unreadable = decode(samples, preprocessing, workers, progress, pixels)
    else:
        unreadable = decode_into_cache(samples, preprocessing, cache, workers, progress)
    if unreadable:
        names = [(samples.name(i), why) for i, why in unreadable.items()]
        raise SemaugError(f"{cannot_be_read(names, len(samples))}; repair or remove them")
    # Copy on write: torch asks for writable memory, and nobody writes.
    found = pixels if cache is None else np.load(cache_file(samples, preprocessing, cache), mmap_mode="c")
    return torch.from_numpy(found)


def decode_into_cache(
    samples: Samples,
    preprocessing: Preprocessing,
    cache: Path,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Unreadable:
    """Make the file of a split in the cache, unless it is there or there are images that cannot be read."""
    file = cache_file(samples, preprocessing, cache)
    if file.exists():
        return {}
    unfinished = file.with_suffix(f".{_machine()}.{os.getpid()}.part")
    try:
        try:
            pixels = _room_for(unfinished, _shape(samples, preprocessing))
        except OSError as error:
            why = error.strerror or error
            raise SemaugError(f"cannot write {file}: {why}; name another folder by --cache, or --cache None") from error
        unreadable = decode(samples, preprocessing, workers, progress, pixels)
        pixels.flush()
        del pixels
        if not unreadable:
            unfinished.replace(file)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return unreadable


def _room_for(unfinished: Path, shape: tuple[int, ...]) -> "np.memmap[Any, np.dtype[np.uint8]]":
    """A new file for so many pixels, mapped into memory, with its place on the disk taken.

    A disk that is full later on would end the process without a word: that is what mapped memory does then.
    """
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _leftovers(unfinished):
        leftover.unlink(missing_ok=True)
    pixels: np.memmap[Any, np.dtype[np.uint8]]
    pixels = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with open(unfinished, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, unfinished.stat().st_size)
    return pixels


def _leftovers(unfinished: Path) -> list[Path]:
    """What processes of this machine that were killed have left of such a file; others may share the folder."""
    name = re.compile(rf"{re.escape(unfinished.name.removesuffix(f'{os.getpid()}.part'))}(\d+)\.part")
    found = [(file, name.fullmatch(file.name)) for file in unfinished.parent.glob("*.part")]
    return [file for file, match in found if match is not None and not is_running(int(match[1]))]


def _machine() -> str:
    return re.sub(r"[^A-Za-z0-9]", "-", platform.node())


def cache_file(samples: Samples, preprocessing: Preprocessing, cache: Path) -> Path:
    """Where in the cache the pixels of a split are."""
    key = f"{_DECODER}{samples.fingerprint()}{preprocessing.resize}{preprocessing.shape}"
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"


def _shape(samples: Samples, preprocessing: Preprocessing) -> tuple[int, int, int, int]:
    return (len(samples), preprocessing.resize, preprocessing.resize, 3)


def cannot_be_read(unreadable: Sequence[tuple[str, str]], total: int) -> str:
    """Such as: 4 of 90 images cannot be read: a.jpg (the file is empty), b.jpg (…), c.jpg (…) and 1 more."""
    first = [f"{printable(name)} ({why})" for name, why in unreadable[:3]]
    more = f" and {len(unreadable) - len(first)} more" if len(unreadable) > len(first) else ""
    return f"{len(unreadable)} of {total} images cannot be read: {', '.join(first)}{more}"


def decode(
    samples: Samples,
    preprocessing: Preprocessing,
    workers: int = 0,
    progress: ProgressCallback | None = None,
    pixels: npt.NDArray[np.uint8] | None = None,
) -> Unreadable:
    """Decode all images of a split, into `pixels` if given; returns those that cannot be read."""
    unreadable: Unreadable = {}
    for i, image in enumerate(each(partial(pixels_or_reason, samples, preprocessing), len(samples), workers)):
        if isinstance(image, str):
            unreadable[i] = image
        elif pixels is not None:
            pixels[i] = image
        if progress is not None:
            progress(i + 1, len(samples))
    return unreadable


def pixels_or_reason(samples: Samples, preprocessing: Preprocessing, i: int) -> npt.NDArray[np.uint8] | str:
    """The pixels of an image of a split, or why it cannot be read."""
    try:
        return preprocessing.pixels(samples.load(i))
    except Exception as error:  # of whatever kind: the others are still to be looked at
        return why_unreadable(error)
