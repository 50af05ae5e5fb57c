"""Finished runs as figures see them: the network that makes features, and Σ as it was then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from semaug.data.images import ProgressCallback
from semaug.data.samples import Samples
from semaug.inference.classifier import Classifier, load_classifier
from semaug.inference.runs import read_metrics
from semaug.isda.covariance import Covariance
from semaug.isda.sources import ClassCovariance, Source
from semaug.network.models import read_weights
from semaug.network.network import Network
from semaug.report.figures.looking import Seen, look, run_samples
from semaug.training.methods import METHODS, Augmentation, make_learner
from semaug.util.errors import SemaugError


@dataclass(frozen=True, eq=False)
class View:
    """A run's network, in evaluation mode, and where asked for its Σ."""

    label: str
    path: Path
    classifier: Classifier
    network: Network
    source: Source | None = None
    strength: float = 0.0  # λ at the end of training
    notes: tuple[str, ...] = ()  # what a caption must say about the Σ

    @property
    def classes(self) -> tuple[str, ...]:
        return self.classifier.classes

    @torch.no_grad()
    def inputs_features(self, inputs: Tensor) -> Tensor:
        """Features (N, D) of normalised inputs."""
        device = self.network.head.weight.device
        try:
            return self.network.forward(inputs.to(device))[0].float().cpu()
        except ValueError as error:  # a model whose output is not that of a linear head
            raise SemaugError(str(error)) from error

    def features(self, pixels: Tensor) -> Tensor:
        """Features (N, D) of the centre crops of uint8 pixels."""
        return self.inputs_features(self.classifier.preprocessing.evaluation_input(pixels))

    @torch.no_grad()
    def logits(self, features: Tensor) -> Tensor:
        """What the head says of features (N, D): (N, C)."""
        weight, bias = self.network.head_parameters({})
        return F.linear(features, weight.float().cpu(), None if bias is None else bias.float().cpu())

    @torch.no_grad()
    def draws(self, features: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """``count`` draws ``a' ~ N(a, λΣ)`` of each feature, (count, N, D)."""
        assert self.source is not None
        covariance: Covariance = self.source(features, labels)
        return covariance.sample(features, count, self.strength, generator)


def load_view(label: str, path: Path, device: str = "cpu") -> View:
    """The network of a finished run as it was kept: that of the best epoch."""
    with torch.random.fork_rng(devices=[]):  # a new network draws weights, which are then replaced
        classifier = load_classifier(path, device)
    return View(label, path, classifier, _network(classifier))


def load_views(runs: Mapping[str, Path], device: str = "cpu") -> list[View]:
    """The networks of several runs, which must know the same classes."""
    return same_classes([load_view(label, path, device) for label, path in runs.items()])


def same_classes(views: list[View]) -> list[View]:
    """The views, if their runs know the same classes."""
    if not views:
        raise SemaugError("name at least one run directory")
    for view in views[1:]:
        if view.classes != views[0].classes:
            raise SemaugError(f"{view.path} and {views[0].path} do not know the same classes and cannot be compared")
    return views


def load_augmenting(
    label: str,
    path: Path,
    *,
    covariance: Literal["run", "classwise"] = "run",
    strength: float | None = None,
    device: str = "cpu",
) -> View:
    """A finished run with its Σ, that of the epoch whose network was kept, and λ of the end of training.

    ``covariance="classwise"`` asks for the class-wise Σ of the final features of the training split instead, which any
    run can give (λ is 1 for a run that has none).
    """
    view = load_view(label, path, device)
    config, method = view.classifier.config, view.classifier.config.get("method")
    if strength is not None and not strength > 0:
        raise SemaugError(f"the strength must be positive, not {strength:g}")
    if covariance == "run" and METHODS[str(method)].composite and METHODS[str(method)].augments:
        raise SemaugError(f"{path} holds a P2P-Net, and figures cannot draw features from its Σ yet")
    if covariance == "run" and not METHODS[str(method)].augments:
        raise SemaugError(f"{path} was trained by {method!r} and has no Σ to draw features from")
    rows = read_metrics(path)
    lambda_ = strength if strength is not None else float(rows[-1].get("strength", 0.0)) if rows else 0.0
    if covariance == "classwise" and strength is None and not lambda_ > 0:
        lambda_ = 1.0  # a feature of the class's own spread
    if not lambda_ > 0:
        raise SemaugError(f"λ was 0 in all of {path}, which has too few epochs; give a strength, or train for longer")
    if covariance == "classwise":
        return _with_statistics(view, lambda_)
    file = path / "source.safetensors"
    if not file.is_file():
        raise SemaugError(f"{path} has no source.safetensors, the file of its Σ; --covariance classwise needs none")
    settings = {k: v for k, v in config["augmentation"].items() if k in {f.name for f in fields(Augmentation)}}
    model = view.classifier.model
    # the learner's way of making the source, so that it is the one that was trained
    with torch.random.fork_rng(devices=[]):
        learner = make_learner(str(method), Augmentation(**settings), model, SGD(model.parameters(), lr=0.1))
    source = learner.source.to("cpu").eval()
    source.load_state_dict(read_weights(file))
    return View(label, path, view.classifier, view.network, source, lambda_)


def _network(classifier: Classifier) -> Network:
    try:
        return Network(classifier.model.eval())
    except ValueError as error:  # a model that is not features and a linear head
        raise SemaugError(str(error)) from error


def _with_statistics(view: View, strength: float) -> View:
    """The run with ISDA's estimate, made from the features of its training split under the network that was kept."""
    samples = run_samples(view.classifier, "train")
    source = ClassCovariance(len(view.classes), view.network.feature_dim)
    seen = look(samples, range(len(samples)), view.classifier, {"own": view.features})
    source.update(seen.features["own"], seen.labels)
    note = f"Σ is the class-wise covariance of the final features of the {len(samples)} training images"
    return View(view.label, view.path, view.classifier, view.network, source, strength, (note,))


def look_with(
    samples: Samples,
    indices: Sequence[int],
    views: Sequence[View],
    side: int = 96,
    progress: ProgressCallback | None = None,
) -> Seen:
    """What several runs see in the same images, by label; each image is loaded once per kind of preprocessing."""
    kinds: dict[Any, list[View]] = {}
    for view in views:
        kinds.setdefault(view.classifier.preprocessing, []).append(view)
    seen = [
        look(samples, indices, group[0].classifier, {view.label: view.features for view in group}, side, progress)
        for group in kinds.values()
    ]
    features = {label: values for part in seen for label, values in part.features.items()}
    first = seen[0]
    return Seen(first.indices, first.labels, first.names, features, first.thumbnails, first.same)
