"""From image files to batches: decode once into a cache of uint8 pixels, crop and flip on the device.

Two ways to a square image of `resize` pixels, kept in the cache: ``"squash"`` (the paper's: both sides to `resize`, the
aspect ratio not kept) and ``"aspect"`` (the shorter side to `resize`, then the middle square). Training takes a random
crop of `crop` pixels and flips half of them; evaluation takes the centre crop.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from semaug.data.samples import Samples
from semaug.errors import UserError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Progress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


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
            raise UserError(f"the crop ({self.crop} px) must not be larger than the resized image ({self.resize} px)")
        if self.shape not in ("squash", "aspect"):
            raise UserError(f"the shape must be 'squash' or 'aspect', not {self.shape!r}")

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
        count, room = pixels.shape[0], self.resize - self.crop + 1
        corner = torch.randint(room, (2, count), generator=generator)
        flip = torch.rand(count, generator=generator) < 0.5
        along = torch.arange(self.crop)
        rows = corner[0, :, None] + along
        columns = corner[1, :, None] + torch.where(flip[:, None], along.flip(0), along)
        rows, columns = rows.to(pixels.device, non_blocking=True), columns.to(pixels.device, non_blocking=True)
        samples = torch.arange(count, device=pixels.device)
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
    progress: Progress | None = None,
) -> Tensor:
    """All images of a split as uint8 (N, resize, resize, 3): from the cache if it is there, else decoded into it.

    The cache is a memory-mapped file in the folder `cache` (None: in memory only), named by a digest of the files'
    names, sizes and times and of the preprocessing, so that runs share it and a change of any of them makes another.
    """
    shape = (len(samples), preprocessing.resize, preprocessing.resize, 3)
    if cache is None:
        pixels = np.empty(shape, dtype=np.uint8)
        _decode_into(pixels, samples, preprocessing, workers, progress)
        return torch.from_numpy(pixels)
    key = f"{samples.fingerprint()}{preprocessing.resize}{preprocessing.shape}"
    file = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}.part")
        try:
            pixels = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=shape)
            _decode_into(pixels, samples, preprocessing, workers, progress)
            pixels.flush()
            del pixels
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
    # Copy on write: torch asks for writable memory, and nobody writes.
    return torch.from_numpy(np.load(file, mmap_mode="c"))


def _decode_into(
    pixels: npt.NDArray[np.uint8],
    samples: Samples,
    preprocessing: Preprocessing,
    workers: int,
    progress: Progress | None,
) -> None:
    for done, (i, image) in enumerate(_decode(samples, preprocessing, workers), start=1):
        pixels[i] = image
        if progress is not None:
            progress(done, len(samples))


def _decode(
    samples: Samples, preprocessing: Preprocessing, workers: int
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    if workers < 1:
        for i in range(len(samples)):
            yield i, preprocessing.pixels(samples.load(i))
        return
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(samples, preprocessing)) as pool:
        yield from enumerate(pool.map(_decode_one, range(len(samples)), chunksize=16))


_worker: tuple[Samples, Preprocessing]


def _start_worker(samples: Samples, preprocessing: Preprocessing) -> None:
    global _worker
    _worker = samples, preprocessing


def _decode_one(i: int) -> npt.NDArray[np.uint8]:
    samples, preprocessing = _worker
    return preprocessing.pixels(samples.load(i))
