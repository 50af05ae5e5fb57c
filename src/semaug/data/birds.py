"""The embedded birds: a seeded data set of drawn look-alike species.

Species differ in five small local traits only (bill tip, eye ring, wing bar, crown patch, tail band). Plumage, pose,
light, background and occlusion vary within a species and carry no information about it. Every drawing records how much
of each pixel shows each trait. Images are reproducible to the bit (see :mod:`semaug.data.brush`).
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset

from semaug.data import brush
from semaug.data.brush import BLACK, COLOURS, WHITE, Array, Colour, Dice, Frame, Shape, ellipse, mix, paint, taper

VALUES: dict[str, tuple[str, ...]] = {
    "bill_tip": ("absent", "yellow", "orange", "red", "white"),
    "eye_ring": ("absent", "white", "buff", "yellow", "azure"),
    "wing_bar": ("absent", "white", "buff", "yellow", "rufous"),
    "crown_patch": ("absent", "red", "rufous", "orange", "yellow"),
    "tail_band": ("absent", "white", "buff", "rufous", "black"),
}
"""The values of each trait."""
TRAITS: tuple[str, ...] = tuple(VALUES)
MAX_SPECIES: int = math.prod(len(values) for values in VALUES.values())
SPLITS: tuple[str, ...] = ("train", "val", "test")
VERSION = 2  # of the drawing: raised whenever the same arguments give another picture

_CROWN_WORDS = ("", "Ruby_", "Russet_", "Amber_", "Golden_")
_PLACE_WORDS = (
    "Alpine", "Brook", "Canyon", "Cedar", "Coastal", "Desert", "Dune", "Fen", "Forest", "Garden", "Glade", "Heath",
    "Hill", "Island", "Lake", "Marsh", "Meadow", "Moor", "Orchard", "Prairie", "Reed", "River", "Steppe", "Valley",
    "Willow",
)  # fmt: skip
_FAMILY_WORDS = (
    "Babbler", "Bunting", "Chat", "Creeper", "Dipper", "Finch", "Flycatcher", "Grosbeak", "Junco", "Lark", "Linnet",
    "Martin", "Oriole", "Pipit", "Redstart", "Robin", "Shrike", "Siskin", "Sparrow", "Starling", "Tanager", "Thrush",
    "Vireo", "Warbler", "Wren",
)  # fmt: skip
_MAX_MISSES = 100  # draws from one species, all of whose look-alikes may be taken, before another one is varied


# ------------------------------------------------------------------------------------------------------------- species


@dataclass(frozen=True)
class Species:
    """One species: a unique name, usable as a folder name, and one value per trait in the order of `TRAITS`."""

    name: str
    traits: tuple[str, ...]


def species(count: int, seed: int = 0) -> list[Species]:
    """Make up distinct species, each with a look-alike one trait away.

    Each new species changes one trait of the one before. The traits take turns, so that no value of a trait is common
    to most species.

    Args:
        count: From 2 to `MAX_SPECIES`; a smaller count gives a prefix of the same list.
        seed: Another seed gives other species.

    Returns:
        The species.

    Raises:
        ValueError: `count` is out of range.
    """
    if not 2 <= count <= MAX_SPECIES:
        raise ValueError(f"count must be between 2 and {MAX_SPECIES}, not {count}")
    dice = Dice(brush.seed_of("species", seed))
    code = tuple(dice.below(len(VALUES[trait])) for trait in TRAITS)
    codes, taken, misses = [code], {code}, 0
    while len(codes) < count:
        if misses == _MAX_MISSES:  # a dead end
            code, misses = codes[dice.below(len(codes))], 0
        place = (len(codes) + misses) % len(TRAITS)
        choices = len(VALUES[TRAITS[place]])
        value = (code[place] + 1 + dice.below(choices - 1)) % choices  # a different one
        child = (*code[:place], value, *code[place + 1 :])
        if child in taken:
            misses += 1
        else:
            codes.append(child)
            taken.add(child)
            code, misses = child, 0
    return [_describe(code) for code in codes]


def _describe(code: tuple[int, ...]) -> Species:
    """Name a species after its traits: crown, then eye ring and wing bar, then bill tip and tail band."""
    bill, ring, bar, crown, band = code
    name = f"{_CROWN_WORDS[crown]}{_PLACE_WORDS[5 * ring + bar]}_{_FAMILY_WORDS[5 * bill + band]}"
    return Species(name, tuple(VALUES[trait][value] for trait, value in zip(TRAITS, code, strict=True)))


# ------------------------------------------------------------------------------------------------------------ the bird

_PLUMAGES: tuple[Colour, ...] = (
    (0.44, 0.46, 0.50), (0.47, 0.46, 0.30), (0.46, 0.36, 0.28), (0.60, 0.53, 0.42), (0.36, 0.45, 0.56),
    (0.50, 0.42, 0.48), (0.36, 0.46, 0.38), (0.27, 0.28, 0.32), (0.33, 0.48, 0.49), (0.58, 0.44, 0.40),
    (0.62, 0.58, 0.34), (0.58, 0.40, 0.28), (0.66, 0.65, 0.62), (0.40, 0.52, 0.66), (0.50, 0.56, 0.36),
)  # fmt: skip


class _Pose(NamedTuple):
    """The frames of the bird's parts and the lengths, in units of the body, that join them."""

    body: Frame
    head: Frame
    tail: Frame
    wing: Frame
    feet: Frame
    neck: float
    bill: float


def _pose(dice: Dice, whole: Frame) -> _Pose:
    """Choose size, direction, posture and position; bill, crown, tail and belly stay inside the picture."""
    zoom = dice.between(0.34, 0.45)
    mirror = whole if dice.random() < 0.5 else Frame(whole.unit, 0, (-1.0, 0.0), (0.0, 1.0), whole.unit)
    body = mirror.child(0.5, 0.5, dice.between(-50, 10), zoom)
    tail_turn, wing_turn, head_turn = dice.between(-22, 22), dice.between(-8, 14), dice.between(-15, 45)
    neck, bill = dice.between(0.0, 0.09), dice.between(0.30, 0.40)
    head = body.child(0.43 + neck, -0.24 - neck, head_turn)
    tail, wing = body.child(-0.36, -0.02, tail_turn), body.child(0.06, -0.03, wing_turn)
    feet = Frame(*body.at(-0.02, 0.0), mirror.right, mirror.down, body.unit).child(0, 0.50, 0)  # below, not tilted

    points = head.at(0.2 + bill, 0.05), head.at(0, -0.25), tail.at(-0.68, 0), body.at(0, 0.42)
    columns, rows = zip(*points, strict=True)
    right = dice.between(0.03 * whole.unit - min(columns), 0.97 * whole.unit - max(columns))
    down = dice.between(0.03 * whole.unit - min(rows), 0.97 * whole.unit - max(rows))
    body, head, tail, wing, feet = (
        frame._replace(x=frame.x + right, y=frame.y + down) for frame in (body, head, tail, wing, feet)
    )
    return _Pose(body, head, tail, wing, feet, neck, bill)


def _bird(canvas: Array, dice: Dice, pose: _Pose, kind: Species) -> None:
    """Paint the bird from back to front; only the colours of the traits depend on the species."""
    body, head, tail, wing, feet, neck, bill_long = pose
    plumage, second = dice.pick(_PLUMAGES), dice.pick(_PLUMAGES)
    belly = mix(dice.pick(_PLUMAGES), (0.90, 0.87, 0.80), dice.between(0.3, 0.8))
    hood = mix(plumage, second, dice.random())
    dark = mix(plumage, (0.12, 0.11, 0.12), dice.between(0.25, 0.55))
    horn = dice.pick(((0.22, 0.21, 0.22), (0.32, 0.27, 0.24), (0.28, 0.30, 0.34)), 0.04)
    tones = [dice.between(-0.06, 0.06) for _ in range(3)]

    def trait(name: str, frame: Frame, shape: Shape, within: Shape | None = None) -> None:
        place = TRAITS.index(name)
        tone = COLOURS.get(kind.traits[place])
        colour = None if tone is None else (tone[0] + tones[0], tone[1] + tones[1], tone[2] + tones[2])
        paint(canvas, frame, shape, colour, trait=place, within=within)

    # Tail.
    feathers = taper((0, 0), (-0.52, 0), 0.09, dice.between(0.10, 0.14))
    paint(canvas, tail, feathers, dark)
    paint(canvas, tail, taper((0, 0), (-0.6, 0.0), 0.012, 0.012), mix(dark, BLACK, 0.4))
    trait("tail_band", tail, brush.stripe(-0.50, 0.055, 2.0), within=feathers)

    # Legs.
    for step in (-0.05, 0.10):
        paint(canvas, feet, taper((step, -0.30), (step + 0.02, 0.05), 0.022, 0.018), horn)
        paint(canvas, feet, taper((step - 0.03, 0.06), (step + 0.09, 0.06), 0.022, 0.016), horn)

    # Bill.
    bill = taper((0.14, 0.02), (0.18 + bill_long, 0.05), 0.105, 0.045)
    paint(canvas, head, bill, horn)
    trait("bill_tip", head, brush.stripe(0.34 + bill_long, 0.22), within=bill)

    # Body, neck and head in one outline, with a pale belly, a darker back and a hood.
    trunk = ellipse(0, 0, 0.5, dice.between(0.29, 0.34))
    skull = taper((0.25, -0.10), (0.43 + neck, -0.24 - neck), 0.22, 0.235)
    outline = brush.blend(trunk, skull, 0.15, 0.95)
    paint(canvas, body, outline, plumage)
    paint(canvas, body, ellipse(0.10, 0.24, 0.50, 0.22), belly, within=outline, soft=0.22 * body.unit)
    paint(canvas, body, ellipse(-0.1, -0.32, 0.5, 0.12), dark, within=outline, soft=0.2 * body.unit, opacity=0.5)
    dome = ellipse(0, 0, 0.235, 0.235)
    paint(canvas, head, ellipse(0, 0, 0.22, 0.24), hood, within=dome, soft=0.10 * body.unit)
    for _ in range(dice.below(12)):
        u, v = dice.between(-0.10, 0.45), dice.between(0.04, 0.26)
        streak = taper((u, v), (u - 0.07, v + 0.03), 0.018, 0.01)
        paint(canvas, body, streak, dark, within=outline, opacity=0.6)
    for _ in range(dice.below(3)):  # patches in the traits' colours that carry no information
        patch = ellipse(dice.between(-0.45, 0.50), dice.between(-0.10, 0.25), 0.09, 0.06)
        paint(canvas, body, patch, dice.pick(brush.BLOSSOMS), within=outline, soft=0.08 * body.unit, opacity=0.8)

    # Head: the crown does not cover the eye and its ring.
    trait("crown_patch", head, ellipse(-0.03, -0.235, 0.16, 0.12), within=dome)
    eye = head.child(0.085, -0.015, 0)
    trait("eye_ring", eye, ellipse(0, 0, 0.1, 0.1))
    paint(canvas, eye, ellipse(0, 0, 0.058, 0.058), (0.05, 0.04, 0.05))
    paint(canvas, eye, ellipse(0.02, -0.02, 0.018, 0.018), WHITE)

    # Wing.
    coverts = taper((0.10, 0), (-0.46, 0.10), 0.20, 0.05)
    paint(canvas, wing, coverts, dark)
    paint(canvas, wing, ellipse(0.10, -0.03, 0.17, 0.15), plumage, within=coverts, soft=0.1 * body.unit)
    for lift in (0.0, 0.05, 0.10):
        quill = taper((-0.12, lift), (-0.50, 0.06 + 0.5 * lift), 0.008, 0.008)
        paint(canvas, wing, quill, mix(dark, BLACK, 0.5), within=coverts, opacity=0.8)
    trait("wing_bar", wing, brush.stripe(-0.09, 0.05, -1.5), within=coverts)


# ------------------------------------------------------------------------------------------------------------ images


@dataclass(frozen=True, eq=False)
class Drawing:
    """An image, uint8 (H, W, 3), and the visibility of each trait, float32 (traits, H, W).

    Visibility is the share of a pixel's colour that comes from the trait (from its place if the trait is absent), after
    occlusion and blur.
    """

    image: npt.NDArray[np.uint8]
    visibility: Array

    @property
    def masks(self) -> npt.NDArray[np.bool_]:
        """Pixels that show each trait, bool (traits, H, W): a quarter of their colour or more comes from it."""
        return self.visibility >= 0.25


def draw(
    kind: Species, index: int, *, seed: int = 0, size: int = 96, split: str = "train", scene: Species | None = None
) -> Drawing:
    """Draw one image of a species; the same arguments always give the same pixels.

    Args:
        kind: The species.
        index: Number of the image, from 0.
        seed: Another seed gives other images.
        size: Side in pixels, at least 32. Another size shows the same scene, with other grain.
        split: One of `SPLITS`; no image is in two of them.
        scene: Species from whose image `index` pose, plumage, light and background are taken, to compare look-alikes
            that differ in their traits only; by default `kind`.

    Returns:
        The drawing.

    Raises:
        ValueError: `index`, `size` or `split` is out of range.
    """
    _check(split, size)
    if index < 0:
        raise ValueError(f"index must be at least 0, not {index}")
    dice = Dice(brush.seed_of("scene", seed, split, *(scene or kind).traits, index))
    canvas = np.zeros((3 + len(TRAITS), size, size), np.float32)
    whole = Frame(0.0, 0.0, (1.0, 0.0), (0.0, 1.0), float(size))
    brush.background(canvas[:3], dice, whole)  # no trait can be covered yet
    pose = _pose(dice, whole)
    brush.perch(canvas[:3], dice, pose.feet)
    _bird(canvas, dice, pose, kind)
    brush.foreground(canvas, dice, whole)
    canvas = brush.develop(canvas, dice)
    image = (np.clip(canvas[:3], 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
    return Drawing(np.ascontiguousarray(image), canvas[3:])


def _check(split: str, size: int) -> None:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    if size < 32:
        raise ValueError(f"size must be at least 32 pixels, not {size}")


class Birds(Dataset[tuple[Any, int]]):
    """The embedded birds: a torch data set of items (image, label), and a split (:class:`semaug.data.samples.Samples`).

    Images are drawn on access, in any order and any process. `species` and their names, `classes`, are indexed by
    label; `labels` holds the label of every image.

    Args:
        num_species: Number of classes.
        per_species: Images of each, at least 1.
        split: One of `SPLITS`, which share the species but no image.
        size: Side of the images in pixels, at least 32.
        seed: Seed of species and images.
        transform: Applied to the image, a uint8 tensor (3, size, size).

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        num_species: int = 20,
        per_species: int = 50,
        split: str = "train",
        size: int = 96,
        seed: int = 0,
        transform: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        _check(split, size)
        if per_species < 1:
            raise ValueError(f"per_species must be at least 1, not {per_species}")
        self.species = species(num_species, seed)
        self.classes = [kind.name for kind in self.species]
        self.labels = [label for label in range(num_species) for _ in range(per_species)]
        self.per_species, self.split, self.size, self.seed = per_species, split, size, seed
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def drawing(self, i: int) -> Drawing:
        """Image number `i` with the visibility of its traits."""
        label, index = divmod(range(len(self))[i], self.per_species)
        return draw(self.species[label], index, seed=self.seed, size=self.size, split=self.split)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = torch.from_numpy(self.drawing(i).image).permute(2, 0, 1).contiguous()
        return (image if self.transform is None else self.transform(image)), self.labels[i]

    def load(self, i: int) -> Image.Image:
        return Image.fromarray(self.drawing(i).image)

    def name(self, i: int) -> str:
        return f"{self.split}/{self.classes[self.labels[i]]}/{i}"

    def fingerprint(self, *, dates: bool = True) -> str:
        parameters = (VERSION, self.split, len(self.species), len(self), self.size, self.seed)
        return hashlib.sha256(repr(parameters).encode()).hexdigest()
