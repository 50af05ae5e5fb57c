"""How often image-level augmentation destroys the cue that separates look-alikes, measured on the embedded birds.

Every species has a look-alike that differs in one trait. Drawn into the same scene, the two pictures of such a pair are
equal except where that trait shows: their difference is the only cue. Both pictures get the same augmentation (the same
box, crop or operations). If less than a tenth of their difference is left, the cue is destroyed: nothing in the image
supports its label any more. This definition covers erased, covered, cropped, moved and recoloured pixels.

An operation that depends on the whole picture (equalise) can carry the cue to other pixels, which counts as preserved.
Crops are not scaled back to the full size: scaling adds no information, and would count the same cue several times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semaug.data.augmentation import transforms
from semaug.data.birds import TRAITS, Species, draw, species

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""Augments both pictures of a pair, uint8 (2, 3, H, W), alike; the second argument (3, H, W) is an image to mix in."""

LEFT = 0.1  # the cue is destroyed if less than this share of the pair's difference is left
GRAIN = 8  # differences up to this many of 255 levels are hidden by the grain and do not count
_MIN_PIXELS = 4  # a cue of fewer pixels is hidden in the drawing, by a leaf or a twig
OURS = "Semantic augmentation"


@dataclass(frozen=True, eq=False)
class Pair:
    """An image and its look-alike in the same scene, uint8 (2, 3, H, W), and the trait in which they differ."""

    pictures: Tensor
    trait: str
    values: tuple[str, str]  # of the trait, in the image and in its look-alike
    box: tuple[int, int, int, int]  # around the pixels that differ: left, top, right, bottom


@dataclass(frozen=True, eq=False)
class Example:
    """The effect of an augmentation on one image; pictures are uint8 (H, W, 3)."""

    pair: Pair
    original: npt.NDArray[np.uint8]
    look_alike: npt.NDArray[np.uint8]
    augmented: npt.NDArray[np.uint8]
    destroyed: bool


@dataclass(frozen=True, eq=False)
class Destruction:
    """The share of images whose only cue an augmentation destroys; `how` describes its settings."""

    name: str
    how: str
    share: float
    standard_error: float
    count: int
    example: Example


def look_alike_pairs(num_species: int, per_species: int, seed: int = 0, size: int = 96) -> list[Pair]:
    """Draw pairs of training images.

    Args:
        num_species: Number of species.
        per_species: Images of each; they alternate between its look-alikes.
        seed: Seed of species and images.
        size: Side of the images in pixels.

    Returns:
        The pairs whose cue is visible, in the order of species.
    """
    kinds = species(num_species, seed)
    pairs = []
    for kind in kinds:
        rivals = [rival for rival in kinds if len(_differing(kind, rival)) == 1]
        for index in range(per_species):
            rival = rivals[index % len(rivals)]
            (trait,) = _differing(kind, rival)
            drawings = [draw(shown, index, seed=seed, size=size, scene=kind) for shown in (kind, rival)]
            pictures = torch.stack([torch.from_numpy(drawing.image).permute(2, 0, 1) for drawing in drawings])
            rows, columns = torch.nonzero(_visible_change(pictures), as_tuple=True)
            if len(rows) >= _MIN_PIXELS:
                box = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
                pairs.append(Pair(pictures, TRAITS[trait], (kind.traits[trait], rival.traits[trait]), box))
    return pairs


def _differing(one: Species, two: Species) -> list[int]:
    return [i for i, values in enumerate(zip(one.traits, two.traits, strict=True)) if values[0] != values[1]]


def _visible_change(pictures: Tensor) -> Tensor:
    """Levels by which each pixel of a pair differs in its most different channel, beyond the grain: (H, W)."""
    change = (pictures[0].int() - pictures[1].int()).abs().amax(0)
    return (change - GRAIN).clamp(min=0)


def difference_left(pair: Pair, augmented: Tensor) -> float:
    """The difference of a pair's `augmented` pictures, (2, 3, H, W), as a share of that of the pair."""
    return float(_visible_change(augmented).sum() / _visible_change(pair.pictures).sum())


def augment_all(pairs: Sequence[Pair], augmentation: Augmentation, seed: int = 0) -> list[Tensor]:
    """Augment the pictures of pairs, each with an image of another species; torch's random state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        distance = len(pairs) // 2  # half-way round the list is another species
        return [
            augmentation(pair.pictures, pairs[(i + distance) % len(pairs)].pictures[0]) for i, pair in enumerate(pairs)
        ]


def _cutout(pictures: Tensor, other: Tensor) -> Tensor:
    row, column = torch.randint(pictures.shape[-1], (2,)).tolist()
    return cut_square(pictures, row, column)


def cut_square(pictures: Tensor, row: int, column: int) -> Tensor:
    """Cutout's grey square, half as wide as the pictures (…, H, W), around a pixel."""
    reach = pictures.shape[-1] // 4
    result = pictures.clone()
    result[..., max(0, row - reach) : row + reach, max(0, column - reach) : column + reach] = 128
    return result


def _cutmix(pictures: Tensor, other: Tensor) -> Tensor:
    left, top, right, bottom = transforms().CutMix(num_classes=2).make_params([pictures])["box"]
    result = pictures.clone()
    result[..., top:bottom, left:right] = other[:, top:bottom, left:right]
    return result


def _random_resized_crop(pictures: Tensor, other: Tensor) -> Tensor:
    """The crop only, not yet resized."""
    box = transforms().RandomResizedCrop(pictures.shape[-1]).make_params([pictures])
    result: Tensor = transforms().functional.crop(pictures, **box)
    return result


AUGMENTATIONS: dict[str, tuple[str, Augmentation]] = {
    "RandomResizedCrop": ("8–100 % of the area, aspect ratio 3:4 to 4:3", _random_resized_crop),
    "CutMix": ("a box of another image, its area drawn from Beta(1, 1); the label is mixed by area", _cutmix),
    "Cutout": ("one square of half the side, cut off at the border", _cutout),
    "Random Erasing": (
        "one box of 2–33 % of the area, in every image",
        lambda pictures, other: transforms().RandomErasing(p=1.0)(pictures),
    ),
    "Random crop": (
        "448 of 600 pixels, the usual crop of fine-grained recognition",
        lambda pictures, other: transforms().RandomCrop(round(pictures.shape[-1] * 448 / 600))(pictures),
    ),
    "RandAugment": ("two operations of magnitude 9", lambda pictures, other: transforms().RandAugment()(pictures)),
}
"""Settings in words, and function, of each; settings are torchvision's defaults."""


def measure(num_species: int = 20, per_species: int = 20, seed: int = 0, size: int = 96) -> list[Destruction]:
    """Measure how often each augmentation destroys the only cue.

    Args:
        num_species: Number of species.
        per_species: Images of each.
        seed: Seed of all random numbers.
        size: Side of the images in pixels.

    Returns:
        A row for each of `AUGMENTATIONS`, and one for semantic augmentation, which leaves pixels alone.
    """
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
