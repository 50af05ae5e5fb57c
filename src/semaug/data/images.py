"""From images to the inputs of a network: decode to uint8 pixels, then crop and flip on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from semaug.data.samples import Samples, why_unreadable
from semaug.util.errors import SettingError
from semaug.util.names import listed, printable
from semaug.util.processes import ordered_map
from semaug.util.progress import ProgressCallback
from semaug.util.ranges import Border, Portion, Positive, Side, check_ranges

RGB = tuple[float, float, float]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Normalization = Literal["imagenet", "half", "clip", "dpn", "none"]
"""A way to normalise pixels, by its name in :data:`NORMALIZATIONS`."""
NORMALIZATIONS: dict[Normalization, tuple[RGB, RGB]] = {
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "dpn": ((124 / 255, 117 / 255, 104 / 255), (1 / 4.2585, 1 / 4.2585, 1 / 4.2585)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
"""Mean and deviation of the channels, for pixels from 0 to 1: those that pretrained weights of timm expect."""
Shape = Literal["squash", "aspect"]
"""How an image becomes a square, see :class:`Preprocessing`."""
Unreadable = dict[int, str]
"""Images that cannot be read, by their index in a split, and the reasons."""


def normalization_named(mean: Sequence[float], std: Sequence[float]) -> Normalization | None:
    """The name of a mean and deviation of the channels; None if they have none."""
    for name, own in NORMALIZATIONS.items():
        if np.allclose(own, (mean, std), rtol=0, atol=1e-4):
            return name
    return None


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

    resize: Side
    crop: Side
    shape: Shape = "squash"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[Positive, Positive, Positive] = IMAGENET_STD
    padding: Border = 0
    crop_scale: Portion | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.crop > self.resize:
            raise SettingError(f"`crop` ({self.crop} px) must not be larger than the resized image ({self.resize} px)")
        if self.shape not in ("squash", "aspect"):
            raise SettingError(f"`shape` must be 'squash' or 'aspect', not {self.shape!r}")
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
    """Decode all images of a split.

    Args:
        samples: The split.
        preprocessing: How images are resized.
        workers: Number of processes; 0 decodes in this one.
        progress: Called with the number of images done and their total.
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
    reasons = listed((f"{printable(name)} ({why})" for name, why in unreadable), 3)
    return f"{len(unreadable)} of {total} images cannot be read: {reasons}"
