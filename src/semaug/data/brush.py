"""Drawing tools for the embedded birds: seeded random numbers, shapes, paint, scenery and light.

Images are reproducible to the bit: random numbers come from hashes and from ``random.Random(int).random()``, and pixels
are computed with correctly rounded operations only (+, -, *, /, square root; no BLAS, no sine of arrays).
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]  # float32 throughout; typed loosely since the stubs promote float32 times float
Colour = tuple[float, float, float]

WHITE, BLACK = (0.96, 0.96, 0.94), (0.07, 0.07, 0.09)
COLOURS: dict[str, Colour] = {
    "white": WHITE, "buff": (0.93, 0.81, 0.58), "yellow": (0.97, 0.82, 0.20), "orange": (0.96, 0.58, 0.14),
    "red": (0.86, 0.19, 0.16), "azure": (0.30, 0.60, 0.93), "rufous": (0.72, 0.36, 0.17), "black": BLACK,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ random numbers


def seed_of(*parts: object) -> int:
    """Hash the parts to a 64-bit integer that is the same in every process and on every platform."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Dice(random.Random):
    """Random numbers that depend on ``random()`` only, which is the same in all versions of Python."""

    def below(self, count: int) -> int:
        """A random integer from 0 to `count` - 1."""
        return int(self.random() * count)

    def between(self, low: float, high: float) -> float:
        """A random number between `low` and `high`."""
        return low + (high - low) * self.random()

    def pick(self, colours: Sequence[Colour], spread: float = 0.05) -> Colour:
        """One of the colours, its channels jittered by about `spread`."""
        red, green, blue = colours[self.below(len(colours))]
        light = self.between(-spread, spread)
        red, green, blue = (c + light + self.between(-spread, spread) / 2 for c in (red, green, blue))
        return red, green, blue


def mix(one: Colour, two: Colour, part: float) -> Colour:
    """The colour at `part` of the way from `one` to `two`."""
    red, green, blue = (a + (b - a) * part for a, b in zip(one, two, strict=True))
    return red, green, blue


def _hashes(seed: int, *shape: int) -> npt.NDArray[np.uint64]:
    """Random 64-bit integers of a shape: the splitmix64 hash of a counter that starts at `seed`."""
    counter = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    mixed = counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _clouds(seed: int, size: int, rows: int, columns: int) -> Array:
    """Smooth noise (size, size) in [0, 1]: random values on a lattice of rows x columns cells, interpolated."""
    lattice = (_hashes(seed, rows + 1, columns + 1) >> np.uint64(40)).astype(np.float32) / 2**24
    steps = (np.arange(size, dtype=np.float32) + 0.5) / size
    for cells in (rows, columns):  # interpolate along the first axis, then swap the axes
        cell = (steps * cells).astype(np.intp)
        part = steps * cells - cell.astype(np.float32)
        part = (part * part * (3 - 2 * part))[:, None]
        lattice = (lattice[cell] * (1 - part) + lattice[cell + 1] * part).T
    return lattice


# ---------------------------------------------------------------------------------------------------- shapes and paint


class Frame(NamedTuple):
    """A local coordinate system (u to the right, v down) on the pixel grid."""

    x: float
    y: float
    right: tuple[float, float]
    down: tuple[float, float]
    unit: float  # pixels per unit of length

    def at(self, u: float, v: float) -> tuple[float, float]:
        """The pixel position of a local point."""
        x = self.x + self.unit * (u * self.right[0] + v * self.down[0])
        y = self.y + self.unit * (u * self.right[1] + v * self.down[1])
        return x, y

    def child(self, u: float, v: float, degrees: float, zoom: float = 1.0) -> "Frame":
        """Move, turn and scale the frame.

        Args:
            u: First local coordinate of the new origin.
            v: Second local coordinate.
            degrees: Angle of the turn, from u towards v.
            zoom: Scale of the new frame in this one.
        """
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


def ellipse(u: float, v: float, width: float, height: float) -> Shape:
    """An ellipse.

    Args:
        u: First coordinate of its centre.
        v: Second coordinate.
        width: Half axis along u.
        height: Half axis along v.
    """

    def distance(us: Array, vs: Array) -> Array:
        across, along = (us - u) / width, (vs - v) / height
        level = np.sqrt(across * across + along * along)
        across, along = across / width, along / height
        result: Array = level * (level - 1) / (np.sqrt(across * across + along * along) + 1e-6)
        return result

    return Shape(distance, u, v, max(width, height))


def taper(start: tuple[float, float], end: tuple[float, float], thick: float, thin: float) -> Shape:
    """A rounded stroke whose width changes along it.

    Args:
        start: Where it starts.
        end: Where it ends.
        thick: Half width at the start.
        thin: Half width at the end.
    """
    du, dv = end[0] - start[0], end[1] - start[1]

    def distance(us: Array, vs: Array) -> Array:
        u, v = us - start[0], vs - start[1]
        part = np.clip((u * du + v * dv) / (du * du + dv * dv), 0, 1)
        u, v = u - part * du, v - part * dv
        return np.sqrt(u * u + v * v) - (thick + part * (thin - thick))

    reach = math.sqrt(du * du + dv * dv) / 2 + max(thick, thin)
    return Shape(distance, start[0] + du / 2, start[1] + dv / 2, reach)


def _leaf(length: float, width: float) -> Shape:
    """A leaf along u: the overlap of two discs through its two ends."""
    radius = (length * length + width * width) / (2 * width)

    def distance(us: Array, vs: Array) -> Array:
        offset = np.abs(vs) + (radius - width)
        return np.sqrt(us * us + offset * offset) - radius

    return Shape(distance, 0, 0, length)


def stripe(u: float, half: float, bend: float = 0.0) -> Shape:
    """An endless stripe across u, bent backwards, for use inside another shape."""
    return Shape(lambda us, vs: np.abs(us - u + bend * vs * vs) - half, u, 0, math.inf)


def blend(first: Shape, second: Shape, soft: float, reach: float) -> Shape:
    """The union of two shapes with a smooth joint.

    Args:
        first: A shape; the result has its centre.
        second: Another shape.
        soft: Width of the joint.
        reach: Radius of a circle that holds the result.
    """

    def distance(us: Array, vs: Array) -> Array:
        one, two = first.distance(us, vs), second.distance(us, vs)
        joint = np.maximum(soft - np.abs(one - two), 0)
        result: Array = np.minimum(one, two) - joint * joint / (4 * soft)
        return result

    return Shape(distance, first.u, first.v, reach)


def paint(
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
    """Paint a shape on a canvas, in place; it covers everything below, traits included.

    Args:
        canvas: Float32 (3 + traits, H, W): colours, then the visibility of each trait.
        frame: Coordinates of the shape.
        shape: What to paint.
        colour: None (an absent trait) leaves the colours as they are.
        trait: Number of the trait that the paint shows, if any.
        within: A shape that limits the paint, with a sharp edge.
        opacity: From 0 to 1.
        soft: Width of the edge in pixels.
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
    else:  # in this form full cover gives the exact colour
        patch *= 1 - cover
        patch[:3] += cover * np.array(colour, np.float32)[:, None, None]
    if trait is not None:
        patch[3 + trait] += cover


# ----------------------------------------------------------------------------------------------------------- the scene

_BARKS: tuple[Colour, ...] = ((0.36, 0.27, 0.20), (0.45, 0.41, 0.37), (0.30, 0.25, 0.24), (0.52, 0.41, 0.29))
_LEAVES: tuple[Colour, ...] = ((0.30, 0.50, 0.18), (0.20, 0.40, 0.20), (0.48, 0.57, 0.22), (0.60, 0.47, 0.16))
BLOSSOMS = tuple(colour for name, colour in COLOURS.items() if name != "black")  # the colours of the traits
# Per background: the colours at the top, at the bottom and of the noise, then the rows and columns of the noise.
_BACKGROUNDS: tuple[tuple[Colour, Colour, Colour, int, int], ...] = (
    ((0.40, 0.62, 0.86), (0.80, 0.88, 0.93), (0.98, 0.97, 0.95), 4, 3),  # sky
    ((0.96, 0.74, 0.56), (0.70, 0.66, 0.76), (0.98, 0.88, 0.72), 5, 2),  # evening sky
    ((0.28, 0.42, 0.20), (0.16, 0.30, 0.16), (0.60, 0.70, 0.34), 6, 6),  # foliage
    ((0.62, 0.60, 0.34), (0.42, 0.40, 0.22), (0.82, 0.74, 0.48), 5, 7),  # dry grass
    ((0.46, 0.64, 0.70), (0.16, 0.36, 0.46), (0.72, 0.86, 0.88), 14, 3),  # water
    ((0.66, 0.68, 0.70), (0.46, 0.46, 0.46), (0.36, 0.36, 0.38), 4, 4),  # misty wood
)


def background(canvas: Array, dice: Dice, whole: Frame) -> None:
    """Fill the canvas with sky, foliage, water or wood, out of focus, with branches, leaves and blossoms."""
    size = canvas.shape[1]
    top, bottom, accent, rows, columns = _BACKGROUNDS[dice.below(len(_BACKGROUNDS))]
    ends = [np.array(dice.pick([colour], 0.08), np.float32)[:, None, None] for colour in (top, bottom, accent)]
    fall = ((np.arange(size, dtype=np.float32) + 0.5) / size)[:, None]
    canvas[:3] = ends[0] + fall * (ends[1] - ends[0])
    noise = 0.65 * _clouds(seed_of(dice.random()), size, rows, columns)
    noise += 0.35 * _clouds(seed_of(dice.random()), size, 2 * rows, 2 * columns)
    canvas[:3] += np.clip(2.4 * noise - 0.8, 0, 1) * (ends[2] - canvas[:3]) * dice.between(0.5, 0.9)
    for _ in range(dice.below(4)):
        ends_at = (dice.between(-0.1, 1.1), -0.1), (dice.between(-0.1, 1.1), 1.1)
        thick, thin = dice.between(0.01, 0.05), dice.between(0.01, 0.03)
        bark = mix(dice.pick(_BARKS), bottom, dice.between(0.2, 0.7))
        paint(canvas, whole, taper(*ends_at, thick, thin), bark, soft=size * dice.between(0.01, 0.04))
    for _ in range(dice.below(9)):
        leaf = whole.child(dice.random(), dice.random(), dice.between(0, 360))
        shape = _leaf(dice.between(0.05, 0.16), dice.between(0.025, 0.06))
        tint = mix(dice.pick(_LEAVES), bottom, dice.between(0.0, 0.5))
        paint(canvas, leaf, shape, tint, soft=size * dice.between(0.01, 0.03), opacity=0.85)
    for _ in range(dice.below(7)):
        radius = dice.between(0.015, 0.035)
        blossom = ellipse(dice.random(), dice.random(), radius, radius * dice.between(0.7, 1.3))
        paint(canvas, whole, blossom, dice.pick(BLOSSOMS), soft=1 + size * dice.between(0.0, 0.02), opacity=0.9)


def perch(canvas: Array, dice: Dice, feet: Frame) -> None:
    """Paint the branch under the feet."""
    bark = dice.pick(_BARKS)
    branch = feet.child(0, 0.04, dice.between(-22, 22))
    thick, thin = dice.between(0.05, 0.11), dice.between(0.05, 0.11)
    paint(canvas, branch, taper((-3, thick), (3, thin), thick, thin), bark)
    paint(canvas, branch, taper((-3, 0.3 * thick), (3, 0.3 * thin), 0.025, 0.02), mix(bark, WHITE, 0.25), soft=2)


def foreground(canvas: Array, dice: Dice, whole: Frame) -> None:
    """Paint the foreground: some leaves, sometimes a twig."""
    if dice.random() < 0.3:
        ends = (dice.between(0, 1), -0.05), (dice.between(0, 1), 1.05)
        paint(canvas, whole, taper(*ends, 0.012, 0.02), dice.pick(_BARKS))
    for _ in range(dice.below(7)):
        length = dice.between(0.07, 0.15)
        leaf = whole.child(dice.random(), dice.random(), dice.between(0, 360))
        tint = dice.pick(_LEAVES)
        paint(canvas, leaf, _leaf(length, 0.4 * length), tint)
        paint(canvas, leaf, taper((-length, 0), (length, 0), 0.005, 0.002), mix(tint, WHITE, 0.3), opacity=0.7)


def develop(canvas: Array, dice: Dice) -> Array:
    """Blur colours and visibilities, then light the colours and add grain; returns the new canvas."""
    size = canvas.shape[1]
    weight = np.float32(dice.between(0.0, 0.25))
    for _ in range(max(1, round(size / 96))):  # a larger image needs more passes to look as blurred
        padded = np.pad(canvas, ((0, 0), (1, 1), (0, 0)), "edge")
        canvas = canvas + weight * (padded[:, :-2] + padded[:, 2:] - 2 * canvas)
        padded = np.pad(canvas, ((0, 0), (0, 0), (1, 1)), "edge")
        canvas = canvas + weight * (padded[:, :, :-2] + padded[:, :, 2:] - 2 * canvas)
    steps = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    light = 1 + dice.between(-0.3, 0.3) * steps[:, None] + dice.between(-0.3, 0.3) * steps
    cast = np.array([dice.between(0.86, 1.14) for _ in range(3)], np.float32)[:, None, None]
    contrast, shift = dice.between(0.6, 1.1), dice.between(-0.08, 0.08)
    pieces = _hashes(seed_of(dice.random()), 3, size, size)
    grain = sum(((pieces >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.float32) for k in range(4)) / 65536 - 2
    colours = (canvas[:3] * light * cast - 0.5) * contrast + (0.5 + shift)
    canvas[:3] = colours + grain * dice.between(0.0, 0.09)
    return canvas
