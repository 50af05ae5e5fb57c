"""Image-level methods that mix images with the help of the network: SnapMix and Manifold Mixup.

Mixup and CutMix change a batch before the network sees it (:mod:`semaug.data.augmentation`). SnapMix weighs the labels
by class-activation maps of the network, and Manifold Mixup mixes its activations, so each is a learner. An image is
mixed with the one before it in the same forward pass: of its rank's half batch, or of its micro-batch. A half step's
random numbers follow from the seed and the number of the half step, so ranks agree on them and a run resumes exactly.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from semaug.isda.covariance import Covariance
from semaug.isda.precision import widened
from semaug.isda.sources import ClassCovariance, Constant, Source
from semaug.meta.algorithm import Algorithm1
from semaug.meta.diagnostics import Metrics
from semaug.meta.learner import LearnableAugmentation
from semaug.meta.updates import HalfBatch
from semaug.network.activation_maps import (
    activation_maps,
    are_equal,
    feature_maps,
    features_with,
    find_map_layer,
    noise_like,
    output_shapes,
)
from semaug.network.blocks import Block, below
from semaug.network.hooks import hooked
from semaug.network.network import Network
from semaug.util.errors import ModelError

SNAPMIX_BETA = 5.0  # both parameters of the Beta distribution of a box's area, in the paper
MANIFOLD_BETA = 2.0  # both parameters of the Beta distribution of λ, in the paper
MANIFOLD_STAGES = 2  # the paper mixes the input, or the output of the first or the second stage

Box = tuple[slice, slice]
"""Rows and columns of a rectangle of an image."""


class Mixing(Algorithm1):
    """Half steps on mixed images. A subclass changes the half batch, then calls this class's `half_step`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seed = torch.initial_seed()  # before ranks get seeds of their own

    def random(self) -> np.random.Generator:
        """The random numbers of the present half step, the same on all ranks."""
        return np.random.default_rng((self.seed, self.half_steps))


def _previous(values: Tensor) -> Tensor:
    """The row before each row; before the first comes the last."""
    return torch.cat([values[-1:], values[:-1]])


# -- SnapMix ----------------------------------------------------------------------------------------------------------


class SnapMixing(Mixing):
    """Half steps of :class:`SnapMix`."""

    map_layer: str | None = None  # name of the module whose output is the last feature map

    def half_step(self, batch: HalfBatch, meta_batch: HalfBatch) -> Metrics:
        """Paste a box of another image into each image, and take a half step."""
        network, random = self.executor.network, self.random()
        if self.map_layer is None:
            self.map_layer = find_map_layer(network, batch[0].images)
        target, source = (draw_box(random, *batch[0].images.shape[-2:]) for _ in range(2))
        for part in batch:
            with self.executor.mixed.cast():
                features = feature_maps(network, self.map_layer, part.images)
            maps = activation_maps(features, network.head_parameters({})[0][part.labels], part.images.shape[-2:])
            labels = F.one_hot(part.labels, network.num_classes).to(maps.dtype)
            part.images, targets = snapmix(part.images, labels, maps, target, source)
            part.image_weights = targets.sum(1)
            part.labels = targets / part.image_weights.clamp_min(torch.finfo(targets.dtype).tiny)[:, None]
        return super().half_step(batch, meta_batch)


def draw_box(random: np.random.Generator, height: int, width: int) -> Box:
    """Draw a rectangle around a uniformly drawn pixel, clipped to the image.

    Before clipping, its area as a share of the image follows Beta(5, 5). It has at least one pixel.
    """
    share = math.sqrt(random.beta(SNAPMIX_BETA, SNAPMIX_BETA))
    sides = []
    for side in (height, width):
        centre, half = int(random.integers(side)), int(share * side) // 2
        first = max(0, centre - half)
        sides.append(slice(first, max(first + 1, min(side, centre + half))))
    return sides[0], sides[1]


@torch.no_grad()
def snapmix(images: Tensor, labels: Tensor, maps: Tensor, target: Box, source: Box) -> tuple[Tensor, Tensor]:
    """Paste a box of the image before it, resized, into each image; weight both labels by their visible parts.

    ``ρ_a`` is the part of the own map outside the target box, ``ρ_b`` the part of the other map inside the source box.
    They need not add up to 1.

    Args:
        images: Batch (N, 3, H, W).
        labels: One-hot labels (N, C).
        maps: Activation maps (N, H, W), each with a sum of 1.
        target: Box to paste into.
        source: Box to take from the other image.

    Returns:
        The mixed images, and the labels ``ρ_a y_a + ρ_b y_b`` (N, C).
    """
    patch = _previous(images)[:, :, source[0], source[1]]
    size = tuple(side.stop - side.start for side in target)
    mixed = images.clone()
    mixed[:, :, target[0], target[1]] = F.interpolate(patch, size, mode="bilinear", align_corners=True)
    own = 1 - maps[:, target[0], target[1]].sum((1, 2))
    other = _previous(maps)[:, source[0], source[1]].sum((1, 2))
    return mixed, own[:, None] * labels + other[:, None] * _previous(labels)


# -- Manifold Mixup ---------------------------------------------------------------------------------------------------


class ManifoldMixing(Mixing):
    """Half steps of :class:`ManifoldMixup`."""

    layers: list[str | None] | None = None  # names of the modules whose outputs may be mixed; None is the input

    def half_step(self, batch: HalfBatch, meta_batch: HalfBatch) -> Metrics:
        """Mix the images, or the output of a module, and take a half step."""
        network, random = self.executor.network, self.random()
        if self.layers is None:
            self.layers = [None, *find_stages(network, batch[0].images, MANIFOLD_STAGES)]
        own = float(random.beta(MANIFOLD_BETA, MANIFOLD_BETA))
        layer = self.layers[random.integers(len(self.layers))]
        for part in batch:
            labels = F.one_hot(part.labels, network.num_classes).to(widened(part.images[:0]).dtype)
            part.labels = blend(labels, own)
            if layer is None:
                part.images = blend(part.images, own)
        if layer is None:
            return super().half_step(batch, meta_batch)
        with hooked(network.model.get_submodule(layer), lambda output: blend(output, own)):
            return super().half_step(batch, meta_batch)


def blend(values: Tensor, own: float) -> Tensor:
    """Each row (of images, activations or labels) times `own`, plus the row before it times ``1 − own``."""
    return own * values + (1 - own) * _previous(values)


def find_stages(network: Network, images: Tensor, count: int) -> list[str]:
    """Names of the modules that end the first stages: after them the resolution changes, or the features follow.

    A module is taken only if the features depend on the images through its output alone, so that mixing this output
    mixes all that the network knows of the images.

    Raises:
        ModelError: There is no such module.
    """
    blocks = [_module_of(network.model, block) for block in network.blocks if block.name != "stem"]
    known = {name: network.model.get_submodule(name) for name in blocks if name}
    noise = noise_like(images)
    stages: dict[tuple[int, ...], list[str]] = {}  # the blocks of each resolution
    for name, shape in output_shapes(network, known, noise):
        stages.setdefault(shape[2:] if len(shape) == 4 else shape[1:-1], []).append(name)
    ends = []
    for names in stages.values():
        ends += [name for name in reversed(names) if _is_bottleneck(network, known[name], noise)][:1]
        if len(ends) == count:
            break
    if not ends:
        raise ModelError(
            f"Manifold Mixup finds no stage of {type(network.model).__name__} on whose output alone the features "
            "depend; choose another network",
            on_all_ranks=True,
        )
    return ends


def _module_of(model: nn.Module, block: Block) -> str:
    """The outermost module that has a block's parameters and no others; "" if there is none."""
    owned = set(block.parameters)
    for name, module in model.named_modules():  # outer modules come first
        parameters = {f"{name}.{key}" for key, _ in module.named_parameters()}
        if name and parameters and parameters <= owned and all(below(parameter, name) for parameter in owned):
            return str(name)
    return ""


def _is_bottleneck(network: Network, module: nn.Module, noise: Tensor) -> bool:
    """Whether images have the same features once the module has the same output for them."""
    return are_equal(*features_with(network, noise, module, lambda output: output[:1].expand_as(output).clone()))


# -- learners ---------------------------------------------------------------------------------------------------------


class _MixingLearner(LearnableAugmentation):
    algorithm: Mixing
    _capturable = False  # boxes and layers are drawn on the host in every half step
    _compilable = True

    def __init__(
        self, model: nn.Module | Network, optimizer: Optimizer, source: Source | None = None, *args: Any, **options: Any
    ) -> None:
        if source is None:
            source, options = Constant(0.0), {**options, "strength": 0.0}
        super().__init__(model, optimizer, source, *args, **options)
        name = type(self).__name__
        if self.executor.learns_source:
            raise ValueError(f"{name} has no meta loop to learn the parameters of the source of Σ; choose another")
        if self.network.composite is not None:
            raise ValueError(f"{name} does not work with a composite model, whose other losses need class indices")
        if self.network.is_compiled and not self._compilable:
            raise ValueError(f"{name} changes what the network computes in every half step; leave out `compile`")
        if self.executor.micro_batch == 1:
            raise ValueError(f"{name} mixes the images of a micro-batch; `micro_batch` must be at least 2")

    def step(self, images: Tensor, labels: Tensor) -> Metrics:
        """Take two half steps; labels are class indices (N,). See :meth:`LearnableAugmentation.step`."""
        if isinstance(labels, Tensor) and labels.is_floating_point():
            raise ValueError(f"{type(self).__name__} needs class indices as labels, not probabilities")
        return super().step(images, labels)

    def state_dict(self) -> dict[str, Any]:
        """The state for an exact resume; see :meth:`LearnableAugmentation.state_dict`."""
        return {**super().state_dict(), "seed": self.algorithm.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; see :meth:`LearnableAugmentation.load_state_dict`."""
        super().load_state_dict(state)
        self.algorithm.seed = state["seed"]


class SnapMix(_MixingLearner):
    """Trains a classifier with SnapMix (Huang, Wang and Tao, AAAI 2021), with the settings of its paper.

    A box of another image is resized and pasted into each image; position and size of the two boxes are independent,
    their areas follow Beta(5, 5). Class-activation maps of the present network say which part ``ρ_a`` of the image's
    class is left and which part ``ρ_b`` of the other class came in: the loss is ``ρ_a CE(y_a) + ρ_b CE(y_b)``, also
    where both classes are the same (the authors' code counts such pairs twice). The maps take one more forward pass
    without a graph, which updates no statistics.

    Args:
        model: A classifier with a linear head that follows the pooled feature map.
        optimizer: A torch optimiser of the model's parameters.
        source: Where Σ comes from, if ISDA is added. Default: no Σ. Further options are those of
            :class:`LearnableAugmentation`, except those of the meta loop; `micro_batch` is at least 2.

    Raises:
        ValueError: See :class:`LearnableAugmentation`; or the source has parameters.

    >>> import torch, semaug
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    >>> learner = semaug.SnapMix(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> "train_loss" in learner.step(torch.randn(6, 3, 9, 9), torch.tensor([0, 1, 2, 0, 1, 2]))
    True
    """

    _algorithm = SnapMixing


class ManifoldMixup(_MixingLearner):
    """Trains a classifier with Manifold Mixup (Verma et al., ICML 2019), with the settings of its paper.

    In each half step the input, or the output of the first or the second stage, each with the same probability, is
    mixed with that of another image, and so are the labels: ``λ h_a + (1 − λ) h_b`` with one λ ~ Beta(2, 2). A stage is
    the blocks of one resolution.

    Args:
        model: A classifier with a linear head; it is not compiled.
        optimizer: A torch optimiser of the model's parameters.
        source: Where Σ comes from, if ISDA is added. Default: no Σ. Further options are those of
            :class:`LearnableAugmentation`, except those of the meta loop; `micro_batch` is at least 2.

    Raises:
        ValueError: See :class:`LearnableAugmentation`; or the source has parameters, or the network is compiled.

    >>> import torch, semaug
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> learner = semaug.ManifoldMixup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> "train_loss" in learner.step(torch.randn(6, 3, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    True
    """

    _algorithm = ManifoldMixing
    _compilable = False


class DominantClassCovariance(ClassCovariance):
    """Class-wise covariance that also takes soft labels: an image counts as one of its most probable class.

    With mixed images the statistics are those of mixed features, which vary more than the class itself.
    """

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch to the statistics; labels are class indices (N,) or probabilities (N, C)."""
        super().update(features, _dominant(labels))

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        """Return the covariance of each sample's class; labels are class indices (N,) or probabilities (N, C)."""
        return super().forward(features, _dominant(labels))


def _dominant(labels: Tensor) -> Tensor:
    return labels.argmax(1) if labels.is_floating_point() else labels
