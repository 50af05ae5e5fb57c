"""From image files to batches: decode once into a cache of uint8 pixels, then crop and flip on the device."""

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from semaug.data.samples import Samples, why_unreadable
from semaug.util.errors import DataError, FileError, SettingError
from semaug.util.locks import locked
from semaug.util.names import printable
from semaug.util.processes import is_other_process, ordered_map
from semaug.util.progress import ProgressCallback as ProgressCallback
from semaug.util.untrusted import map_array

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Shape = Literal["squash", "aspect"]
"""How an image becomes a square, see :class:`Preprocessing`."""
Unreadable = dict[int, str]
"""Images that cannot be read, by their index in a split, and the reasons."""
_DECODER = 2  # raised when the same file gives other pixels, so that old caches are not used


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the input of a network; part of a trained model.

    Args:
        resize: Side in pixels of the square that the cache holds.
        crop: Side in pixels of the network's input: a random crop in training, the centre crop in evaluation.
        shape: "squash" scales both sides to `resize`, as in the paper; "aspect" scales the shorter side to `resize` and
            takes the middle square.
        mean: Mean of each channel, for pixels from 0 to 1.
        std: Standard deviation of each channel.
        padding: Width in pixels of a black border around the image, from which crops for training are taken too.
        crop_scale: Crops for training have a random size and aspect ratio, and are resized to `crop`: their area is at
            least this share of the image, and their ratio lies in 3/4 … 4/3. None: crops of a fixed size.

    Raises:
        SettingError: The crop is larger than the resized image, or another value is out of range.
    """

    resize: int
    crop: int
    shape: Shape = "squash"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    padding: int = 0
    crop_scale: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resize:
            raise SettingError(f"`crop` ({self.crop} px) must not be larger than the resized image ({self.resize} px)")
        if self.shape not in ("squash", "aspect"):
            raise SettingError(f"`shape` must be 'squash' or 'aspect', not {self.shape!r}")
        if self.padding < 0:
            raise SettingError(f"`padding` must be at least 0, not {self.padding}")
        if self.crop_scale is not None and not 0 < self.crop_scale <= 1:
            raise SettingError(f"`crop_scale` must be above 0 and at most 1, not {self.crop_scale:g}")
        if self.crop_scale is not None and self.padding:
            raise SettingError("`padding` is for crops of a fixed size, and `crop_scale` gives them a random one")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Preprocessing":
        """The settings that ``dataclasses.asdict`` returned, read back from JSON."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)

    def pixels(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        """Resize an image to uint8 (resize, resize, 3)."""
        box = (0, 0, *image.size)
        if self.shape == "aspect":
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            box = (left, top, left + side, top + side)
        resized = image.resize((self.resize, self.resize), Image.Resampling.BILINEAR, box=box)
        return np.asarray(resized, dtype=np.uint8)

    def evaluation_crops(self, pixels: Tensor) -> Tensor:
        """Cut the centre crops, uint8 (N, 3, crop, crop), of pixels, uint8 (N, resize, resize, 3)."""
        start = (self.resize - self.crop) // 2
        window = slice(start, start + self.crop)
        return pixels[:, window, window].permute(0, 3, 1, 2)

    def evaluation_input(self, pixels: Tensor) -> Tensor:
        """Cut and normalise the centre crops, float (N, 3, crop, crop), of pixels, uint8 (N, resize, resize, 3)."""
        return self.normalised(self.evaluation_crops(pixels))

    def draw_crops(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw random crops for training.

        Args:
            count: Number of images.
            generator: Source of randomness, on the CPU.

        Returns:
            Top and left of each crop (2, count), or with `crop_scale` top, left, height and width (4, count); and which
            to flip, bool (count,).
        """
        if self.crop_scale is None:
            boxes = torch.randint(self.resize + 2 * self.padding - self.crop + 1, (2, count), generator=generator)
        else:
            boxes = _random_boxes(self.resize, self.crop_scale, count, generator)
        return boxes, torch.rand(count, generator=generator) < 0.5

    def cropped(self, pixels: Tensor, boxes: Tensor, flipped: Tensor) -> Tensor:
        """Cut the crops that :meth:`draw_crops` has drawn.

        Args:
            pixels: Uint8 (N, resize, resize, 3), on any device.
            boxes: Top and left of each crop (2, N), or top, left, height and width (4, N).
            flipped: Which crops to mirror, bool (N,).

        Returns:
            Uint8 (N, 3, crop, crop).
        """
        if self.crop_scale is not None:
            boxes, flipped = to_device(boxes, pixels.device), to_device(flipped, pixels.device)
            rows, columns = (_resampling(boxes[i], boxes[i + 2], self.crop, self.resize) for i in (0, 1))
            columns = columns.flip(1).where(flipped[:, None, None], columns)
            planes = pixels.permute(0, 3, 1, 2).float()
            return (rows[:, None] @ planes @ columns[:, None].mT).round().to(torch.uint8)
        if self.padding:
            pixels = F.pad(pixels, (0, 0, *[self.padding] * 4))
        along = torch.arange(self.crop)
        rows = boxes[0, :, None] + along
        columns = boxes[1, :, None] + torch.where(flipped[:, None], along.flip(0), along)
        rows, columns = (to_device(index, pixels.device) for index in (rows, columns))
        samples = torch.arange(len(pixels), device=pixels.device)
        return pixels[samples[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def normalised(self, crops: Tensor) -> Tensor:
        """Normalise crops, uint8 (N, 3, crop, crop), to about zero mean and unit variance."""
        mean = to_device(torch.tensor(self.mean)[:, None, None] * 255, crops.device)
        std = to_device(torch.tensor(self.std)[:, None, None] * 255, crops.device)
        return (crops.float() - mean) / std


def _random_boxes(side: int, least: float, count: int, generator: torch.Generator) -> Tensor:
    """Top, left, height and width (4, count) of random boxes in a square: the distribution of RandomResizedCrop.

    Of ten boxes the first that fits is taken, and the whole square if none does.
    """
    area, ratio = torch.rand(2, 10, count, generator=generator).double()
    area, ratio = least + (1 - least) * area, (4 / 3) ** (2 * ratio - 1)
    sizes = (side * torch.stack([area / ratio, area * ratio]).sqrt()).round().long().clamp_min(1)  # height, width
    sizes = torch.cat([sizes, torch.full((2, 1, count), side)], 1)
    first = (sizes <= side).all(0).long().argmax(0)
    sizes = sizes[:, first, torch.arange(count)]
    corners = (torch.rand(2, count, generator=generator).double() * (side - sizes + 1)).long()
    return torch.cat([corners, sizes])


def _resampling(start: Tensor, length: Tensor, count: int, side: int) -> Tensor:
    """Weights (N, count, side) that resize the pixels start … start + length − 1 of a row to `count`, without aliasing.

    As in Pillow, a pixel is a weighted mean by a triangle as wide as one pixel of the result, or of the source if that
    is wider.
    """
    scale = length[:, None, None].double() / count
    centres = start[:, None, None] + (torch.arange(count, device=start.device)[:, None] + 0.5) * scale
    pixels = torch.arange(side, device=start.device)
    weights = (1 - (pixels + 0.5 - centres).abs() / scale.clamp_min(1)).clamp_min(0)
    inside = (pixels >= start[:, None, None]) & (pixels < (start + length)[:, None, None])
    weights = weights * inside
    return (weights / weights.sum(2, keepdim=True)).float()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; through pinned memory, so that the host does not wait for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def decode(
    samples: Samples,
    preprocessing: Preprocessing,
    workers: int = 0,
    progress: ProgressCallback | None = None,
    pixels: npt.NDArray[np.uint8] | None = None,
) -> Unreadable:
    """Decode all images of a split; other arguments as for :func:`decoded`.

    Args:
        pixels: Array (N, resize, resize, 3) to fill; None only checks the images.

    Returns:
        The images that cannot be read.
    """
    unreadable: Unreadable = {}
    decode_one = partial(pixels_or_reason, samples, preprocessing)
    for i, image in enumerate(ordered_map(decode_one, range(len(samples)), workers)):
        if isinstance(image, str):
            unreadable[i] = image
        elif pixels is not None:
            pixels[i] = image
        if progress is not None:
            progress(i + 1, len(samples))
    return unreadable


def pixels_or_reason(samples: Samples, preprocessing: Preprocessing, i: int) -> npt.NDArray[np.uint8] | str:
    """The pixels of image `i`, or why it cannot be read."""
    try:
        return preprocessing.pixels(samples.load(i))
    except Exception as error:  # of whatever kind: the other images must still be decoded
        return why_unreadable(error)


def unreadable_images(unreadable: Sequence[tuple[str, str]], total: int) -> str:
    """A phrase such as "4 of 90 images cannot be read: a.jpg (the file is empty), … and 1 more"."""
    first = [f"{printable(name)} ({why})" for name, why in unreadable[:3]]
    more = f" and {len(unreadable) - len(first)} more" if len(unreadable) > len(first) else ""
    return f"{len(unreadable)} of {total} images cannot be read: {', '.join(first)}{more}"


def decoded(
    samples: Samples,
    preprocessing: Preprocessing,
    cache: Path | None,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Tensor:
    """Decode all images of a split, or map them from the cache.

    Args:
        samples: The images.
        preprocessing: How to resize them.
        cache: Folder of memory-mapped files, which runs share; None decodes into memory.
        workers: Number of processes that decode; 0 decodes in this one.
        progress: Called with the number of images done and their total.

    Returns:
        Uint8 (N, resize, resize, 3).

    Raises:
        DataError: Images cannot be read; nothing is then cached.
        FileError: The cache cannot be written, or is damaged.
    """
    if cache is None:
        pixels = np.empty((len(samples), preprocessing.resize, preprocessing.resize, 3), dtype=np.uint8)
        unreadable = decode(samples, preprocessing, workers, progress, pixels)
    else:
        unreadable = decode_into_cache(samples, preprocessing, cache, workers, progress)
    if unreadable:
        names = [(samples.name(i), why) for i, why in unreadable.items()]
        raise DataError(f"{unreadable_images(names, len(samples))}; repair or remove them")
    if cache is not None:
        shape = (len(samples), preprocessing.resize, preprocessing.resize, 3)
        pixels = map_array(cache_file(samples, preprocessing, cache), shape, np.uint8)
    return torch.from_numpy(pixels)


def cache_file(samples: Samples, preprocessing: Preprocessing, cache: Path) -> Path:
    """The file in the cache for a split; another one if any image, its size or date, or the resizing changes."""
    key = f"{_DECODER}{samples.fingerprint()}{preprocessing.resize}{preprocessing.shape}"
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"


def decode_into_cache(
    samples: Samples,
    preprocessing: Preprocessing,
    cache: Path,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Unreadable:
    """Write the cache file of a split, unless it exists; of processes with the same images, one decodes them.

    Args:
        samples: The split.
        preprocessing: How images are resized.
        cache: Folder of the cache.
        workers: Number of processes; 0 decodes in this one.
        progress: Called with the number of images done and their total.

    Returns:
        The images that cannot be read; if there are any, no file is written.

    Raises:
        FileError: The cache cannot be written.
    """
    file = cache_file(samples, preprocessing, cache)
    if file.exists():
        return {}
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(cache, f"{file.stem}.lock", wait=True))
        except FileError as error:
            raise FileError(f"{error}; choose another `cache` folder, or None") from error
        # Another process may have decoded the same images meanwhile.
        return {} if file.exists() else _fill_cache(file, samples, preprocessing, workers, progress)


def _fill_cache(
    file: Path, samples: Samples, preprocessing: Preprocessing, workers: int, progress: ProgressCallback | None
) -> Unreadable:
    # The folder may be shared between machines.
    machine = re.sub(r"[^A-Za-z0-9]", "-", platform.node())
    unfinished = file.with_suffix(f".{machine}.{os.getpid()}.part")
    try:
        try:
            for leftover in file.parent.glob(f"{file.stem}.{machine}.*.part"):
                if not is_other_process(int(leftover.suffixes[-2][1:])):
                    leftover.unlink(missing_ok=True)
            pixels = _allocated(unfinished, (len(samples), preprocessing.resize, preprocessing.resize, 3))
        except OSError as error:
            reason = error.strerror or error
            raise FileError(f"cannot write {file}: {reason}; choose another `cache` folder, or None") from error
        unreadable = decode(samples, preprocessing, workers, progress, pixels)
        pixels.flush()
        del pixels
        if not unreadable:
            unfinished.replace(file)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return unreadable


def _allocated(file: Path, shape: tuple[int, ...]) -> "np.memmap[Any, np.dtype[np.uint8]]":
    """A new memory-mapped array with its disk space reserved: writing to a full disk would crash the process."""
    pixels: np.memmap[Any, np.dtype[np.uint8]]
    pixels = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with open(file, "rb+") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return pixels
