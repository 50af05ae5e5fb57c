"""Answers about an image: its classes, the nearest training images, and both along directions of the run's Σ."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from semaug.inference.pictures import class_overlays, data_uri
from semaug.inference.runs import read_description, read_metrics
from semaug.isda.covariance import Covariance, Diagonal, Full
from semaug.report.figures.runs import FigureRun, ImageFeatures, choose_images, compute_features, open_runs, run_images
from semaug.training.methods import METHODS
from semaug.util.errors import ModelError, RunError, SettingError
from semaug.util.names import percent, shown
from semaug.util.progress import ProgressCallback

REACH, STEP = 3.0, 0.1  # range of the slider to both sides, in standard deviations or draws, and its step
DRAWS, PRINCIPAL = 5, 3
NEIGHBOURS, TOP = 6, 5


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction in which the slider moves a feature: ``a + t·offset``."""

    name: str
    note: str
    offset: Tensor  # (D,)


class Guide:
    """A run with its Σ, and training images to compare with; its answers do not depend on earlier questions."""

    def __init__(self, view: FigureRun, seen: ImageFeatures, seed: int = 0) -> None:
        self.view, self.seen, self.seed = view, seen, seed
        self.gallery = seen.features[view.label]
        self.names = view.classes
        steps = round(REACH / STEP)
        self.positions = [round(STEP * i, 6) for i in range(-steps, steps + 1)]

    @torch.no_grad()
    def answer(self, pixels: npt.NDArray[np.uint8]) -> dict[str, Any]:
        """Classify an image, and move its feature along each direction.

        Args:
            pixels: The image, resized as by the classifier's preprocessing.

        Returns:
            In plain types: the most probable classes, the map of the first as a data URI (None for a network
            without a feature map), and the nearest training images, classes and images also for each direction and
            position of the slider. Training images are indices for :meth:`thumbnail`, described under "images".

        Raises:
            ModelError: If the network's outputs are not finite.
        """
        batch = torch.tensor(pixels)[None]
        probabilities = self.view.classifier.probabilities(batch)
        if not probabilities.isfinite().all():
            raise ModelError("the network's outputs are not finite numbers: its training has diverged")
        feature = self.view.features(batch)
        label = int(probabilities.argmax())
        distances, [neighbours] = _nearest(feature, self.gallery)
        unit = float(distances[0, 0]) or float(distances.max()) or 1.0
        directions = [self._along(direction, feature[0], unit) for direction in self._directions(feature, label)]
        used = {i for part in directions for row in part["neighbours"] for i in row} | set(neighbours)
        return {
            "class": self.names[label],
            "top": self._ranked(probabilities)[0],
            "map": self._map(batch, label),
            "neighbours": neighbours,
            "positions": self.positions,
            "directions": directions,
            "images": {
                str(i): {"class": self.names[int(self.seen.labels[i])], "file": self.seen.names[i]}
                for i in sorted(used)
            },
        }

    def _map(self, pixels: Tensor, label: int) -> str | None:
        try:
            [[drawn]] = class_overlays(self.view.classifier, pixels, torch.tensor([[label]]))
        except ModelError:
            return None
        return data_uri(Image.fromarray(drawn))

    def thumbnail(self, i: int) -> bytes:
        """Encode training image `i` as a small JPEG; an IndexError if there is none."""
        if not 0 <= i < len(self.seen.thumbnails):
            raise IndexError(i)
        buffer = io.BytesIO()
        Image.fromarray(self.seen.thumbnails[i]).save(buffer, "JPEG", quality=88)
        return buffer.getvalue()

    def _directions(self, feature: Tensor, label: int) -> list[Direction]:
        """Random draws ``a' − a`` from N(0, λΣ), which depend on the seed alone, and principal directions of λΣ."""
        assert self.view.source is not None
        labels = torch.tensor([label])
        covariance = self.view.source(feature, labels)
        draws = self.view.draws(feature, labels, DRAWS, torch.Generator().manual_seed(self.seed))[:, 0] - feature
        note = "Distance 1 is one random draw of the augmentation"
        random = [Direction(f"draw {k}", note, draw) for k, draw in enumerate(draws, start=1)]
        return random + principal_directions(covariance, self.view.strength, PRINCIPAL)

    def _along(self, direction: Direction, feature: Tensor, unit: float) -> dict[str, Any]:
        """Data of the slider along one direction; `unit` is the distance of the nearest training image."""
        moved = feature + torch.tensor(self.positions)[:, None] * direction.offset
        return {
            "name": direction.name,
            "note": direction.note,
            "length": float(direction.offset.norm()) / unit,
            "neighbours": _nearest(moved, self.gallery)[1],
            "top": self._ranked((self.view.logits(moved) / self.view.classifier.temperature).softmax(1)),
        }

    def _ranked(self, probabilities: Tensor) -> list[list[tuple[str, float]]]:
        """The most probable classes of each row, with their probabilities."""
        ordered = probabilities.sort(dim=1, descending=True, stable=True)
        return [
            [(self.names[i], round(value, 4)) for i, value in zip(indices, values, strict=True)]
            for indices, values in zip(ordered.indices[:, :TOP].tolist(), ordered.values[:, :TOP].tolist(), strict=True)
        ]


def principal_directions(covariance: Covariance, strength: float, count: int) -> list[Direction]:
    """Compute the directions of largest variance of λΣ, where Σ is that of a single sample.

    Each is as long as one standard deviation. There are none if all directions are equal, as for a constant Σ.
    """
    names: Sequence[str] = ["a mixture of dimensions"] * count
    if isinstance(covariance, Diagonal):
        variances, order = covariance.variance[0].sort(descending=True, stable=True)
        if float(variances[0] - variances[-1]) <= 1e-9 * float(variances[0]):
            return []
        axes = torch.eye(len(order))[order[:count]]
        names = [f"dimension {i} of the feature" for i in order[:count].tolist()]
    else:
        assert isinstance(covariance, Full)
        matrix = covariance.matrices[0 if covariance.index is None else int(covariance.index[0])]
        values, vectors = torch.linalg.eigh(matrix)
        variances, axes = values.flip(0).clamp_min(0), vectors.T.flip(0)
    total, directions = float(covariance.diagonal().sum()), []
    for k, (variance, axis, name) in enumerate(zip(variances.tolist(), axes, names, strict=False), start=1):
        note = f"Distance 1 is one standard deviation along {name}, with {percent(variance / total)} of the variance"
        directions.append(Direction(f"principal direction {k}", note, (strength * variance) ** 0.5 * axis))
    return directions


def _nearest(features: Tensor, gallery: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Distances (N, 6) and indices of the nearest features of the gallery."""
    distances, indices = torch.cdist(features, gallery).sort(dim=1, stable=True)
    return distances[:, :NEIGHBOURS], indices[:, :NEIGHBOURS].tolist()


def open_guide(
    run: Path,
    *,
    covariance: Literal["run", "classwise"] | None = None,
    strength: float | None = None,
    images: int = 2000,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> Guide:
    """Open a run, and compute the features of its training images.

    Args:
        run: The run directory.
        covariance: ``"run"``: the run's own Σ; ``"classwise"``: the class-wise one of its final features; None: the
            run's own if it has one.
        strength: λ; None: that of the end of training, or 1 if it was 0.
        images: Number of training images at most, ≥ 1; as evenly from the classes as possible.
        seed: Seed of the choice of images and of the random draws.
        device: Where the network runs.
        progress: Called with the number of images done and their total.

    Raises:
        SettingError: If a number is out of range.
        RunError: If the run is a P2P-Net or an ONNX file, or its training images are missing.
    """
    if images < 1:
        raise SettingError(f"`images` must be at least 1, not {images}")
    if run.suffix == ".onnx":
        raise RunError(f"{run} has logits and no features, which the page shows; set `images` to 0 for the API alone")
    name = str(read_description(run).config.get("method"))
    if name not in METHODS:
        raise RunError(f"{run} was trained by the unknown method {shown(name)}")
    method = METHODS[name]
    if method.composite:
        raise RunError(f"{run} holds a P2P-Net, which has no single feature to move; choose a run of another method")
    if covariance is None:
        covariance = "run" if method.augments and (run / "source.safetensors").is_file() else "classwise"
    notes: tuple[str, ...] = ()
    if strength is None and covariance == "run" and (metrics := read_metrics(run)) and not metrics[-1].get("strength"):
        strength, notes = 1.0, ("λ was 0 at the end of training",)  # of a short one: the page is of use all the same
    [view] = open_runs({"run": run}, covariance, strength, device)
    view = replace(view, notes=(*view.notes, *notes))
    samples, functions = run_images(view.classifier, "train"), {view.label: view.features}
    chosen = choose_images(samples, images, seed)
    seen = compute_features(samples, chosen, view.classifier, functions, side=128, progress=progress)
    return Guide(view, seen, seed)
