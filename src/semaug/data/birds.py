"""Procedural birds: a drawn, seeded data set of look-alike species.

Species differ only in five small local traits (bill tip, eye ring, wing bar, crown patch, tail band). Everything
else, from plumage and pose to light, background and occlusion, varies inside a species and says nothing about it.
Every drawing knows how much of each pixel shows each trait, so one can measure how often an augmentation destroys
the only cue.

Images are reproducible bit by bit: random numbers come from hashes and from ``random.Random(int).random()``, and
pixels are computed with correctly rounded operations alone (+, -, *, /, square root; no BLAS, no sine over arrays).
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

Array = npt.NDArray[Any]  # float32 throughout; typed loosely since the stubs promote float32 times float
Colour = tuple[float, float, float]

WHITE, BUFF, YELLOW, ORANGE = (0.96, 0.96, 0.94), (0.93, 0.81, 0.58), (0.97, 0.82, 0.20), (0.96, 0.58, 0.14)
RED, AZURE, RUFOUS, BLACK = (0.86, 0.19, 0.16), (0.30, 0.60, 0.93), (0.72, 0.36, 0.17), (0.07, 0.07, 0.09)

_COLOURS: dict[str, dict[str, Colour]] = {
    "bill_tip": {"yellow": YELLOW, "orange": ORANGE, "red": RED, "white": WHITE},
    "eye_ring": {"white": WHITE, "buff": BUFF, "yellow": YELLOW, "azure": AZURE},
    "wing_bar": {"white": WHITE, "buff": BUFF, "yellow": YELLOW, "rufous": RUFOUS},
    "crown_patch": {"red": RED, "rufous": RUFOUS, "orange": ORANGE, "yellow": YELLOW},
    "tail_band": {"white": WHITE, "buff": BUFF, "rufous": RUFOUS, "black": BLACK},
}
TRAITS: tuple[str, ...] = tuple(_COLOURS)
VALUES: dict[str, tuple[str, ...]] = {trait: ("absent", *colours) for trait, colours in _COLOURS.items()}
MAX_SPECIES: int = math.prod(len(values) for values in VALUES.values())
SPLITS: tuple[str, ...] = ("train", "val", "test")
VERSION = 1  # of the drawing: raised whenever the same arguments give another picture

_CROWN_WORDS = ("", "Ruby_", "Russet_", "Amber_", "Golden_")
_PLACE_WORDS = (
    "Alpine", "Brook", "Canyon", "Cedar", "Coastal",
    "Desert", "Dune", "Fen", "Forest", "Garden",
    "Glade", "Heath", "Hill", "Island", "Lake",
    "Marsh", "Meadow", "Moor", "Orchard", "Prairie",
    "Reed", "River", "Steppe", "Valley", "Willow",
)  # fmt: skip
_FAMILY_WORDS = (
    "Babbler", "Bunting", "Chat", "Creeper", "Dipper",
    "Finch", "Flycatcher", "Grosbeak", "Junco", "Lark",
    "Linnet", "Martin", "Oriole", "Pipit", "Redstart",
    "Robin", "Shrike", "Siskin", "Sparrow", "Starling",
    "Tanager", "Thrush", "Vireo", "Warbler", "Wren",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- species


@dataclass(frozen=True)
class Species:
    """One species: a unique name, fit for a folder, and one value per trait in the order of ``TRAITS``."""

    name: str
    traits: tuple[str, ...]


def species(count: int, seed: int = 0) -> list[Species]:
    """Return `count` distinct species; a smaller count gives a prefix of the same list.

    Each new species changes one trait of an earlier one, so every species has a look-alike one trait away.
    """
    if not 2 <= count <= MAX_SPECIES:
        raise ValueError(f"count must be between 2 and {MAX_SPECIES}, not {count}")
    dice = random.Random(_key("species", seed))
    codes = [tuple(_below(dice, len(VALUES[trait])) for trait in TRAITS)]
    taken = set(codes)
    while len(codes) < count:
        child = list(codes[_below(dice, len(codes))])
        place = _below(dice, len(TRAITS))
        child[place] = _below(dice, len(VALUES[TRAITS[place]]))
        if tuple(child) not in taken:
            codes.append(tuple(child))
            taken.add(tuple(child))
    return [_describe(code) for code in codes]


def _describe(code: tuple[int, ...]) -> Species:
    """Name a species after its traits: crown, then eye ring and wing bar, then bill tip and tail band."""
    bill, ring, bar, crown, band = code
    name = f"{_CROWN_WORDS[crown]}{_PLACE_WORDS[5 * ring + bar]}_{_FAMILY_WORDS[5 * bill + band]}"
    return Species(name, tuple(VALUES[trait][value] for trait, value in zip(TRAITS, code, strict=True)))


def cue(kinds: Sequence[Species], k: int) -> list[int]:
    """Return the indices of the traits that separate species `k` from its nearest look-alike(s) among `kinds`.

    Where the nearest differ in one trait, which is the rule, hiding any trait of the list leaves `k`
    indistinguishable from at least one other species.
    """
    rivals = [
        [t for t, (own, other) in enumerate(zip(kinds[k].traits, rival.traits, strict=True)) if own != other]
        for place, rival in enumerate(kinds)
        if place != k % len(kinds)
    ]
    if not rivals:
        raise ValueError("cue needs at least two species")
    nearest = min(len(rival) for rival in rivals)
    return sorted({t for rival in rivals if len(rival) == nearest for t in rival})


# -------------------------------------------------------------------------------------------------- random numbers


def _key(*parts: object) -> int:
    """Hash the parts to a 64-bit integer, the same in every process and on every platform."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _below(dice: random.Random, count: int) -> int:
    return int(dice.random() * count)


def _between(dice: random.Random, low: float, high: float) -> float:
    return low + (high - low) * dice.random()


def _hashes(key: int, *shape: int) -> npt.NDArray[np.uint64]:
    """Return random 64-bit integers of a shape: the splitmix64 hash of a counter that starts at `key`."""
    counter = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    mixed = counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _clouds(key: int, size: int, rows: int, columns: int) -> Array:
    """Return smooth noise (size, size) in [0, 1]: random values on a lattice of rows x columns cells, interpolated."""
    lattice = (_hashes(key, rows + 1, columns + 1) >> np.uint64(40)).astype(np.float32) / 2**24
    steps = (np.arange(size, dtype=np.float32) + 0.5) / size
    for cells in (rows, columns):  # interpolate along the first axis, then swap the axes
        cell = (steps * cells).astype(np.intp)
        part = steps * cells - cell.astype(np.float32)
        part = (part * part * (3 - 2 * part))[:, None]
        lattice = (lattice[cell] * (1 - part) + lattice[cell + 1] * part).T
    return lattice


# ------------------------------------------------------------------------------------------------ shapes and paint


class Frame(NamedTuple):
    """A local coordinate system (u to the right, v down) on the pixel grid."""

    x: float
    y: float
    right: tuple[float, float]
    down: tuple[float, float]
    unit: float  # pixels per unit of length

    def at(self, u: float, v: float) -> tuple[float, float]:
        """Return the pixel position of a local point."""
        x = self.x + self.unit * (u * self.right[0] + v * self.down[0])
        y = self.y + self.unit * (u * self.right[1] + v * self.down[1])
        return x, y

    def child(self, u: float, v: float, degrees: float, zoom: float = 1.0) -> "Frame":
        """Return the frame moved to a local point, turned from u towards v, and scaled."""
        # Rounding hides the last-bit differences between the C libraries of different platforms.
        cos, sin = round(math.cos(math.radians(degrees)), 9), round(math.sin(math.radians(degrees)), 9)
        right = (cos * self.right[0] + sin * self.down[0], cos * self.right[1] + sin * self.down[1])
        down = (cos * self.down[0] - sin * self.right[0], cos * self.down[1] - sin * self.right[1])
        return Frame(*self.at(u, v), right, down, self.unit * zoom)


class Shape(NamedTuple):
    """A signed distance (negative inside) of local coordinates, and a circle that holds the shape."""

    distance: Callable[[Array, Array], Array]
    u: float
    v: float
    reach: float


def _ellipse(u: float, v: float, width: float, height: float) -> Shape:
    """Return an ellipse by its centre and half axes."""

    def distance(us: Array, vs: Array) -> Array:
        across, along = (us - u) / width, (vs - v) / height
        level = np.sqrt(across * across + along * along)
        across, along = across / width, along / height
        result: Array = level * (level - 1) / (np.sqrt(across * across + along * along) + 1e-6)
        return result

    return Shape(distance, u, v, max(width, height))


def _taper(start: tuple[float, float], end: tuple[float, float], thick: float, thin: float) -> Shape:
    """Return a rounded stroke whose half width goes from `thick` at the start to `thin` at the end."""
    du, dv = end[0] - start[0], end[1] - start[1]

    def distance(us: Array, vs: Array) -> Array:
        u, v = us - start[0], vs - start[1]
        part = np.clip((u * du + v * dv) / (du * du + dv * dv), 0, 1)
        u, v = u - part * du, v - part * dv
        return np.sqrt(u * u + v * v) - (thick + part * (thin - thick))

    reach = math.sqrt(du * du + dv * dv) / 2 + max(thick, thin)
    return Shape(distance, start[0] + du / 2, start[1] + dv / 2, reach)


def _leaf(length: float, width: float) -> Shape:
    """Return a leaf along u: the overlap of two discs through its two ends."""
    radius = (length * length + width * width) / (2 * width)

    def distance(us: Array, vs: Array) -> Array:
        offset = np.abs(vs) + (radius - width)
        return np.sqrt(us * us + offset * offset) - radius

    return Shape(distance, 0, 0, length)


def _stripe(u: float, half: float, bend: float = 0.0) -> Shape:
    """Return an endless stripe across u, bent backwards; use it inside another shape."""
    return Shape(lambda us, vs: np.abs(us - u + bend * vs * vs) - half, u, 0, math.inf)


def _blend(first: Shape, second: Shape, soft: float, reach: float) -> Shape:
    """Return the union of two shapes with a smooth joint, around the centre of the first."""

    def distance(us: Array, vs: Array) -> Array:
        one, two = first.distance(us, vs), second.distance(us, vs)
        joint = np.maximum(soft - np.abs(one - two), 0)
        result: Array = np.minimum(one, two) - joint * joint / (4 * soft)
        return result

    return Shape(distance, first.u, first.v, reach)


def _paint(
    canvas: Array,
    frame: Frame,
    shape: Shape,
    colour: Colour | None,
    *,
    trait: int | None = None,
    within: Shape | None = None,
    opacity: float = 1.0,
    soft: float = 1.0,
) -> None:
    """Paint a shape on the canvas (3 + len(TRAITS), H, W), whose last channels hold the visibility of the traits.

    Paint covers what lies below, traits included, and shows trait number `trait` if given. No colour (an absent
    trait) leaves the colours as they are. `soft` is the width of the edge in pixels; `within` cuts with a sharp one.
    """
    box = within if within and within.reach < shape.reach else shape
    x, y = frame.at(box.u, box.v)
    reach = box.reach * frame.unit + soft
    left, right = max(0, math.floor(x - reach)), min(canvas.shape[2], math.ceil(x + reach))
    top, bottom = max(0, math.floor(y - reach)), min(canvas.shape[1], math.ceil(y + reach))
    if left >= right or top >= bottom:
        return
    xs = (np.arange(left, right, dtype=np.float32) + (0.5 - frame.x)) / frame.unit
    ys = (np.arange(top, bottom, dtype=np.float32)[:, None] + (0.5 - frame.y)) / frame.unit
    us, vs = xs * frame.right[0] + ys * frame.right[1], xs * frame.down[0] + ys * frame.down[1]
    cover = np.clip(0.5 - shape.distance(us, vs) * (frame.unit / soft), 0, 1) * opacity
    if within:
        cover = cover * np.clip(0.5 - within.distance(us, vs) * frame.unit, 0, 1)
    patch = canvas[:, top:bottom, left:right]
    if colour is None:
        patch[3:] *= 1 - cover
    else:  # in this form full cover gives the very colour, without a trace of what lies below
        patch *= 1 - cover
        patch[:3] += cover * np.array(colour, np.float32)[:, None, None]
    if trait is not None:
        patch[3 + trait] += cover


# ------------------------------------------------------------------------------------------------------- the scene

_PLUMAGES: tuple[Colour, ...] = (
    (0.44, 0.46, 0.50), (0.47, 0.46, 0.30), (0.46, 0.36, 0.28), (0.60, 0.53, 0.42), (0.36, 0.45, 0.56),
    (0.50, 0.42, 0.48), (0.36, 0.46, 0.38), (0.27, 0.28, 0.32), (0.33, 0.48, 0.49), (0.58, 0.44, 0.40),
    (0.62, 0.58, 0.34), (0.58, 0.40, 0.28), (0.66, 0.65, 0.62), (0.40, 0.52, 0.66), (0.50, 0.56, 0.36),
)  # fmt: skip
_BARKS: tuple[Colour, ...] = ((0.36, 0.27, 0.20), (0.45, 0.41, 0.37), (0.30, 0.25, 0.24), (0.52, 0.41, 0.29))
_LEAVES: tuple[Colour, ...] = ((0.30, 0.50, 0.18), (0.20, 0.40, 0.20), (0.48, 0.57, 0.22), (0.60, 0.47, 0.16))
_BLOSSOMS: tuple[Colour, ...] = (WHITE, BUFF, YELLOW, ORANGE, RED, AZURE, RUFOUS)  # the traits' own colours
# Per background: the colours at the top, at the bottom and of the noise, then the rows and columns of the noise.
_BACKGROUNDS: tuple[tuple[Colour, Colour, Colour, int, int], ...] = (
    ((0.40, 0.62, 0.86), (0.80, 0.88, 0.93), (0.98, 0.97, 0.95), 4, 3),  # sky
    ((0.96, 0.74, 0.56), (0.70, 0.66, 0.76), (0.98, 0.88, 0.72), 5, 2),  # evening sky
    ((0.28, 0.42, 0.20), (0.16, 0.30, 0.16), (0.60, 0.70, 0.34), 6, 6),  # foliage
    ((0.62, 0.60, 0.34), (0.42, 0.40, 0.22), (0.82, 0.74, 0.48), 5, 7),  # dry grass
    ((0.46, 0.64, 0.70), (0.16, 0.36, 0.46), (0.72, 0.86, 0.88), 14, 3),  # water
    ((0.66, 0.68, 0.70), (0.46, 0.46, 0.46), (0.36, 0.36, 0.38), 4, 4),  # misty wood
)


def _pick(dice: random.Random, colours: Sequence[Colour], spread: float = 0.05) -> Colour:
    """Return one of the colours, its channels jittered."""
    red, green, blue = colours[_below(dice, len(colours))]
    light = _between(dice, -spread, spread)
    red, green, blue = (c + light + _between(dice, -spread, spread) / 2 for c in (red, green, blue))
    return red, green, blue


def _mix(one: Colour, two: Colour, part: float) -> Colour:
    """Return the colour that lies at `part` of the way from one to two."""
    red, green, blue = (a + (b - a) * part for a, b in zip(one, two, strict=True))
    return red, green, blue


def _background(canvas: Array, dice: random.Random, whole: Frame) -> None:
    """Fill the canvas with sky, foliage, water or wood, out of focus, with branches, leaves and blossoms."""
    size = canvas.shape[1]
    top, bottom, accent, rows, columns = _BACKGROUNDS[_below(dice, len(_BACKGROUNDS))]
    ends = [np.array(_pick(dice, [colour], 0.08), np.float32)[:, None, None] for colour in (top, bottom, accent)]
    fall = ((np.arange(size, dtype=np.float32) + 0.5) / size)[:, None]
    canvas[:3] = ends[0] + fall * (ends[1] - ends[0])
    noise = 0.65 * _clouds(_key(dice.random()), size, rows, columns)
    noise += 0.35 * _clouds(_key(dice.random()), size, 2 * rows, 2 * columns)
    canvas[:3] += np.clip(2.4 * noise - 0.8, 0, 1) * (ends[2] - canvas[:3]) * _between(dice, 0.5, 0.9)
    for _ in range(_below(dice, 4)):
        ends_at = (_between(dice, -0.1, 1.1), -0.1), (_between(dice, -0.1, 1.1), 1.1)
        thick, thin = _between(dice, 0.01, 0.05), _between(dice, 0.01, 0.03)
        bark = _mix(_pick(dice, _BARKS), bottom, _between(dice, 0.2, 0.7))
        _paint(canvas, whole, _taper(*ends_at, thick, thin), bark, soft=size * _between(dice, 0.01, 0.04))
    for _ in range(_below(dice, 9)):
        leaf = whole.child(dice.random(), dice.random(), _between(dice, 0, 360))
        shape = _leaf(_between(dice, 0.05, 0.16), _between(dice, 0.025, 0.06))
        tint = _mix(_pick(dice, _LEAVES), bottom, _between(dice, 0.0, 0.5))
        _paint(canvas, leaf, shape, tint, soft=size * _between(dice, 0.01, 0.03), opacity=0.85)
    for _ in range(_below(dice, 7)):
        radius = _between(dice, 0.015, 0.035)
        blossom = _ellipse(dice.random(), dice.random(), radius, radius * _between(dice, 0.7, 1.3))
        _paint(canvas, whole, blossom, _pick(dice, _BLOSSOMS), soft=1 + size * _between(dice, 0.0, 0.02), opacity=0.9)


class Pose(NamedTuple):
    """The frames of the bird's parts and the lengths, in units of the body, that join them."""

    body: Frame
    head: Frame
    tail: Frame
    wing: Frame
    feet: Frame
    neck: float
    bill: float


def _pose(dice: random.Random, whole: Frame) -> Pose:
    """Choose size, direction, posture and place of the bird; bill, crown, tail and belly stay inside the picture."""
    zoom = _between(dice, 0.34, 0.45)
    mirror = whole if dice.random() < 0.5 else Frame(whole.unit, 0, (-1.0, 0.0), (0.0, 1.0), whole.unit)
    body = mirror.child(0.5, 0.5, _between(dice, -50, 10), zoom)
    tail_turn, wing_turn, head_turn = _between(dice, -22, 22), _between(dice, -8, 14), _between(dice, -15, 45)
    neck, bill = _between(dice, 0.0, 0.09), _between(dice, 0.30, 0.40)
    head = body.child(0.43 + neck, -0.24 - neck, head_turn)
    tail, wing = body.child(-0.36, -0.02, tail_turn), body.child(0.06, -0.03, wing_turn)
    feet = Frame(*body.at(-0.02, 0.0), mirror.right, mirror.down, body.unit).child(0, 0.50, 0)  # below, not tilted

    points = head.at(0.2 + bill, 0.05), head.at(0, -0.25), tail.at(-0.68, 0), body.at(0, 0.42)
    columns, rows = zip(*points, strict=True)
    right = _between(dice, 0.03 * whole.unit - min(columns), 0.97 * whole.unit - max(columns))
    down = _between(dice, 0.03 * whole.unit - min(rows), 0.97 * whole.unit - max(rows))
    body, head, tail, wing, feet = (
        frame._replace(x=frame.x + right, y=frame.y + down) for frame in (body, head, tail, wing, feet)
    )
    return Pose(body, head, tail, wing, feet, neck, bill)


def _perch(canvas: Array, dice: random.Random, feet: Frame) -> None:
    """Paint the branch under the feet."""
    bark = _pick(dice, _BARKS)
    perch = feet.child(0, 0.04, _between(dice, -22, 22))
    thick, thin = _between(dice, 0.05, 0.11), _between(dice, 0.05, 0.11)
    _paint(canvas, perch, _taper((-3, thick), (3, thin), thick, thin), bark)
    _paint(canvas, perch, _taper((-3, 0.3 * thick), (3, 0.3 * thin), 0.025, 0.02), _mix(bark, WHITE, 0.25), soft=2)


def _bird(canvas: Array, dice: random.Random, pose: Pose, kind: Species) -> None:
    """Paint the bird from back to front; besides the colours of the traits, nothing depends on the species."""
    body, head, tail, wing, feet, neck, bill_long = pose
    plumage, second = _pick(dice, _PLUMAGES), _pick(dice, _PLUMAGES)
    belly = _mix(_pick(dice, _PLUMAGES), (0.90, 0.87, 0.80), _between(dice, 0.3, 0.8))
    hood = _mix(plumage, second, dice.random())
    dark = _mix(plumage, (0.12, 0.11, 0.12), _between(dice, 0.25, 0.55))
    horn = _pick(dice, ((0.22, 0.21, 0.22), (0.32, 0.27, 0.24), (0.28, 0.30, 0.34)), 0.04)
    tones = [_between(dice, -0.06, 0.06) for _ in range(3)]

    def trait(name: str, frame: Frame, shape: Shape, within: Shape | None = None) -> None:
        place = TRAITS.index(name)
        tone = _COLOURS[name].get(kind.traits[place])
        colour = None if tone is None else (tone[0] + tones[0], tone[1] + tones[1], tone[2] + tones[2])
        _paint(canvas, frame, shape, colour, trait=place, within=within)

    # Tail.
    feathers = _taper((0, 0), (-0.52, 0), 0.09, _between(dice, 0.10, 0.14))
    _paint(canvas, tail, feathers, dark)
    _paint(canvas, tail, _taper((0, 0), (-0.6, 0.0), 0.012, 0.012), _mix(dark, BLACK, 0.4))
    trait("tail_band", tail, _stripe(-0.50, 0.055, 2.0), within=feathers)

    # Legs.
    for step in (-0.05, 0.10):
        _paint(canvas, feet, _taper((step, -0.30), (step + 0.02, 0.05), 0.022, 0.018), horn)
        _paint(canvas, feet, _taper((step - 0.03, 0.06), (step + 0.09, 0.06), 0.022, 0.016), horn)

    # Bill.
    bill = _taper((0.14, 0.02), (0.18 + bill_long, 0.05), 0.105, 0.045)
    _paint(canvas, head, bill, horn)
    trait("bill_tip", head, _stripe(0.34 + bill_long, 0.22), within=bill)

    # Body, neck and head in one outline, with a pale belly, a darker back and a hood.
    trunk = _ellipse(0, 0, 0.5, _between(dice, 0.29, 0.34))
    skull = _taper((0.25, -0.10), (0.43 + neck, -0.24 - neck), 0.22, 0.235)
    outline = _blend(trunk, skull, 0.15, 0.95)
    _paint(canvas, body, outline, plumage)
    _paint(canvas, body, _ellipse(0.10, 0.24, 0.50, 0.22), belly, within=outline, soft=0.22 * body.unit)
    _paint(canvas, body, _ellipse(-0.1, -0.32, 0.5, 0.12), dark, within=outline, soft=0.2 * body.unit, opacity=0.5)
    dome = _ellipse(0, 0, 0.235, 0.235)
    _paint(canvas, head, _ellipse(0, 0, 0.22, 0.24), hood, within=dome, soft=0.10 * body.unit)
    for _ in range(_below(dice, 12)):
        u, v = _between(dice, -0.10, 0.45), _between(dice, 0.04, 0.26)
        streak = _taper((u, v), (u - 0.07, v + 0.03), 0.018, 0.01)
        _paint(canvas, body, streak, dark, within=outline, opacity=0.6)
    for _ in range(_below(dice, 3)):  # patches of the traits' colours that mean nothing
        patch = _ellipse(_between(dice, -0.45, 0.50), _between(dice, -0.10, 0.25), 0.09, 0.06)
        _paint(canvas, body, patch, _pick(dice, _BLOSSOMS), within=outline, soft=0.08 * body.unit, opacity=0.8)

    # Head: the crown leaves the eye and its ring free.
    trait("crown_patch", head, _ellipse(-0.03, -0.235, 0.16, 0.12), within=dome)
    eye = head.child(0.085, -0.015, 0)
    trait("eye_ring", eye, _ellipse(0, 0, 0.1, 0.1))
    _paint(canvas, eye, _ellipse(0, 0, 0.058, 0.058), (0.05, 0.04, 0.05))
    _paint(canvas, eye, _ellipse(0.02, -0.02, 0.018, 0.018), WHITE)

    # Wing.
    coverts = _taper((0.10, 0), (-0.46, 0.10), 0.20, 0.05)
    _paint(canvas, wing, coverts, dark)
    _paint(canvas, wing, _ellipse(0.10, -0.03, 0.17, 0.15), plumage, within=coverts, soft=0.1 * body.unit)
    for lift in (0.0, 0.05, 0.10):
        quill = _taper((-0.12, lift), (-0.50, 0.06 + 0.5 * lift), 0.008, 0.008)
        _paint(canvas, wing, quill, _mix(dark, BLACK, 0.5), within=coverts, opacity=0.8)
    trait("wing_bar", wing, _stripe(-0.09, 0.05, -1.5), within=coverts)


def _foreground(canvas: Array, dice: random.Random, whole: Frame) -> None:
    """Paint what stands in front of the bird: some leaves, seldom a twig."""
    if dice.random() < 0.3:
        ends = (_between(dice, 0, 1), -0.05), (_between(dice, 0, 1), 1.05)
        _paint(canvas, whole, _taper(*ends, 0.012, 0.02), _pick(dice, _BARKS))
    for _ in range(_below(dice, 7)):
        length = _between(dice, 0.07, 0.15)
        leaf = whole.child(dice.random(), dice.random(), _between(dice, 0, 360))
        tint = _pick(dice, _LEAVES)
        _paint(canvas, leaf, _leaf(length, 0.4 * length), tint)
        _paint(canvas, leaf, _taper((-length, 0), (length, 0), 0.005, 0.002), _mix(tint, WHITE, 0.3), opacity=0.7)


def _develop(canvas: Array, dice: random.Random) -> Array:
    """Blur colours and visibilities alike, then light the colours and add grain; return the canvas."""
    size = canvas.shape[1]
    weight = np.float32(_between(dice, 0.0, 0.25))
    for _ in range(max(1, round(size / 96))):  # a larger image needs more passes to look as blurred
        padded = np.pad(canvas, ((0, 0), (1, 1), (0, 0)), "edge")
        canvas = canvas + weight * (padded[:, :-2] + padded[:, 2:] - 2 * canvas)
        padded = np.pad(canvas, ((0, 0), (0, 0), (1, 1)), "edge")
        canvas = canvas + weight * (padded[:, :, :-2] + padded[:, :, 2:] - 2 * canvas)
    steps = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    light = 1 + _between(dice, -0.3, 0.3) * steps[:, None] + _between(dice, -0.3, 0.3) * steps
    cast = np.array([_between(dice, 0.86, 1.14) for _ in range(3)], np.float32)[:, None, None]
    contrast, shift = _between(dice, 0.6, 1.1), _between(dice, -0.08, 0.08)
    pieces = _hashes(_key(dice.random()), 3, size, size)
    grain = sum(((pieces >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.float32) for k in range(4)) / 65536 - 2
    colours = (canvas[:3] * light * cast - 0.5) * contrast + (0.5 + shift)
    canvas[:3] = colours + grain * _between(dice, 0.0, 0.09)
    return canvas


# ------------------------------------------------------------------------------------------------------ public use


@dataclass(frozen=True, eq=False)
class Drawing:
    """An image uint8 (H, W, 3) and the visibility of each trait, float32 (len(TRAITS), H, W).

    Visibility is the share of a pixel's colour that comes from the trait (an absent trait: from its place), after
    drawing order, occlusion and blur.
    """

    image: npt.NDArray[np.uint8]
    visibility: Array

    @property
    def masks(self) -> npt.NDArray[np.bool_]:
        """Pixels in which each trait is visible, bool (len(TRAITS), H, W): at least a quarter of their colour."""
        return self.visibility >= 0.25


def draw(
    kind: Species, index: int, *, seed: int = 0, size: int = 96, split: str = "train", scene: Species | None = None
) -> Drawing:
    """Draw image number `index` of a species: the same arguments always give the same pixels.

    `scene` borrows pose, plumage, light and background from the image that another species has at this place, to
    compare look-alikes that differ in their traits alone. Another size shows the same scene, with other grain.
    """
    _check(split, size)
    if index < 0:
        raise ValueError(f"index must be at least 0, not {index}")
    dice = random.Random(_key("scene", seed, split, *(scene or kind).traits, index))
    canvas = np.zeros((3 + len(TRAITS), size, size), np.float32)
    whole = Frame(0.0, 0.0, (1.0, 0.0), (0.0, 1.0), float(size))
    _background(canvas[:3], dice, whole)  # no trait is there yet to be covered
    pose = _pose(dice, whole)
    _perch(canvas[:3], dice, pose.feet)
    _bird(canvas, dice, pose, kind)
    _foreground(canvas, dice, whole)
    canvas = _develop(canvas, dice)
    image = (np.clip(canvas[:3], 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
    return Drawing(np.ascontiguousarray(image), canvas[3:])


def _check(split: str, size: int) -> None:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    if size < 32:
        raise ValueError(f"size must be at least 32 pixels, not {size}")


class Birds(Dataset[tuple[Any, int]]):
    """Procedural birds: items (image, label), the image a uint8 tensor (3, size, size) or the transform of it.

    The splits share the species and no image. Images are drawn when asked for, in any order and any process.
    `species` and their names, `classes`, are indexed by label; `labels` holds the label of every image.
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
        """Return image number `i` with the visibility of its traits."""
        label, index = divmod(range(len(self))[i], self.per_species)
        return draw(self.species[label], index, seed=self.seed, size=self.size, split=self.split)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = torch.from_numpy(self.drawing(i).image).permute(2, 0, 1).contiguous()
        return (image if self.transform is None else self.transform(image)), self.labels[i]
