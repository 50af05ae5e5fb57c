"""The table of training methods.

A row says what happens to the images, where Σ comes from, which learner takes the steps and which settings matter. The
trainer, `compare`, `reproduce`, the reports and the command line read this table; to add a method, add a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from torch import nn
from torch.optim import SGD, Adam, Optimizer

from semaug import p2p
from semaug.data.augmentation import IMAGE_TRANSFORMS, PLAIN, ImageTransforms
from semaug.isda.precision import LARGEST_STRENGTH
from semaug.isda.sources import ClassCovariance, Constant, CovNet, Sharing, Source
from semaug.isda.strength import StrengthOption
from semaug.meta.algorithm import Order
from semaug.meta.executor import PseudoUpdate
from semaug.meta.gradient import Engine
from semaug.meta.learner import JointAugmentation, LearnableAugmentation
from semaug.meta.mixing import DominantClassCovariance, ManifoldMixup, SnapMix
from semaug.meta.optimizers import make_optimizer
from semaug.network.network import FrozenBlocks, Network
from semaug.util.ranges import BelowOne, Count, NotNegative, Positive, Range, setting


@dataclass(frozen=True)
class Augmentation:
    """Settings of the semantic augmentation, used by the methods that have a Σ."""

    strength: Annotated[StrengthOption, Range(0, LARGEST_STRENGTH)] = setting("auto", "method")
    """Strength λ of augmentation. auto: λ is adjusted after each batch, such that augmentation raises the loss by a
    share of its distance to log C, the loss of a random guess; the share grows to 20 %. A number: λ0 of the paper's
    schedule, the strength at the end of training (the paper: 10)."""
    strength_power: NotNegative = setting(1.0, "method")
    """α of the paper's schedule: λ grows as (epoch / epochs)^α · λ0."""
    constant: NotNegative = setting(0.5, "method")
    """Variance of the method constant."""
    covariance: Sharing = setting("classwise", "method")
    """Σ of isda: the variance of the sample's class (classwise), of all classes together (pooled), halfway between
    the two (shrunk), or of the class and those with the nearest means (neighbours)."""
    width: Count | None = setting(None, "method")
    """Hidden width of CovNet. Default: a quarter of the feature dimension; half of it on P2P-Net."""
    depth: Annotated[int, Range(1, 100)] = setting(1, "method")
    """Number of hidden layers of CovNet."""
    fixed_trace: Positive | None = setting(None, "method")
    """Fix the mean variance of CovNet's Σ to this value, so that only the shape of Σ is learned. Default:
    it is learned too."""
    activation: Literal["sigmoid", "softplus"] | None = setting(None, "method")
    """Activation of CovNet's outputs. Default: sigmoid, as in the paper; softplus with a fixed trace."""
    meta_lr: NotNegative = setting(0.001, "method")
    """Learning rate of CovNet."""
    meta_optimizer: Literal["sgd", "adam"] = setting("sgd", "method")
    """Optimiser of CovNet."""
    meta_momentum: BelowOne = setting(0.0, "method")
    """Momentum of CovNet's sgd."""
    order: Order = setting("paper", "method")
    """Order of the updates: the paper's, or the pipelined one, which costs less."""
    engine: Engine = setting("jvp", "method")
    """How the meta-gradient is computed. Both engines give the same result; jvp is faster."""
    frozen_blocks: Annotated[FrozenBlocks, Range(0, 10_000)] = setting("auto", "method")
    """Freeze the stem and the first N blocks in the pseudo update; stem freezes the stem alone, 0 nothing. auto: five
    eighths of the blocks, as the paper's ten of ResNet-50's sixteen; nothing in P2P-Net, as in the paper. The network
    is trained as a whole nevertheless; `freeze` leaves blocks untrained."""
    interval: Count | None = setting(None, "method")
    """Run the meta loop in one of N half steps, the iterations of the paper; a batch has two. Default: 1; 10 on
    P2P-Net, as in the paper."""
    detach_real: bool = setting(False, "method")
    """Stop gradients from Σ into the features in the real update."""
    pseudo: PseudoUpdate = setting("global", "method")
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
        base: Name of the method without the composite model. Default: its own name.
        options: Fields of :class:`Augmentation` that the method uses.
        interval: Default of :attr:`Augmentation.interval`.
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
    interval: int = 1
    width_divisor: int = 4

    def __post_init__(self) -> None:
        if not self.base:
            object.__setattr__(self, "base", self.name)

    @property
    def augments(self) -> bool:
        """Whether the method has a Σ."""
        return self.source is not None

    @property
    def learns(self) -> bool:
        """Whether the method learns its Σ."""
        return "meta_lr" in self.options

    @property
    def fits_features(self) -> bool:
        """Whether the method can train a head on cached features, without images."""
        learners = (LearnableAugmentation, JointAugmentation)
        return self.composite is None and self.images(2).is_plain and self.learner in learners

    def resolve(self, settings: Augmentation) -> Augmentation:
        """Fill in this method's default `interval` if the settings have None."""
        return replace(settings, interval=self.interval) if settings.interval is None else settings

    def relevant(self, settings: Augmentation) -> Augmentation:
        """Reset the settings that this method does not use, so that they do not identify a run."""
        return replace(Augmentation(), **{name: getattr(settings, name) for name in self.options})


def _constant(settings: Augmentation, num_classes: int, feature_dim: int) -> Source:
    return Constant(settings.constant)


def _classwise(settings: Augmentation, num_classes: int, feature_dim: int) -> Source:
    return ClassCovariance(num_classes, feature_dim, sharing=settings.covariance)


def _covnet(settings: Augmentation, num_classes: int, feature_dim: int) -> Source:
    return CovNet(feature_dim, settings.width, settings.depth, settings.fixed_trace, settings.activation)


_STRENGTH = ("strength", "strength_power")
_COVNET = (*_STRENGTH, "width", "depth", "fixed_trace", "activation", "meta_lr", "meta_optimizer", "meta_momentum",
           "detach_real")  # fmt: skip
_META = tuple(setting.name for setting in fields(Augmentation) if setting.name not in ("constant", "covariance"))

_BASE_METHODS = (
    Method("basic", "basic", "crop and flip, cross-entropy"),
    Method("mixup", "Mixup", "two images blended", IMAGE_TRANSFORMS["mixup"]),
    Method("cutmix", "CutMix", "a rectangle of another image pasted in", IMAGE_TRANSFORMS["cutmix"]),
    Method("random-erasing", "Random Erasing", "a rectangle erased", IMAGE_TRANSFORMS["random-erasing"]),
    Method("randaugment", "RandAugment", "random colours and geometry", IMAGE_TRANSFORMS["randaugment"]),
    Method("snapmix", "SnapMix", "a box of another image pasted in, labels by class-activation maps (AAAI 2021)",
           learner=SnapMix),
    Method("manifold-mixup", "Manifold Mixup", "two images blended, or their activations after a stage (ICML 2019)",
           learner=ManifoldMixup),
    Method("constant", "constant Σ (control)", "Σ is a constant: the control experiment",
           source=_constant, options=(*_STRENGTH, "constant")),
    Method("isda", "ISDA", "Σ is the running covariance of the sample's class",
           source=_classwise, options=(*_STRENGTH, "covariance")),
    Method("joint", "CovNet, joint", "CovNet trained by the same loss as the network: the ablation that collapses",
           source=_covnet, options=_COVNET, learner=JointAugmentation),
    Method("learnable", "learnable", "CovNet trained by the meta loop: the paper's method",
           source=_covnet, options=_META),
)  # fmt: skip


def _on_p2p(base: Method) -> Method:
    """The method on P2P-Net, whose concatenated classifier is the head to augment."""
    return replace(
        base,
        name="p2p" if base.name == "basic" else f"p2p+{base.name}",
        title="P2P-Net" if base.name == "basic" else f"P2P-Net, {base.title}",
        summary=f"P2P-Net on the network; {base.summary}",
        composite="p2p",
        base=base.name,
        interval=10,
        width_divisor=2,
    )


def _with_isda(rival: Method) -> Method:
    """ISDA on top of another method. Where that mixes images, Σ is the covariance of the class with most weight."""
    name = f"isda+{rival.name}"

    def source(settings: Augmentation, num_classes: int, feature_dim: int) -> Source:
        return DominantClassCovariance(num_classes, feature_dim, sharing=settings.covariance)

    return replace(
        rival,
        name=name,
        title=f"ISDA, {rival.title}",
        summary=f"ISDA, and {rival.summary}",
        source=source,
        base=name,
        options=(*_STRENGTH, "covariance"),
    )


_RIVALS = ("mixup", "cutmix", "random-erasing", "randaugment", "snapmix", "manifold-mixup")
_ISDA_METHODS = [_with_isda(method) for method in _BASE_METHODS if method.name in _RIVALS]
_P2P_METHODS = [_on_p2p(method) for method in _BASE_METHODS if method.name in ("basic", "isda", "learnable")]
METHODS: dict[str, Method] = {method.name: method for method in (*_BASE_METHODS, *_ISDA_METHODS, *_P2P_METHODS)}
"""All methods by name."""

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]  # the command line offers exactly the names in the table


def method_on(composite: str | None, base: str) -> Method:
    """Find the row of a method on a composite model (None: on the plain network); a KeyError if there is none."""
    rows: dict[tuple[str | None, str], Method] = {(row.composite, row.base): row for row in METHODS.values()}
    return rows[composite, base]


def parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Parameter groups of a network for a torch optimiser; P2P-Net has its own method to make them."""
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
    compile: bool = False,
    sync_batch_norm: bool = False,
    class_images: Sequence[int] | None = None,
    **options: Any,
) -> LearnableAugmentation:
    """Make the learner that trains a network by a method.

    Args:
        method: Name of a row of :data:`METHODS`.
        settings: Settings of the augmentation.
        model: The network, already built as the method's composite model if it has one.
        optimizer: Optimiser of the network's parameters.
        compile: Whether to compile the ordinary pass with `torch.compile`.
        sync_batch_norm: Whether BatchNorm normalises over all ranks.
        class_images: Number of training images of each class, if known: a class-wise Σ is pooled for those with one.
        **options: Further arguments of :class:`~semaug.LearnableAugmentation`: `label_smoothing`, `class_weights`,
            `clip_norm`, `micro_batch`, `autocast`, `scaler` and `graphs`.

    Returns:
        The learner.

    Raises:
        ValueError: If the network cannot be split, or settings are out of range.
    """
    row = METHODS[method]
    settings = row.resolve(settings)
    network = Network(
        model,
        settings.frozen_blocks if "frozen_blocks" in row.options else 0,
        head="head" if row.composite else None,
        compile="inductor" if compile else None,
        composite=p2p.composite() if row.composite == "p2p" else None,
        sync_batch_norm=sync_batch_norm,
    )
    if settings.width is None:
        settings = replace(settings, width=max(1, network.feature_dim // row.width_divisor))
    source = row.source(settings, network.num_classes, network.feature_dim) if row.source else Constant(0.0)
    source = source.to(network.head.weight.device)
    if class_images is not None and isinstance(source, ClassCovariance):
        source.set_class_images(class_images)
    learned = list(source.parameters())
    meta_optimizer: Optimizer | None = None
    if learned:
        adam, groups = settings.meta_optimizer == "adam", [{"params": learned, "lr": settings.meta_lr}]
        if adam and settings.meta_momentum:
            raise ValueError("meta_momentum is for meta_optimizer sgd; adam has momentum of its own")
        own = {} if adam else {"momentum": settings.meta_momentum}
        meta_optimizer = make_optimizer(Adam if adam else SGD, groups, options.get("scaler") is None, **own)
    passed_on = ("strength_power", "interval", "order", "engine", "detach_real", "pseudo")
    return row.learner(
        network,
        optimizer,
        source,
        meta_optimizer,
        strength=settings.strength if row.augments else 0.0,
        sync_batch_norm=sync_batch_norm,
        **{name: getattr(settings, name) for name in passed_on},
        **options,
    )
