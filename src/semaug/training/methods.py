"""The table of training methods.

Each row says what happens to the images, where Σ comes from, which learner takes the steps and which settings matter.
The trainer, `compare`, `reproduce`, the reports and the command line take everything from here: adding a method means
adding a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, Optimizer

from semaug.data.augmentation import IMAGE_TRANSFORMS, PLAIN, ImageTransforms
from semaug.isda.sources import ClassCovariance, Constant, CovNet, Source
from semaug.meta.learner import JointAugmentation, LearnableAugmentation
from semaug.network.network import Composite, Network


@dataclass(frozen=True)
class Augmentation:
    """Settings of the semantic augmentation, used by the methods that have a Σ."""

    strength: float | None = None
    """λ0, the strength of augmentation at the end of training. Default: 20 for isda; for the other methods the paper's
    10, or 5 on P2P-Net; 3 on the embedded birds, where the network is trained from scratch."""
    strength_power: float = 1.0
    """α: λ grows as (epoch / epochs)^α · λ0."""
    constant: float = 0.5
    """Variance of the method `constant`."""
    width: int | None = None
    """Hidden width of CovNet. Default: a quarter of the feature dimension; half of it on P2P-Net."""
    depth: int = 1
    """Number of hidden layers of CovNet."""
    fixed_trace: float | None = None
    """Fix the mean variance of CovNet's Σ to this value, so that only the shape of Σ is learned."""
    meta_lr: float = 0.001
    """Learning rate of CovNet."""
    meta_optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimiser of CovNet."""
    order: Literal["paper", "pipelined"] = "paper"
    """Order of the updates: the paper's, or the pipelined one, which costs less."""
    engine: Literal["jvp", "double_backward"] = "jvp"
    """How the meta-gradient is computed. Both engines give the same result; jvp is faster."""
    frozen_blocks: int = 0
    """Freeze the stem and the first N blocks in the pseudo update (the paper: 10 for ResNet-50)."""
    interval: int | None = None
    """Run the meta loop every N half steps. Default: 1; 10 on P2P-Net, as in the paper."""
    detach_real: bool = False
    """Stop gradients from Σ into the features in the real update."""
    pseudo: Literal["global", "local"] = "global"
    """Under torchrun: compute pseudo update and meta loss from the images of all processes (global), or from each
    process's own images as in the authors' code (local), which communicates less."""


SourceFactory = Callable[[Augmentation, int, int], Source]
"""Makes the source of Σ from the settings, the number of classes and the feature dimension."""


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Args:
        name: What the user types.
        title: What tables and charts show.
        summary: One line for the documentation.
        images: Makes the image-level transforms for a number of classes.
        source: Makes the source of Σ; None for methods without semantic augmentation.
        learner: The class that takes the training steps.
        composite: Name of the composite model built around the network (``"p2p"``), or None.
        base: Name of the method without the composite model; the method itself if there is none.
        options: Fields of :class:`Augmentation` that the method uses.
        defaults: Defaults of training settings that differ from the common ones.
        width_divisor: Default hidden width of CovNet is the feature dimension divided by this.
    """

    name: str
    title: str
    summary: str
    images: Callable[[int], ImageTransforms] = lambda num_classes: PLAIN
    source: SourceFactory | None = None
    learner: type[LearnableAugmentation] = LearnableAugmentation
    composite: Literal["p2p"] | None = None
    base: str = ""
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    width_divisor: int = 4

    @property
    def augments(self) -> bool:
        """Whether the method has a Σ."""
        return self.source is not None

    @property
    def meta_loop(self) -> bool:
        """Whether the method learns Σ by the meta loop."""
        return "frozen_blocks" in self.options

    def resolve(self, settings: Augmentation) -> Augmentation:
        """Fill in this method's defaults.

        Args:
            settings: Settings in which `strength` and `interval` may be None.

        Returns:
            The same settings with both set.
        """
        strength, interval = self.defaults.get("strength", 10.0), self.defaults.get("interval", 1)
        return replace(
            settings,
            strength=strength if settings.strength is None else settings.strength,
            interval=interval if settings.interval is None else settings.interval,
        )

    def relevant(self, settings: Augmentation) -> Augmentation:
        """Reset the settings that this method does not use.

        Args:
            settings: Any settings.

        Returns:
            The settings with unused fields at their defaults, so that they do not identify a run.
        """
        return replace(Augmentation(), **{name: getattr(settings, name) for name in self.options})


def _constant(settings: Augmentation, num_classes: int, feature_dim: int) -> Source:
    return Constant(settings.constant)


def _classwise(settings: Augmentation, num_classes: int, feature_dim: int) -> Source:
    return ClassCovariance(num_classes, feature_dim)


def _covnet(settings: Augmentation, num_classes: int, feature_dim: int) -> Source:
    return CovNet(feature_dim, settings.width, settings.depth, settings.fixed_trace)


_STRENGTH = ("strength", "strength_power")
_COVNET = (*_STRENGTH, "width", "depth", "fixed_trace", "meta_lr", "meta_optimizer", "detach_real")
_META = tuple(setting.name for setting in fields(Augmentation) if setting.name != "constant")

_BASE_METHODS = (
    Method("basic", "basic", "crop and flip, cross-entropy"),
    Method("mixup", "Mixup", "two images blended", IMAGE_TRANSFORMS["mixup"]),
    Method("cutmix", "CutMix", "a rectangle of another image pasted in", IMAGE_TRANSFORMS["cutmix"]),
    Method("random-erasing", "Random Erasing", "a rectangle erased", IMAGE_TRANSFORMS["random-erasing"]),
    Method("randaugment", "RandAugment", "random colours and geometry", IMAGE_TRANSFORMS["randaugment"]),
    Method(
        "constant",
        "constant Σ (control)",
        "Σ is a constant: the control experiment",
        source=_constant,
        options=(*_STRENGTH, "constant"),
    ),
    Method(
        "isda",
        "ISDA",
        "Σ is the running covariance of the sample's class",
        source=_classwise,
        options=_STRENGTH,
        defaults={"strength": 20.0},
    ),
    Method(
        "joint",
        "CovNet, joint",
        "CovNet trained by the same loss as the network: the ablation that collapses",
        source=_covnet,
        learner=JointAugmentation,
        options=_COVNET,
    ),
    Method(
        "learnable", "learnable", "CovNet trained by the meta loop: the paper's method", source=_covnet, options=_META
    ),
)


def _on_p2p(base: Method) -> Method:
    """The method on P2P-Net, whose concatenated classifier is the head to augment."""
    return replace(
        base,
        name="p2p" if base.name == "basic" else f"p2p+{base.name}",
        title="P2P-Net" if base.name == "basic" else f"P2P-Net, {base.title}",
        summary=f"P2P-Net on the network; {base.summary}",
        composite="p2p",
        base=base.name,
        defaults={"strength": 5.0, "interval": 10, "epochs": 300, "lr": 0.002, "weight_decay": 5e-4},
        width_divisor=2,
    )


_BASE = {method.name: replace(method, base=method.name) for method in _BASE_METHODS}
METHODS: dict[str, Method] = _BASE | {
    method.name: method for method in (_on_p2p(_BASE[name]) for name in ("basic", "isda", "learnable"))
}
"""All methods by name."""

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]  # the command line offers exactly the names in the table


def method_on(composite: str | None, base: str) -> Method:
    """Find the row of a method on a composite model.

    Args:
        composite: Name of the composite model, or None for the plain network.
        base: Name of the method without it.

    Returns:
        The row.

    Raises:
        KeyError: If there is no such combination.
    """
    for method in METHODS.values():
        if (method.composite, method.base) == (composite, base):
            return method
    raise KeyError(f"no method {base!r} on {composite!r}")


def _composite(name: str | None) -> Composite | None:
    """How the meta loop runs a composite model."""
    if name is None:
        return None
    return Composite(
        run=lambda model, images: cast(Any, model).outputs(images),
        logits=lambda outputs: outputs.logits,
        rest=lambda model, outputs, labels: cast(Any, model).rest_of_loss(outputs, labels),
        run_head=lambda model, images: cast(Any, model).head_logits(images),
        after=lambda model, outputs: cast(Any, model).update_templates(outputs),
    )


def parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Group the trainable parameters of a network by learning rate.

    Args:
        model: A network; if it has a method ``parameter_groups(lr)``, as P2P-Net does, that decides.
        lr: Learning rate.

    Returns:
        Parameter groups for a torch optimiser.
    """
    groups = getattr(model, "parameter_groups", None)
    if groups is not None:
        return cast(list[dict[str, Any]], groups(lr))
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad], "lr": lr}]


def make_learner(
    method: str,
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
    """Make the learner that trains a network by a method.

    Args:
        method: Name of a row of :data:`METHODS`.
        settings: Settings of the augmentation.
        model: The network, already built as the method's composite model if it has one.
        optimizer: Optimiser of the network's parameters.
        label_smoothing: Label smoothing of the loss, in [0, 1].
        clip_norm: Largest norm of the gradient; None for no clipping.
        micro_batch: Most images in one forward pass; None for the whole half batch.
        compile: Whether to compile the ordinary pass with `torch.compile`.
        sync_batch_norm: Whether BatchNorm normalises over all ranks.
        autocast: Precision of the backbone; None for that of the parameters.
        scaler: Gradient scaler for fp16.

    Returns:
        The learner.

    Raises:
        ValueError: If the network cannot be split, or settings are out of range.
    """
    row = METHODS[method]
    settings = row.resolve(settings)
    network = Network(
        model,
        settings.frozen_blocks if row.meta_loop else 0,
        head="head" if row.composite else None,
        compile="inductor" if compile else None,
        composite=_composite(row.composite),
        sync_batch_norm=sync_batch_norm,
    )
    if row.width_divisor != 4 and settings.width is None:
        settings = replace(settings, width=max(1, network.feature_dim // row.width_divisor))
    source = row.source(settings, network.num_classes, network.feature_dim) if row.source else Constant(0.0)
    source = source.to(network.head.weight.device)
    learned = list(source.parameters())
    meta_optimizer: Optimizer | None = None
    if learned:
        meta_optimizer = (SGD if settings.meta_optimizer == "sgd" else Adam)(learned, lr=settings.meta_lr)
    assert settings.strength is not None and settings.interval is not None  # noqa: PT018
    return row.learner(
        network,
        optimizer,
        source,
        meta_optimizer,
        strength=settings.strength if row.augments else 0.0,
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
        pseudo=settings.pseudo,
        sync_batch_norm=sync_batch_norm,
    )
