"""RandAugment and Random Erasing of a whole batch on its device, each image with random numbers of its own.

torchvision draws once for all that it is given, and called image by image it starts hundreds of small operators for
every batch. Here images that draw the same operation go through it together. Settings are torchvision's defaults, and
random numbers come from the CPU's generator, so that they do not depend on the device and nobody waits for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

LEVEL = 9 / 30  # magnitude 9, where 30 is the largest
OPERATIONS = 2  # for each image, one after the other


def _affine(images: Tensor, translate: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    centre = [0.0, 0.0] if any(shear) else None
    slant = [math.degrees(math.atan(value)) for value in shear]
    changed: Tensor = F.affine(images, angle=0.0, translate=list(translate), scale=1.0, shear=slant, center=centre)
    return changed


def _shift(images: Tensor, side: int, level: float) -> int:
    return int(level * 150 / 331 * images.shape[side])


# by name: from images and level, and whether the level has a random sign
RAND_AUGMENT: dict[str, tuple[Callable[[Tensor, float], Tensor], bool]] = {
    "identity": (lambda images, _: images, False),
    "shear x": (lambda images, level: _affine(images, shear=(0.3 * level, 0.0)), True),
    "shear y": (lambda images, level: _affine(images, shear=(0.0, 0.3 * level)), True),
    "translate x": (lambda images, level: _affine(images, (_shift(images, -1, level), 0)), True),
    "translate y": (lambda images, level: _affine(images, (0, _shift(images, -2, level))), True),
    "rotate": (lambda images, level: F.rotate(images, 30.0 * level), True),
    "brightness": (lambda images, level: F.adjust_brightness(images, 1.0 + 0.9 * level), True),
    "colour": (lambda images, level: F.adjust_saturation(images, 1.0 + 0.9 * level), True),
    "contrast": (lambda images, level: F.adjust_contrast(images, 1.0 + 0.9 * level), True),
    "sharpness": (lambda images, level: F.adjust_sharpness(images, 1.0 + 0.9 * level), True),
    "posterise": (lambda images, level: F.posterize(images, 8 - round(4 * level)), False),
    "solarise": (lambda images, level: F.solarize(images, 255.0 * (1.0 - level)), False),
    "autocontrast": (lambda images, _: F.autocontrast(images), False),
    "equalise": (lambda images, _: F.equalize(images), False),
}


def rand_augment(images: Tensor, rows: Tensor | slice = slice(None), total: int | None = None) -> Tensor:
    """RandAugment (Cubuk et al., 2020) of uint8 images (N, 3, H, W).

    Where they are some `rows` of a batch of `total` images, numbers are drawn for all of it.
    """
    count = images.shape[0] if total is None else total
    changed = images.clone()
    for _ in range(OPERATIONS):
        drawn = torch.randint(len(RAND_AUGMENT), (count,))[rows]
        negative = (torch.rand(count) <= 0.5)[rows]
        for number, (operation, signed) in enumerate(RAND_AUGMENT.values()):
            for sign in (1, -1) if signed else (1,):
                chosen = drawn == number
                if signed:
                    chosen &= negative == (sign < 0)
                places = chosen.nonzero()[:, 0]
                if number and len(places):  # the first is the identity
                    where = places.to(images.device, non_blocking=True)
                    changed[where] = operation(changed[where], sign * LEVEL)
    return changed


ERASED, SHARES, RATIOS, TRIES = 0.5, (0.02, 0.33), (0.3, 3.3), 10


def random_erasing(images: Tensor, rows: Tensor | slice = slice(None), total: int | None = None) -> Tensor:
    """Random Erasing (Zhong et al., 2020) of normalised images (N, 3, H, W): in half of them a rectangle is zeroed.

    Where they are some `rows` of a batch of `total` images, numbers are drawn for all of it.
    """
    count, _, height, width = images.shape
    drawn = rectangles(count if total is None else total, height, width)[:, rows]
    top, left, high, wide = drawn.to(images.device, non_blocking=True)[..., None]
    y, x = (torch.arange(side, device=images.device) for side in (height, width))
    inside = ((y >= top) & (y < top + high))[:, :, None] & ((x >= left) & (x < left + wide))[:, None]
    return images.masked_fill(inside[:, None], 0.0)


def rectangles(count: int, height: int, width: int) -> Tensor:
    """Top, left, height and width (4, N) of what is erased; nothing where the height is 0.

    A rectangle that does not fit is drawn again, ten times at most.
    """
    area = height * width * (SHARES[0] + (SHARES[1] - SHARES[0]) * torch.rand(TRIES, count))
    low, high = (math.log(ratio) for ratio in RATIOS)
    ratio = (low + (high - low) * torch.rand(TRIES, count)).exp()
    heights, widths = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
    fits = (heights < height) & (widths < width)
    first = fits.int().argmax(0, keepdim=True)  # of those that fit
    erased = (torch.rand(count) < ERASED) & fits.any(0)
    size = torch.stack([heights.gather(0, first)[0], widths.gather(0, first)[0]])
    room = torch.tensor([[height], [width]]) - size + 1
    corner = (torch.rand(2, count) * room).long()
    return torch.cat([corner, size]) * erased


OnImages = Callable[[Tensor, Tensor, int], Tensor]
OnBatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ImageTransforms:
    """What a method does to images: to uint8 crops, to normalised images, and to a batch with its labels."""

    on_crops: OnImages | None = None
    on_images: OnImages | None = None
    on_batch: OnBatch | None = None

    @property
    def is_plain(self) -> bool:
        """Whether images are only cropped and flipped."""
        return self == PLAIN


PLAIN = ImageTransforms()


def _mixup(num_classes: int) -> ImageTransforms:
    from torchvision.transforms import v2

    return ImageTransforms(on_batch=v2.MixUp(num_classes=num_classes))


def _cutmix(num_classes: int) -> ImageTransforms:
    from torchvision.transforms import v2

    return ImageTransforms(on_batch=v2.CutMix(num_classes=num_classes))


IMAGE_TRANSFORMS: dict[str, Callable[[int], ImageTransforms]] = {
    "mixup": _mixup,
    "cutmix": _cutmix,
    "random-erasing": lambda num_classes: ImageTransforms(on_images=random_erasing),
    "randaugment": lambda num_classes: ImageTransforms(on_crops=rand_augment),
}
