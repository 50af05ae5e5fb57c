"""Finished runs opened for figures: their images, the network that computes features, and its Σ."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from semaug.data.readable import readable_splits
from semaug.data.samples import Samples, Subset
from semaug.inference.classifier import Classifier, load_classifier
from semaug.inference.evaluation import match_classes
from semaug.inference.loop import decode_samples
from semaug.inference.manifest import verify
from semaug.inference.runs import changed_images, read_metrics, read_run_dataset, splits_of_run
from semaug.isda.covariance import Covariance
from semaug.isda.sources import ClassCovariance, Source
from semaug.network.models import read_weights
from semaug.network.network import Network
from semaug.report.reading import number
from semaug.training.methods import METHODS, Augmentation, make_learner
from semaug.util.errors import DataError, ModelError, RunError, SemaugError, SettingError, TrainingError
from semaug.util.progress import Progress, ProgressCallback

_BATCH = 32
CovarianceKind = Literal["run", "classwise"]
"""The Σ of a run's best epoch, or the class-wise covariance of the features of its training split."""


def run_images(classifier: Classifier, split: Literal["train", "evaluation"] = "evaluation") -> Samples:
    """Open the images that a run was trained or evaluated on, labelled by its classes.

    Evaluation is the test split, or the validation split if there is no test split. Images that training skipped are
    left out.

    Raises:
        RunError: If the run does not say which data it was trained on.
    """
    config = classifier.config
    data = read_run_dataset(classifier.folder, config)
    if (changed := changed_images(classifier.folder, data)) is not None:
        Progress().say(f"warning: {changed}")
    splits = splits_of_run(classifier.folder, config, data)
    name = "train" if split == "train" else "test" if "test" in splits else "val"
    if name not in splits:
        raise RunError(f"{classifier.folder} does not record which images it held out; use the run that was exported")
    samples = splits[name]
    if config.get("on_bad_image") == "skip":
        # without the cache that the settings name: a run of unknown origin must not choose what is read and written
        readable, message = readable_splits({name: samples}, data.classes, classifier.preprocessing, "skip")
        samples = readable[name]
        if message is not None:
            Progress().say(message)
    relabelled, order = Subset(samples, range(len(samples))), match_classes(classifier.classes, data.classes)
    for i, label in enumerate(samples.labels):
        relabelled.labels[i] = order[label]
    return relabelled


def choose_images(samples: Samples, limit: int, seed: int, classes: Sequence[int] | None = None) -> list[int]:
    """Choose images at random, as evenly from the classes as possible.

    Args:
        samples: The images.
        limit: Most images to choose.
        seed: Seed of the choice.
        classes: Classes to choose from; all by default.

    Returns:
        Indices of the chosen images, in order.
    """
    wanted = set(samples.labels if classes is None else classes)
    indices = [i for i, label in enumerate(samples.labels) if label in wanted]
    if len(indices) <= limit:
        return indices
    by_class: dict[int, list[int]] = {}
    for i in np.random.default_rng(seed).permutation(indices).tolist():
        by_class.setdefault(samples.labels[i], []).append(i)
    # the first image of each class, then the second of each, and so on
    turns = sorted((turn, i) for members in by_class.values() for turn, i in enumerate(members))
    return sorted(i for _, i in turns[:limit])


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """Images and their features."""

    labels: Tensor  # (N,)
    names: tuple[str, ...]
    features: dict[str, Tensor]  # (N, D) by name of the function
    thumbnails: npt.NDArray[np.uint8]  # (N, side, side, 3)
    digests: tuple[bytes, ...]  # of the pixels, equal for equal images


def compute_features(
    samples: Samples,
    indices: Sequence[int],
    classifier: Classifier,
    functions: Mapping[str, Callable[[Tensor], Tensor]],
    side: int = 96,
    progress: ProgressCallback | None = None,
) -> ImageFeatures:
    """Compute features of images under several functions; each image is loaded once.

    Args:
        samples: The images.
        indices: Which of them.
        classifier: Its preprocessing prepares the pixels.
        functions: By name, from pixels uint8 (N, resize, resize, 3) to features (N, D).
        side: Side of the thumbnails.
        progress: Called with the numbers of finished and of all images.

    Raises:
        DataError: If there is no image, or one cannot be read.
        TrainingError: If features are not finite.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in functions}
    thumbnails, digests = [], []
    for pixels in decode_samples(samples, indices, classifier.preprocessing, _BATCH):
        images = pixels.numpy()
        digests += [hashlib.sha256(p.tobytes()).digest() for p in images]
        thumbnails += [np.asarray(Image.fromarray(p).resize((side, side), Image.Resampling.BOX)) for p in images]
        for name, function in functions.items():
            parts[name].append(function(pixels))
        if progress is not None:
            progress(len(thumbnails), len(indices))
    if not thumbnails:
        raise DataError("there are no images to show")
    features = {name: torch.cat(own) for name, own in parts.items()}
    for name, values in features.items():
        if not values.isfinite().all():
            raise TrainingError(f"the features of {name} are not finite numbers: its training has diverged")
    labels = torch.tensor([samples.labels[i] for i in indices])
    names = tuple(samples.name(i) for i in indices)
    return ImageFeatures(labels, names, features, np.stack(thumbnails), tuple(digests))


@dataclass(frozen=True, eq=False)
class FigureRun:
    """A finished run: the network of its best epoch, and a Σ."""

    label: str
    path: Path
    classifier: Classifier
    network: Network
    source: Source | None = None  # of Σ
    strength: float = 0.0  # λ
    notes: tuple[str, ...] = ()  # sentences about Σ, for captions

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.classifier.classes

    @torch.no_grad()
    def input_features(self, inputs: Tensor) -> Tensor:
        """Compute features (N, D) of normalised inputs (N, 3, H, W)."""
        device = self.network.head.weight.device
        try:
            return self.network.forward(inputs.to(device))[0].float().cpu()
        except ValueError as error:  # the output of the model is not that of a linear head
            raise ModelError(str(error)) from error

    def features(self, pixels: Tensor) -> Tensor:
        """Compute features (N, D) of the centre crops of pixels, uint8 (N, resize, resize, 3)."""
        return self.input_features(self.classifier.preprocessing.evaluation_input(pixels))

    @torch.no_grad()
    def logits(self, features: Tensor) -> Tensor:
        """Compute logits (N, C) of features (N, D)."""
        weight, bias = self.network.head_parameters({})
        return F.linear(features, weight.float().cpu(), None if bias is None else bias.float().cpu())

    @torch.no_grad()
    def draws(self, features: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Draw augmented features ``a' ~ N(a, λΣ)``.

        Args:
            features: Features a (N, D).
            labels: Their classes (N,).
            count: Draws of each feature.
            generator: Source of random numbers.

        Returns:
            The draws (count, N, D).
        """
        assert self.source is not None
        covariance: Covariance = self.source(features, labels)
        return covariance.sample(features, count, self.strength, generator)


def open_runs(
    runs: Mapping[str, Path],
    covariance: CovarianceKind | None = None,
    strength: float | None = None,
    device: str = "cpu",
) -> list[FigureRun]:
    """Open finished runs.

    Args:
        runs: Run directories by label.
        covariance: The Σ to open; None for runs without Σ. Every run has a class-wise one.
        strength: λ; by default that of the end of training, or 1 for a class-wise Σ of a run without λ.
        device: Where to run the networks.

    Raises:
        SettingError: If `strength` is not positive.
        RunError: If there is no run, one has not finished or has no such Σ, or their classes differ.
        ModelError: If a model is not features and a linear head.
    """
    if strength is not None and not strength > 0:
        raise SettingError(f"`strength` must be positive, not {strength:g}")
    opened = [_open(label, path, covariance, strength, device) for label, path in runs.items()]
    if not opened:
        raise RunError("give at least one run directory")
    for run in opened[1:]:
        if run.classes != opened[0].classes:
            raise RunError(f"{run.path} and {opened[0].path} do not have the same classes and cannot be compared")
    return opened


def _open(label: str, path: Path, covariance: CovarianceKind | None, strength: float | None, device: str) -> FigureRun:
    with torch.random.fork_rng(devices=[]):  # a new network draws weights, which are then replaced
        classifier = load_classifier(path, device)
    try:
        run = FigureRun(label, path, classifier, Network(classifier.model.eval()))
    except ValueError as error:
        raise ModelError(str(error)) from error
    if covariance is None:
        return run
    if covariance == "run":
        run = replace(run, source=_trained_source(run))
    if strength is None:
        metrics = read_metrics(path)
        strength = (number(metrics[-1].get("strength")) if metrics else None) or (covariance == "classwise") * 1.0
        if not strength > 0:
            raise RunError(f"λ was 0 at the end of {path}: nothing was augmented; give a `strength`, or train longer")
    if covariance == "run":
        return replace(run, strength=strength)
    samples = run_images(classifier, "train")
    source = ClassCovariance(len(run.classes), run.network.feature_dim)
    computed = compute_features(samples, range(len(samples)), classifier, {label: run.features})
    source.update(computed.features[label], computed.labels)
    note = f"Σ is the class-wise covariance of the final features of the {len(samples)} training images"
    return replace(run, source=source, strength=strength, notes=(note,))


def _trained_source(run: FigureRun) -> Source:
    """The source of Σ, made by the learner that trained it."""
    config, file = run.classifier.config, run.path / "source.safetensors"
    method = METHODS.get(str(config.get("method")))
    if method is None or not method.augments:
        raise RunError(f"{run.path} was trained by {config.get('method')!r} and has no Σ to draw features from")
    if method.composite:
        raise RunError(f"{run.path} holds a P2P-Net; figures cannot draw features from its Σ yet")
    if not file.is_file():
        raise RunError(f"{run.path} has no source.safetensors with its Σ; `covariance` classwise needs none")
    model = run.classifier.model
    try:
        known = {field.name for field in fields(Augmentation)}
        settings = {name: value for name, value in config["augmentation"].items() if name in known}
        with torch.random.fork_rng(devices=[]):
            learner = make_learner(method.name, Augmentation(**settings), model, SGD(model.parameters(), lr=0.1))
        source = learner.source.to("cpu").eval()
        verify(run.path, file.name)
        source.load_state_dict(read_weights(file))
    except SemaugError:
        raise
    except Exception as error:  # config.json may come from anywhere
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{file} does not fit the settings of {run.path}: {reason}") from error
    return source


def features_of_runs(
    samples: Samples,
    indices: Sequence[int],
    runs: Sequence[FigureRun],
    side: int = 96,
    progress: ProgressCallback | None = None,
) -> ImageFeatures:
    """Compute features of the same images with the networks of several runs.

    Args:
        samples: The images.
        indices: Which of them.
        runs: The runs; images are loaded once for those with the same preprocessing.
        side: Side of the thumbnails.
        progress: Called with the numbers of finished and of all images.
    """
    groups: dict[Any, list[FigureRun]] = {}
    for run in runs:
        groups.setdefault(run.classifier.preprocessing, []).append(run)
    parts = [
        compute_features(samples, indices, own[0].classifier, {run.label: run.features for run in own}, side, progress)
        for own in groups.values()
    ]
    return replace(parts[0], features={label: values for part in parts for label, values in part.features.items()})
