"""Image-level augmentation of a whole batch on its device, to compare semantic augmentation with.

torchvision's RandAugment and Random Erasing draw once for a whole batch, and called image by image they start hundreds
of small operators. Here each image has random numbers of its own, and images that draw the same operation pass through
it together. Settings are torchvision's defaults. Random numbers come from the CPU's default generator, so that they do
not depend on the device.

To add a method, write its transforms and add it to `IMAGE_TRANSFORMS`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OnImages = Callable[[Tensor, Tensor, int], Tensor]
"""From images (n, 3, H, W), their rows (n,) in the batch of all processes, and its size N, to the changed images.

It draws random numbers for all N images, so that the result does not depend on the number of processes."""
OnBatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From images (n, 3, H, W) and labels (n,) to mixed images and soft labels (n, classes).

Image i is mixed with image i - 1, in the same way for all images, as torchvision's MixUp and CutMix do."""


@dataclass(frozen=True)
class ImageTransforms:
    """How a method changes training images, in addition to crop and flip.

    Args:
        on_crops: Applied to the crops, uint8.
        on_images: Applied to the normalised crops, float.
        on_batch: Applied to normalised crops and labels together.
    """

    on_crops: OnImages | None = None
    on_images: OnImages | None = None
    on_batch: OnBatch | None = None

    @property
    def is_plain(self) -> bool:
        """Whether images are not changed."""
        return self == PLAIN


PLAIN = ImageTransforms()

LEVEL = 9 / 30  # magnitude 9, where 30 is the largest
_OPERATIONS_PER_IMAGE = 2


def transforms() -> Any:
    """The transforms of torchvision, imported when they are first used, because that takes over a second."""
    from torchvision.transforms import v2

    return v2


def _affine(images: Tensor, translate: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    centre = [0.0, 0.0] if any(shear) else None
    slant = [math.degrees(math.atan(value)) for value in shear]
    changed: Tensor = transforms().functional.affine(
        images, angle=0.0, translate=list(translate), scale=1.0, shear=slant, center=centre
    )
    return changed


def _shift(images: Tensor, side: int, level: float) -> int:
    return int(level * 150 / 331 * images.shape[side])


RAND_AUGMENT: dict[str, tuple[Callable[[Tensor, float], Tensor], bool]] = {
    "identity": (lambda images, _: images, False),
    "shear x": (lambda images, level: _affine(images, shear=(0.3 * level, 0.0)), True),
    "shear y": (lambda images, level: _affine(images, shear=(0.0, 0.3 * level)), True),
    "translate x": (lambda images, level: _affine(images, (_shift(images, -1, level), 0)), True),
    "translate y": (lambda images, level: _affine(images, (0, _shift(images, -2, level))), True),
    "rotate": (lambda images, level: transforms().functional.rotate(images, 30.0 * level), True),
    "brightness": (lambda images, level: transforms().functional.adjust_brightness(images, 1.0 + 0.9 * level), True),
    "colour": (lambda images, level: transforms().functional.adjust_saturation(images, 1.0 + 0.9 * level), True),
    "contrast": (lambda images, level: transforms().functional.adjust_contrast(images, 1.0 + 0.9 * level), True),
    "sharpness": (lambda images, level: transforms().functional.adjust_sharpness(images, 1.0 + 0.9 * level), True),
    "posterise": (lambda images, level: transforms().functional.posterize(images, 8 - round(4 * level)), False),
    "solarise": (lambda images, level: transforms().functional.solarize(images, 255.0 * (1.0 - level)), False),
    "autocontrast": (lambda images, _: transforms().functional.autocontrast(images), False),
    "equalise": (lambda images, _: transforms().functional.equalize(images), False),
}
"""Each operation, of images and level, and whether the level has a random sign."""


def rand_augment(images: Tensor, rows: Tensor | slice = slice(None), total: int | None = None) -> Tensor:
    """Apply RandAugment (Cubuk et al., 2020): two random operations of magnitude 9 to each image.

    Args:
        images: Uint8 (n, 3, H, W).
        rows: The rows of the images in the batch for which random numbers are drawn; by default they are all of it.
        total: Size of that batch.

    Returns:
        The changed images.
    """
    count = images.shape[0] if total is None else total
    changed = images.clone()
    for _ in range(_OPERATIONS_PER_IMAGE):
        drawn = torch.randint(len(RAND_AUGMENT), (count,))[rows]
        negative = (torch.rand(count) <= 0.5)[rows]
        for number, (operation, signed) in enumerate(RAND_AUGMENT.values()):
            for sign in (1, -1) if signed else (1,):
                chosen = drawn == number
                if signed:
                    chosen &= negative == (sign < 0)
                indices = chosen.nonzero()[:, 0]
                if number and len(indices):  # the first is the identity
                    where = indices.to(images.device, non_blocking=True)
                    changed[where] = operation(changed[where], sign * LEVEL)
    return changed


_PROBABILITY, _AREAS, _ASPECT_RATIOS, _TRIES = 0.5, (0.02, 0.33), (0.3, 3.3), 10


def random_erasing(images: Tensor, rows: Tensor | slice = slice(None), total: int | None = None) -> Tensor:
    """Apply Random Erasing (Zhong et al., 2020): set a random rectangle to zero in half of the images.

    Args:
        images: Normalised images (n, 3, H, W).
        rows: The rows of the images in the batch for which random numbers are drawn; by default they are all of it.
        total: Size of that batch.

    Returns:
        The changed images.
    """
    count, _, height, width = images.shape
    drawn = _rectangles(count if total is None else total, height, width)[:, rows]
    top, left, high, wide = drawn.to(images.device, non_blocking=True)[..., None]
    y, x = (torch.arange(side, device=images.device) for side in (height, width))
    inside = ((y >= top) & (y < top + high))[:, :, None] & ((x >= left) & (x < left + wide))[:, None]
    return images.masked_fill(inside[:, None], 0.0)


def _rectangles(count: int, height: int, width: int) -> Tensor:
    """Top, left, height and width (4, count) of the rectangles to erase; all 0 for an image that stays whole.

    A rectangle that does not fit is drawn again, at most ten times.
    """
    area = height * width * (_AREAS[0] + (_AREAS[1] - _AREAS[0]) * torch.rand(_TRIES, count))
    low, high = (math.log(ratio) for ratio in _ASPECT_RATIOS)
    ratio = (low + (high - low) * torch.rand(_TRIES, count)).exp()
    heights, widths = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
    fits = (heights < height) & (widths < width)
    first = fits.int().argmax(0, keepdim=True)  # of those that fit
    erased = (torch.rand(count) < _PROBABILITY) & fits.any(0)
    size = torch.stack([heights.gather(0, first)[0], widths.gather(0, first)[0]])
    free = torch.tensor([[height], [width]]) - size + 1
    corner = (torch.rand(2, count) * free).long()
    return torch.cat([corner, size]) * erased


IMAGE_TRANSFORMS: dict[str, Callable[[int], ImageTransforms]] = {
    "mixup": lambda num_classes: ImageTransforms(on_batch=transforms().MixUp(num_classes=num_classes)),
    "cutmix": lambda num_classes: ImageTransforms(on_batch=transforms().CutMix(num_classes=num_classes)),
    "random-erasing": lambda num_classes: ImageTransforms(on_images=random_erasing),
    "randaugment": lambda num_classes: ImageTransforms(on_crops=rand_augment),
}
"""The image-level methods; the argument is the number of classes. MixUp (Zhang et al., 2018) and CutMix (Yun et al.,
2019) are torchvision's, with its defaults."""
