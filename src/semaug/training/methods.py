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

`p2p`, `p2p+isda` and `p2p+learnable` make a P2P-Net of the network (:mod:`semaug.p2p`), the latter two with semantic
augmentation on its concatenated classifier.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, Optimizer

from semaug.isda.sources import ClassCovariance, Constant, CovNet, ModulatedClassCovariance, Source
from semaug.meta.learner import JointAugmentation, LearnableAugmentation
from semaug.network.network import Composite, Network

Method = Literal[
    "basic",
    "mixup",
    "cutmix",
    "random-erasing",
    "randaugment",
    "constant",
    "isda",
    "joint",
    "learnable",
    "p2p",
    "p2p+isda",
    "p2p+learnable",
]
METHODS: tuple[str, ...] = get_args(Method)
AUGMENTING = ("constant", "isda", "joint", "learnable")  # those that have a Σ, alone or on P2P-Net


@dataclass(frozen=True)
class Augmentation:
    """Settings of the semantic augmentation; they matter for the methods that have a Σ."""

    strength: float | None = None
    """λ0: the strength of augmentation at the end of training; 20 for isda if not given, and for the others the
    paper's: 10, or 5 on P2P-Net. On the embedded birds 3: a network that is trained from scratch wants less."""
    strength_power: float = 1.0
    """α: λ grows as (epoch / epochs)^α · λ0."""
    source: Literal["covnet", "modulated", "reshaped"] = "covnet"
    """What `learnable` and `joint` learn: CovNet; a factor on the class-wise variance; or one that keeps its trace."""
    constant: float = 0.5
    """The variance of the method `constant`."""
    width: int | None = None
    """Hidden width of CovNet; a quarter of the feature dimension if not given, half of it on P2P-Net."""
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
    meta_objective: Literal["loss", "alignment"] = "loss"
    """What CovNet is to improve: the meta loss after a step, as in the paper; or the direction of the step at its
    length, so that a Σ that only makes steps longer gains nothing."""
    engine: Literal["jvp", "double_backward"] = "jvp"
    """How the meta-gradient is computed; both give the same number."""
    frozen_blocks: int = 0
    """The stem and this many blocks keep out of the pseudo update (10 for ResNet-50 in the paper)."""
    interval: int | None = None
    """Run the meta loop every this many half steps; 1 if not given, 10 on P2P-Net, as in the paper."""
    meta_images: Literal["half", "randaugment", "held-out"] = "half"
    """What the meta loss looks at: the other half of the batch, as in the paper; that half under RandAugment; or
    training images that the network is not trained on. The last two need the paper's order."""
    meta_share: float = 0.1
    """Share of each class's training images that is held out for the meta loss (held-out)."""
    detach_real: bool = False
    """Stop gradients from Σ into the features in the real update."""
    pseudo: Literal["global", "local"] = "global"
    """Under torchrun, pseudo update and meta loss of the images of all processes; or of each process's own, as in the
    authors' code, which sends less."""

    def filled(self, method: str) -> "Augmentation":
        """The same settings with the defaults of a method made explicit."""
        strength, interval = (5.0, 10) if on_p2p(method) else (20.0 if method == "isda" else 10.0, 1)
        return replace(
            self,
            strength=strength if self.strength is None else self.strength,
            interval=interval if self.interval is None else self.interval,
        )


def on_p2p(method: str) -> bool:
    """Whether a method makes a P2P-Net of the network."""
    return method.partition("+")[0] == "p2p"


def dressed(method: str, model: nn.Module, num_classes: int) -> nn.Module:
    """What a method trains: the network itself, or a P2P-Net made of it."""
    if not on_p2p(method):
        return model
    from semaug.p2p import P2PNet

    return P2PNet(model, num_classes)


def parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """The trainable parameters with their learning rates; those of P2P-Net's new layers are ten times the others'."""
    groups = getattr(model, "parameter_groups", None)
    if groups is not None:
        return cast(list[dict[str, Any]], groups(lr))
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad], "lr": lr}]


def _composite() -> Composite:
    """P2P-Net in the meta loop: its concatenated classifier is the head to augment."""
    return Composite(
        run=lambda model, images: cast(Any, model).outputs(images),
        logits=lambda outputs: outputs.logits,
        rest=lambda model, outputs, labels: cast(Any, model).rest_of_loss(outputs, labels),
        run_head=lambda model, images: cast(Any, model).head_logits(images),
        after=lambda model, outputs: cast(Any, model).update_templates(outputs),
    )


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
    sync_batch_norm: bool = False,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
) -> LearnableAugmentation:
    """The learner that trains `model` by `method`."""
    settings = settings.filled(method)
    p2p, method = on_p2p(method), cast(Method, method.removeprefix("p2p").removeprefix("+") or "basic")
    if method == "learnable" and settings.meta_images != "half" and settings.order != "paper":
        raise ValueError(f"--meta-images {settings.meta_images} needs --order paper")
    frozen = settings.frozen_blocks if method == "learnable" else 0
    network = Network(
        model,
        frozen,
        head="head" if p2p else None,
        compile="inductor" if compile else None,
        composite=_composite() if p2p else None,
        sync_batch_norm=sync_batch_norm,
    )
    if p2p and settings.width is None:
        settings = replace(settings, width=max(1, network.feature_dim // 2))
    source = _source(method, settings, network).to(network.head.weight.device)
    learned = list(source.parameters())
    meta_optimizer: Optimizer | None = None
    if learned:
        kind = SGD if settings.meta_optimizer == "sgd" else Adam
        meta_optimizer = kind(learned, lr=settings.meta_lr)
    assert settings.strength is not None and settings.interval is not None  # noqa: PT018
    learner = JointAugmentation if method == "joint" else LearnableAugmentation
    return learner(
        network,
        optimizer,
        source,
        meta_optimizer,
        strength=settings.strength if method in AUGMENTING else 0.0,
        strength_power=settings.strength_power,
        interval=settings.interval,
        order=settings.order,
        engine=settings.engine,
        objective=settings.meta_objective,
        detach_real=settings.detach_real,
        label_smoothing=label_smoothing,
        clip_norm=clip_norm,
        micro_batch=micro_batch,
        autocast=autocast,
        scaler=scaler,
        pseudo=settings.pseudo,
        sync_batch_norm=sync_batch_norm,
    )


def _source(method: Method, settings: Augmentation, network: Network) -> Source:
    classes, dimensions = network.num_classes, network.feature_dim
    if method == "isda":
        return ClassCovariance(classes, dimensions)
    if method in ("joint", "learnable"):
        if settings.source != "covnet":
            if settings.rank or settings.fixed_trace is not None:
                raise ValueError(f"--rank and --fixed-trace are CovNet's, and not for --source {settings.source}")
            keep_trace = settings.source == "reshaped"
            return ModulatedClassCovariance(classes, dimensions, settings.width, settings.depth, keep_trace)
        return CovNet(dimensions, settings.width, settings.depth, settings.rank, settings.fixed_trace)
    return Constant(settings.constant if method == "constant" else 0.0)


Images = Callable[[Tensor, Tensor, int], Tensor]  # of some rows of a batch of so many images
Batch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Transforms = tuple[Images | None, Images | None, Batch | None]


def image_transforms(method: Method, num_classes: int) -> Transforms:
    """What a method does to uint8 crops, to normalised crops, and to a whole batch with its labels."""
    from torchvision.transforms import v2

    from semaug.data.augmentation import rand_augment, random_erasing

    if method == "randaugment":
        return rand_augment, None, None
    if method == "random-erasing":
        return None, random_erasing, None
    if method == "mixup":
        return None, None, v2.MixUp(num_classes=num_classes)
    if method == "cutmix":
        return None, None, v2.CutMix(num_classes=num_classes)
    return None, None, None
