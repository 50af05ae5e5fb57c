"""The training methods, one word each: what happens to the images, and where Σ comes from.

| method           | images                      | Σ                                                         |
|------------------|-----------------------------|-----------------------------------------------------------|
| `basic`          | crop and flip               | none                                                      |
| `mixup`, `cutmix`| two images mixed            | none                                                      |
| `random-erasing` | a rectangle erased          | none                                                      |
| `randaugment`    | random colour and geometry  | none                                                      |
| `constant`       | crop and flip               | a constant, the control experiment                        |
| `isda`           | crop and flip               | class-wise statistics                                     |
| `joint`          | crop and flip               | CovNet trained by the same loss (the degenerate ablation) |
| `learnable`      | crop and flip               | learned by the meta loop                                  |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, Optimizer

from semaug.meta import JointAugmentation, LearnableAugmentation
from semaug.network import Network
from semaug.sources import ClassCovariance, Constant, CovNet, ModulatedClassCovariance, Source

Method = Literal["basic", "mixup", "cutmix", "random-erasing", "randaugment", "constant", "isda", "joint", "learnable"]
METHODS: tuple[str, ...] = get_args(Method)


@dataclass(frozen=True)
class Augmentation:
    """Settings of the semantic augmentation; they matter for the methods that have a Σ."""

    strength: float = 10.0
    """λ0: the strength of augmentation at the end of training."""
    strength_power: float = 1.0
    """α: λ grows as (epoch / epochs)^α · λ0."""
    source: Literal["covnet", "modulated"] = "covnet"
    """What `learnable` and `joint` learn: CovNet, or a factor on the class-wise variance."""
    constant: float = 0.5
    """The variance of the method `constant`."""
    width: int | None = None
    """Hidden width of CovNet; a quarter of the feature dimension if not given."""
    depth: int = 1
    """Hidden layers of CovNet."""
    rank: int = 0
    """Directions that CovNet learns besides its variances."""
    fixed_trace: float | None = None
    """Fix the mean variance to this value, so that only the shape of Σ is learned."""
    meta_lr: float = 0.001
    """Learning rate of CovNet."""
    meta_optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimiser of CovNet."""
    order: Literal["paper", "pipelined"] = "paper"
    """Order of the updates: the paper's, or the pipelined one, which costs less."""
    engine: Literal["jvp", "double_backward"] = "jvp"
    """How the meta-gradient is computed; both give the same number."""
    frozen_blocks: int = 0
    """The stem and this many blocks keep out of the pseudo update (10 for ResNet-50 in the paper)."""
    interval: int = 1
    """Run the meta loop every this many half steps."""
    detach_real: bool = False
    """Stop gradients from Σ into the features in the real update."""


def make_learner(
    method: Method,
    settings: Augmentation,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    label_smoothing: float = 0.0,
    clip_norm: float | None = None,
    micro_batch: int | None = None,
    compile: bool = False,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
) -> LearnableAugmentation:
    """The learner that trains `model` by `method`."""
    frozen = settings.frozen_blocks if method == "learnable" else 0
    network = Network(model, frozen, compile="inductor" if compile else None)
    source = _source(method, settings, network).to(network.head.weight.device)
    learned = list(source.parameters())
    meta_optimizer: Optimizer | None = None
    if learned:
        kind = SGD if settings.meta_optimizer == "sgd" else Adam
        meta_optimizer = kind(learned, lr=settings.meta_lr)
    augments = method in ("constant", "isda", "joint", "learnable")
    learner = JointAugmentation if method == "joint" else LearnableAugmentation
    return learner(
        network,
        optimizer,
        source,
        meta_optimizer,
        strength=settings.strength if augments else 0.0,
        strength_power=settings.strength_power,
        interval=settings.interval,
        order=settings.order,
        engine=settings.engine,
        detach_real=settings.detach_real,
        label_smoothing=label_smoothing,
        clip_norm=clip_norm,
        micro_batch=micro_batch,
        autocast=autocast,
        scaler=scaler,
    )


def _source(method: Method, settings: Augmentation, network: Network) -> Source:
    classes, dimensions = network.num_classes, network.feature_dim
    if method == "isda":
        return ClassCovariance(classes, dimensions)
    if method in ("joint", "learnable"):
        if settings.source == "modulated":
            return ModulatedClassCovariance(classes, dimensions, settings.width, settings.depth)
        return CovNet(dimensions, settings.width, settings.depth, settings.rank, settings.fixed_trace)
    return Constant(settings.constant if method == "constant" else 0.0)


Images = Callable[[Tensor], Tensor]
Batch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def image_transforms(method: Method, num_classes: int) -> tuple[Images | None, Images | None, Batch | None]:
    """What a method does to uint8 crops, to normalised crops, and to a whole batch with its labels."""
    from torchvision.transforms import v2

    if method == "randaugment":
        return _each(v2.RandAugment()), None, None
    if method == "random-erasing":
        return None, _each(v2.RandomErasing(p=0.5)), None
    if method == "mixup":
        return None, None, v2.MixUp(num_classes=num_classes)
    if method == "cutmix":
        return None, None, v2.CutMix(num_classes=num_classes)
    return None, None, None


def _each(transform: Images) -> Images:
    """Apply a random transform to every image by itself: torchvision draws once for a whole batch."""
    return lambda images: torch.stack([transform(image) for image in images])
