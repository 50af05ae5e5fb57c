"""How often image-level augmentation destroys what tells look-alikes apart, measured on the procedural birds.

Every species has a look-alike that differs in one trait. Drawn into the same scene, the two pictures of such a pair
agree pixel by pixel except where that trait shows: their difference is the only cue. Both pictures of a pair get the
same augmentation (the same box, crop, or operations). Where less than a tenth of their difference is left, the cue is
destroyed: the augmented image keeps its label and has lost all that supports it. The one definition serves erased,
pasted-over, cropped, moved and recoloured pixels alike.

An operation that depends on the whole picture (equalise) can carry the cue to other pixels, which counts as kept.
Crops are not scaled back to the full size: that adds no information, and would count the same cue several times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.transforms import v2

from semaug.data.birds import TRAITS, Species, draw, species

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""Augments both pictures of a pair, uint8 (2, 3, H, W), alike; the second argument (3, H, W) is there to mix in."""

LEFT = 0.1  # the cue is destroyed when less than this part of the pair's difference is left
GRAIN = 8  # differences up to this many of 255 levels drown in the grain and do not count
MIN_PIXELS = 4  # a cue of fewer pixels is taken to be hidden from the start, by a leaf or a twig


@dataclass(frozen=True, eq=False)
class Pair:
    """An image and its look-alike in the same scene, uint8 (2, 3, H, W), and the trait in which they differ."""

    pictures: Tensor
    trait: str
    values: tuple[str, str]  # of the trait, in the image and in its look-alike
    box: tuple[int, int, int, int]  # around the pixels that differ: left, top, right, bottom


@dataclass(frozen=True, eq=False)
class Example:
    """What an augmentation did to one image: pictures uint8 (H, W, 3)."""

    pair: Pair
    original: npt.NDArray[np.uint8]
    look_alike: npt.NDArray[np.uint8]
    augmented: npt.NDArray[np.uint8]
    destroyed: bool


@dataclass(frozen=True, eq=False)
class Destruction:
    """The share of images whose only cue an augmentation destroys."""

    name: str
    how: str  # settings, in words
    share: float
    standard_error: float
    count: int  # images measured
    example: Example


def look_alike_pairs(num_species: int, per_species: int, seed: int = 0, size: int = 96) -> list[Pair]:
    """Pairs of training images, `per_species` of each species, less those whose cue is hidden in the drawing.

    The images of a species take turns with its look-alikes, if it has several that differ in one trait.
    """
    kinds = species(num_species, seed)
    pairs = []
    for kind in kinds:
        rivals = [rival for rival in kinds if len(_differing(kind, rival)) == 1]
        for index in range(per_species):
            rival = rivals[index % len(rivals)]
            (place,) = _differing(kind, rival)
            drawings = (
                draw(kind, index, seed=seed, size=size),
                draw(rival, index, seed=seed, size=size, scene=kind),
            )
            pictures = torch.stack([torch.from_numpy(drawing.image).permute(2, 0, 1) for drawing in drawings])
            rows, columns = torch.nonzero(_visible_change(pictures), as_tuple=True)
            if len(rows) >= MIN_PIXELS:
                box = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
                pairs.append(Pair(pictures, TRAITS[place], (kind.traits[place], rival.traits[place]), box))
    return pairs


def _differing(one: Species, two: Species) -> list[int]:
    return [place for place, values in enumerate(zip(one.traits, two.traits, strict=True)) if values[0] != values[1]]


def _visible_change(pictures: Tensor) -> Tensor:
    """Levels by which each pixel of a pair differs in its most different channel, beyond the grain: (H, W)."""
    change = (pictures[0].int() - pictures[1].int()).abs().amax(0)
    return (change - GRAIN).clamp(min=0)


def difference_left(pair: Pair, augmented: Tensor) -> float:
    """The difference of a pair after augmentation, as a part of the difference before."""
    return float(_visible_change(augmented).sum() / _visible_change(pair.pictures).sum())


def augment_all(pairs: Sequence[Pair], augmentation: Augmentation, seed: int = 0) -> list[Tensor]:
    """All pairs augmented, each with an image from elsewhere in the list to mix in; torch's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        distance = len(pairs) // 2  # pairs stand species by species: half way round is another species
        return [
            augmentation(pair.pictures, pairs[(i + distance) % len(pairs)].pictures[0]) for i, pair in enumerate(pairs)
        ]


# -------------------------------------------------------------------------------------------------- augmentations


def random_erasing(pictures: Tensor, other: Tensor) -> Tensor:
    """Random Erasing with torchvision's defaults, always applied."""
    result: Tensor = v2.RandomErasing(p=1.0)(pictures)
    return result


def cutout(pictures: Tensor, other: Tensor) -> Tensor:
    """Cutout: a grey square of half the side around a random pixel, cut off at the border."""
    size = pictures.shape[-1]
    row, column = torch.randint(size, (2,)).tolist()
    return cut_square(pictures, row, column)


def cut_square(pictures: Tensor, row: int, column: int) -> Tensor:
    """Cutout's square at a given pixel."""
    reach = pictures.shape[-1] // 4
    result = pictures.clone()
    result[..., max(0, row - reach) : row + reach, max(0, column - reach) : column + reach] = 128
    return result


def cutmix(pictures: Tensor, other: Tensor) -> Tensor:
    """CutMix: a box of `other` pasted in, its area drawn from Beta(1, 1)."""
    left, top, right, bottom = v2.CutMix(num_classes=2).make_params([pictures])["box"]
    result = pictures.clone()
    result[..., top:bottom, left:right] = other[:, top:bottom, left:right]
    return result


def rand_augment(pictures: Tensor, other: Tensor) -> Tensor:
    """RandAugment with torchvision's defaults: two operations of magnitude 9."""
    result: Tensor = v2.RandAugment()(pictures)
    return result


def random_crop(pictures: Tensor, other: Tensor) -> Tensor:
    """A random crop of 448 out of 600 pixels, in proportion."""
    result: Tensor = v2.RandomCrop(round(pictures.shape[-1] * 448 / 600))(pictures)
    return result


def random_resized_crop(pictures: Tensor, other: Tensor) -> Tensor:
    """The crop of RandomResizedCrop with torchvision's defaults, not yet resized."""
    box: dict[str, Any] = v2.RandomResizedCrop(pictures.shape[-1]).make_params([pictures])
    result: Tensor = v2.functional.crop(pictures, **box)
    return result


AUGMENTATIONS: dict[str, tuple[str, Augmentation]] = {
    "RandomResizedCrop": ("8–100 % of the area, aspect ratio 3:4 to 4:3", random_resized_crop),
    "CutMix": ("a box of another image, its area drawn from Beta(1, 1); the label is mixed by area", cutmix),
    "Cutout": ("one square of half the side, cut off at the border", cutout),
    "Random Erasing": ("one box of 2–33 % of the area, in every image", random_erasing),
    "Random crop": ("448 of 600 pixels, the usual crop of fine-grained recognition", random_crop),
    "RandAugment": ("two operations of magnitude 9", rand_augment),
}
OURS = "Semantic augmentation"


# ------------------------------------------------------------------------------------------------------- measurement


def measure(num_species: int = 20, per_species: int = 20, seed: int = 0, size: int = 96) -> list[Destruction]:
    """What each image-level augmentation destroys, and that augmentation of features destroys nothing."""
    pairs = look_alike_pairs(num_species, per_species, seed, size)
    rows = [
        _summary(name, how, pairs, augment_all(pairs, augmentation, seed))
        for name, (how, augmentation) in AUGMENTATIONS.items()
    ]
    untouched = [pair.pictures for pair in pairs]
    rows.append(_summary(OURS, "none by construction: it moves features and leaves the pixels alone", pairs, untouched))
    return rows


def _summary(name: str, how: str, pairs: Sequence[Pair], augmented: Sequence[Tensor]) -> Destruction:
    destroyed = [difference_left(pair, pictures) < LEFT for pair, pictures in zip(pairs, augmented, strict=True)]
    share = sum(destroyed) / len(pairs)
    shown = destroyed.index(True) if any(destroyed) else 0
    pair = pairs[shown]
    original, look_alike, result = (
        np.ascontiguousarray(picture.permute(1, 2, 0).numpy()) for picture in (*pair.pictures, augmented[shown][0])
    )
    example = Example(pair, original, look_alike, result, destroyed[shown])
    return Destruction(name, how, share, (share * (1 - share) / len(pairs)) ** 0.5, len(pairs), example)
