"""What a run has to say about an image: classes, the nearest training images, and both along directions of its Σ."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from semaug.data.images import ProgressCallback
from semaug.inference.runs import read_description
from semaug.isda.covariance import Covariance, Diagonal, Full
from semaug.report.figures.figure import words
from semaug.report.figures.looking import Seen, choose, look, run_samples
from semaug.report.figures.views import View, load_augmenting
from semaug.training.methods import METHODS
from semaug.util.errors import SemaugError

REACH, STEP = 3.0, 0.1  # of the slider, in standard deviations or draws, to both sides
DRAWS, PRINCIPAL = 5, 3
NEIGHBOURS, TOP = 6, 5


@dataclass(frozen=True, eq=False)
class Direction:
    """A way to move a feature: ``a + t·offset``."""

    name: str
    note: str
    offset: Tensor  # (D,)


class Guide:
    """A run with its Σ, and training images to compare with; answers do not depend on what was asked before."""

    def __init__(self, view: View, seen: Seen, seed: int = 0) -> None:
        self.view, self.seen, self.seed = view, seen, seed
        self.gallery = seen.features[view.label]
        steps = round(REACH / STEP)
        self.positions = [round(STEP * i, 6) for i in range(-steps, steps + 1)]

    @torch.no_grad()
    def answer(self, image: Image.Image) -> dict[str, Any]:
        """In plain types: the most probable classes, and for each direction and position the nearest images.

        Indices of images are those of :meth:`thumbnail`, and all that occur are described under "images".
        """
        pixels = torch.tensor(self.view.classifier.preprocessing.pixels(image))[None]
        probabilities = self.view.classifier.probabilities(pixels)[0]
        if not probabilities.isfinite().all():
            raise SemaugError("the network's outputs are not finite numbers: its training has diverged")
        feature = self.view.features(pixels)
        label = int(probabilities.argmax())
        distance, nearest = _nearest(feature, self.gallery)
        unit = float(distance[0, 0]) or float(distance.max()) or 1.0
        directions = [self._along(way, feature[0], unit) for way in self._directions(feature, label)]
        used = {i for part in directions for row in part["neighbours"] for i in row} | set(nearest[0].tolist())
        return {
            "class": self.name(label),
            "top": _ranked(probabilities[None], self.names)[0],
            "neighbours": nearest[0].tolist(),
            "positions": self.positions,
            "directions": directions,
            "images": {str(i): self._described(i) for i in sorted(used)},
        }

    @property
    def names(self) -> list[str]:
        return [words(name) for name in self.view.classes]

    def name(self, label: int) -> str:
        return words(self.view.classes[label])

    def thumbnail(self, i: int) -> bytes:
        """Training image `i` as a small JPEG; an IndexError if there is none."""
        if not 0 <= i < len(self.seen.thumbnails):
            raise IndexError(i)
        buffer = io.BytesIO()
        Image.fromarray(self.seen.thumbnails[i]).save(buffer, "JPEG", quality=88)
        return buffer.getvalue()

    def _described(self, i: int) -> dict[str, str]:
        return {"class": self.name(int(self.seen.labels[i])), "file": self.seen.names[i]}

    def _directions(self, feature: Tensor, label: int) -> list[Direction]:
        """Draws ``a' − a`` from N(0, λΣ) that depend on the seed alone, and the principal directions of λΣ."""
        assert self.view.source is not None
        labels = torch.tensor([label])
        covariance = self.view.source(feature, labels)
        draws = self.view.draws(feature, labels, DRAWS, torch.Generator().manual_seed(self.seed))[:, 0] - feature
        found = [
            Direction(f"draw {k}", "1 is one random draw of the augmentation", draw)
            for k, draw in enumerate(draws, start=1)
        ]
        variances, axes, of = principal(covariance, PRINCIPAL)
        total = float(covariance.diagonal().sum())
        for k, (variance, axis) in enumerate(zip(variances, axes, strict=True), start=1):
            note = f"1 is one standard deviation along {of[k - 1]}, which has {variance / total:.1%} of all variance"
            found.append(Direction(f"principal direction {k}", note, (self.view.strength * variance) ** 0.5 * axis))
        return found

    def _along(self, way: Direction, feature: Tensor, unit: float) -> dict[str, Any]:
        """What the slider shows; `unit` is the distance of the nearest training image."""
        moved = feature + torch.tensor(self.positions)[:, None] * way.offset
        probabilities = self.view.logits(moved).softmax(1)
        return {
            "name": way.name,
            "note": way.note,
            "length": float(way.offset.norm()) / unit,
            "neighbours": _nearest(moved, self.gallery)[1].tolist(),
            "top": _ranked(probabilities, self.names),
        }


def principal(covariance: Covariance, count: int) -> tuple[list[float], Tensor, list[str]]:
    """The largest variances of a single Σ, their directions (K, D) of length 1, and what these are.

    None where all directions are alike, as with a constant Σ.
    """
    dimensions = covariance.diagonal().shape[1]
    if isinstance(covariance, Diagonal):
        variance = covariance.variance[0]
        if float(variance.max() - variance.min()) <= 1e-9 * float(variance.max()):
            return [], variance.new_zeros(0, dimensions), []
        largest = variance.sort(descending=True, stable=True)
        indices = largest.indices[:count].tolist()
        axes = torch.eye(dimensions)[indices]
        return largest.values[:count].tolist(), axes, [f"dimension {i} of the feature" for i in indices]
    assert isinstance(covariance, Full)
    matrix = covariance.matrices[0 if covariance.index is None else int(covariance.index[0])]
    values, vectors = torch.linalg.eigh(matrix)
    axes = vectors.T.flip(0)[:count]
    return values.flip(0)[:count].clamp_min(0).tolist(), axes, ["a mixture of dimensions"] * len(axes)


def _nearest(features: Tensor, gallery: Tensor) -> tuple[Tensor, Tensor]:
    """Distances and places of the nearest features of the gallery, (N, 6) each."""
    distances, places = torch.cdist(features, gallery).sort(dim=1, stable=True)
    return distances[:, :NEIGHBOURS], places[:, :NEIGHBOURS]


def _ranked(probabilities: Tensor, names: Sequence[str]) -> list[list[tuple[str, float]]]:
    """For each row the most probable classes with their probabilities."""
    values, places = probabilities.sort(dim=1, descending=True, stable=True)
    values, places = values[:, :TOP], places[:, :TOP]
    return [
        [(names[place], round(value, 4)) for value, place in zip(row, columns, strict=True)]
        for row, columns in zip(values.tolist(), places.tolist(), strict=True)
    ]


def open_guide(
    run: Path,
    *,
    covariance: Literal["run", "classwise"] | None = None,
    strength: float | None = None,
    limit: int = 2000,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Guide:
    """A run and at most `limit` of its training images, as many of each class as possible, chosen by `seed`.

    `covariance` is the run's own Σ, or the class-wise one of its final features; the first that there is if not given.
    """
    if limit < 1:
        raise SemaugError(f"there must be at least 1 training image to compare with, not {limit}")
    method = str(read_description(run)[3].get("method"))
    if METHODS[method].composite:
        raise SemaugError(f"{run} holds a P2P-Net, which has no single feature to move; the page is for other methods")
    if covariance is None:
        covariance = "run" if METHODS[method].augments and (run / "source.safetensors").is_file() else "classwise"
    view = load_augmenting("run", run, covariance=covariance, strength=strength, device=device)
    samples = run_samples(view.classifier, "train")
    seen = look(
        samples, choose(samples, limit, seed), view.classifier, {view.label: view.features}, side=128, progress=progress
    )
    return Guide(view, seen, seed)
