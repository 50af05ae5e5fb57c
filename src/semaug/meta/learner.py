"""The public learners: train a classifier with semantic augmentation in a training loop of your own."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from semaug.isda.checks import check_label_form, check_labels
from semaug.isda.sources import CovNet, Source
from semaug.isda.strength import StrengthOption, make_strength
from semaug.meta.algorithm import Algorithm1, JointTraining, Order
from semaug.meta.diagnostics import Metrics
from semaug.meta.executor import Executor, PseudoUpdate
from semaug.meta.gradient import Engine
from semaug.meta.graphs import StepGraphs
from semaug.meta.optimizers import load_optimizer_state, make_optimizer
from semaug.meta.precision import MixedPrecision
from semaug.meta.state import update_from_state, update_to_state
from semaug.network.network import FrozenBlocks, Network
from semaug.util import devices, distributed


class LearnableAugmentation:
    """Trains a classifier with semantic augmentation whose covariance Σ is learned by the meta loop (Algorithm 1).

    A source of Σ without parameters has no meta loop: then this is training with ISDA or with a constant Σ.

    Under torch.distributed every rank makes a learner, which starts with rank 0's parameters, and calls :meth:`step`
    with its part of the batch (:func:`semaug.util.distributed.shard`).

    Args:
        model: A classifier with a linear head, or a :class:`~semaug.Network`, which may also describe a model with
            several losses.
        optimizer: A torch optimiser of the model's parameters.
        source: Where Σ comes from. Default: the paper's :class:`~semaug.CovNet`.
        meta_optimizer: An optimiser of the source's parameters. Default: SGD with learning rate 0.001, as in the paper.
        strength: ``"auto"``: automatic (:class:`~semaug.AutoStrength`). A number: λ0 of the paper's schedule.
        strength_power: α of that schedule: :meth:`set_progress` sets λ to ``progress^α · λ0``.
        frozen_blocks: Freeze the stem and the first N blocks in the pseudo update. ``"stem"`` freezes the stem alone, 0
            nothing, ``"auto"`` five eighths of the blocks, as the paper's ten of ResNet-50's sixteen. A
            :class:`~semaug.Network` has its own number.
        interval: Run the meta loop once every N half steps, alternating between first and second halves of batches.
        order: ``"paper"``, or ``"pipelined"``, which costs less (:mod:`semaug.meta.algorithm`).
        engine: How the meta-gradient is computed: ``"jvp"`` or ``"double_backward"``. Both give the same result.
        detach_real: Stop gradients from Σ into the features in the real update. The authors' code lets them flow.
        label_smoothing: Label smoothing of the training loss, in [0, 1].
        class_weights: Weights (C,) of the classes in the training loss and in the meta loss: the mean over a batch is
            that of weight times loss. None: all 1. Not for composite models.
        clip_norm: Maximum norm of f's gradient, positive, in the pseudo update (over the late parameters, with a
            constant factor) and in the real one. None: no clipping.
        micro_batch: At most this many images go through the network together, and gradients are summed: the same half
            batch in less memory. BatchNorm and class-wise statistics see one micro-batch after the other. None: all.
        autocast: Precision of the backbone. Default: that of the ``torch.autocast`` around :meth:`step`, if any.
        scaler: The gradient scaler that fp16 needs.
        check_values: Check labels and features for values that cannot be right. The host then waits for the GPU.
        pseudo: ``"global"``: the pseudo update uses the images of all ranks. ``"local"``: each rank uses its own images
            and meta loss, as in the authors' code, which communicates less.
        sync_batch_norm: BatchNorm normalises over the images of all ranks; otherwise over each rank's own, unless the
            model has layers of the class `torch.nn.SyncBatchNorm`.
        graphs: On a GPU, replay steps as CUDA graphs (:mod:`semaug.meta.graphs`): the same numbers in less time. This
            needs ``check_values=False`` and optimisers made with ``fused=True`` (SGD) or ``capturable=True``, whose
            learning rates are tensors on the GPU. Otherwise, and where the network does not allow it, steps run as
            without graphs, after a warning. Python code of the network, hooks included, does not run in a replay, and
            the parameters' ``.grad`` is None after it.

    Raises:
        ValueError: If an option is out of range, options cannot be combined, the model has no linear head, or optimiser
            or source belong to another model.

    >>> import torch, semaug
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> learner = semaug.LearnableAugmentation(model, optimizer)
    >>> learner.set_progress(0.5)  # before each step: the share of training that is done
    >>> metrics = learner.step(torch.randn(6, 3, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    >>> sorted(metrics)[:2]
    ['accuracy', 'augmentation_share']
    """

    _algorithm: type[Algorithm1] = Algorithm1
    _capturable = True  # whether steps may be replayed: what the host draws in a step would stay the same

    def __init__(
        self,
        model: nn.Module | Network,
        optimizer: Optimizer,
        source: Source | None = None,
        meta_optimizer: Optimizer | None = None,
        *,
        strength: StrengthOption = "auto",
        strength_power: float = 1.0,
        frozen_blocks: FrozenBlocks = "auto",
        interval: int = 1,
        order: Order = "paper",
        engine: Engine = "jvp",
        detach_real: bool = False,
        label_smoothing: float = 0.0,
        class_weights: Tensor | None = None,
        clip_norm: float | None = None,
        micro_batch: int | None = None,
        autocast: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        check_values: bool = True,
        pseudo: PseudoUpdate = "global",
        sync_batch_norm: bool = False,
        graphs: bool = True,
    ) -> None:
        _check_choice("order", order, Order)
        _check_choice("engine", engine, Engine)
        _check_choice("pseudo", pseudo, PseudoUpdate)
        if pseudo == "local" and order == "pipelined":
            raise ValueError("pseudo='local' does not work with order='pipelined': the pseudo update is the real one")
        for option, value in (("interval", interval), ("micro_batch", 1 if micro_batch is None else micro_batch)):
            if value < 1 or value != int(value):
                raise ValueError(f"{option} must be a whole number of at least 1, not {value}")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, not {clip_norm}")
        if source is not None and not isinstance(source, Source):
            raise ValueError(f"source must be a semaug.Source, not a {type(source).__name__}")
        if isinstance(model, nn.Module) and frozen_blocks == "auto" and source is not None and not _learned(source):
            frozen_blocks = 0  # there is no pseudo update
        self.network = _as_network(model, frozen_blocks, sync_batch_norm)
        if pseudo == "local" and self.network.sync_batch_norm:
            raise ValueError("pseudo='local' does not work with sync_batch_norm")
        if class_weights is not None and class_weights.shape != (self.network.num_classes,):
            raise ValueError(f"need {self.network.num_classes} class_weights, not {tuple(class_weights.shape)}")
        if class_weights is not None and not bool(((class_weights >= 0) & class_weights.isfinite()).all()):
            raise ValueError("class_weights must be finite numbers ≥ 0")
        if class_weights is not None and self.network.composite is not None:
            raise ValueError("class_weights do not work with a composite model: its other losses have no weights")
        self.source = (source or CovNet(self.network.feature_dim)).to(self.network.head.weight.device)
        _check_source(self.source, self.network)
        for module in (self.network.model, self.source):
            distributed.broadcast_([*module.parameters(), *module.buffers()])
        learned = _learned(self.source)
        default = make_optimizer(SGD, [{"params": learned, "lr": 0.001}]) if learned else None
        meta_optimizer = meta_optimizer or default
        _check_owner("optimizer", optimizer, self.network.model, self.network.late_parameters().values())
        if learned:
            _check_owner("meta_optimizer", meta_optimizer, self.source, learned)
        self.executor = Executor(
            self.network,
            self.source,
            optimizer,
            meta_optimizer,
            engine=engine,
            pseudo=pseudo,
            label_smoothing=label_smoothing,
            class_weights=None if class_weights is None else class_weights.to(self.network.head.weight),
            clip_norm=clip_norm,
            micro_batch=micro_batch,
            mixed=MixedPrecision(self.network.head.weight.device.type, autocast, scaler),
            check_values=check_values,
        )
        self._strength = make_strength(strength, strength_power).to(self.network.head.weight.device)
        self.algorithm = self._algorithm(self.executor, order, interval, detach_real, self._strength)
        graphed = graphs and self._capturable and devices.has_graphs(self.network.head.weight.device)
        self._graphs = StepGraphs(self.algorithm, self._run_step) if graphed else None

    @property
    def strength(self) -> float:
        """The present λ. To read it, the host waits for the device."""
        return float(self._strength.value)

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser of the model. For another one make another learner, with the state of this one."""
        return self.executor.optimizer

    @property
    def meta_optimizer(self) -> Optimizer | None:
        """The optimiser of the source's parameters; None if it has none."""
        return self.executor.meta_optimizer

    @property
    def half_steps(self) -> int:
        """How many half steps were taken."""
        return self.algorithm.half_steps

    @property
    def check_values(self) -> bool:
        """Whether labels and features are checked in each step."""
        return self.executor.passes.check_values

    @check_values.setter
    def check_values(self, value: bool) -> None:
        self.executor.passes.check_values = value

    def set_progress(self, progress: float) -> None:
        """Set the progress of training, which determines λ. ``strength="auto"`` needs it before the first step.

        Args:
            progress: From 0 at the start of training to 1 at its end. With ``"auto"`` call it before each step; the
                paper's schedule takes ``epoch / epochs``, and without a call λ stays at λ0.

        Raises:
            ValueError: If it is outside this range.
        """
        self._strength.set_progress(progress)

    def step(self, images: Tensor, labels: Tensor) -> Metrics:
        """Take two half steps on a batch: each half is the meta batch of the other one.

        Args:
            images: This rank's images (N, 3, H, W), N at least 2. The pipelined order uses images and labels once more
                in the next step: do not overwrite them in place.
            labels: Class indices (N,), or probabilities (N, C).

        Returns:
            The mean diagnostics of both half steps and of all ranks, as tensors: ``train_loss`` (ISDA),
            ``augmentation_share`` (the part of it that augmentation adds), ``accuracy`` on the batch, ``gradient_norm``
            of f after clipping (not with a `scaler`), ``variance_mean`` and its spread over samples and dimensions
            (``variance_std_samples``, ``variance_std_dims``), ``drift`` of the source's parameters from their initial
            values (relative), if the meta loop ran, ``meta_loss`` and ``meta_gradient_norm``, and for a composite model
            ``rest_loss``, the part of the loss that is not the head's.

        Raises:
            ValueError: If the batch is too small, or labels or features hold values that cannot be right.
        """
        with self.executor.mixed.inside_step():
            self._check(images, labels)
            self.network.prepare(images)  # before the labels: a wrong head is the likelier reason for wrong numbers
            self._check_labels(images, labels)
            if self.executor.learns_source:
                self.network.check_meta_passes(images, self.executor.engine == "jvp")
            return (self._run_step if self._graphs is None else self._graphs.step)(images, labels)

    def _run_step(self, images: Tensor, labels: Tensor) -> Metrics:
        first, second = self.executor.cut(images, labels)
        both = [self.algorithm.half_step(first, second), self.algorithm.half_step(second, first)]
        shared = [name for name in both[0] if name in both[1]]
        means = torch.stack([torch.stack([metrics[name] for name in shared]) for metrics in both]).mean(0)
        return {**both[0], **both[1], **dict(zip(shared, means.unbind(), strict=True))}

    def _check(self, images: Tensor, labels: Tensor) -> None:
        if not torch.is_grad_enabled():
            raise ValueError("gradients are switched off: call step() outside torch.no_grad() and inference_mode()")
        for name, value in (("images", images), ("labels", labels)):
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} must be a tensor, not a {type(value).__name__}")
        if not images.is_floating_point():
            raise ValueError(f"images must be normalised floating-point numbers, not {images.dtype}")
        dtypes = images.dtype, self.network.head.weight.dtype
        if len({torch.promote_types(dtype, torch.float32) for dtype in dtypes}) > 1:
            raise ValueError(f"images of {dtypes[0]} do not match a head of {dtypes[1]}")
        count = len(images) if images.ndim else 0
        if count < 2:
            raise ValueError(f"a batch is cut in two halves and needs at least 2 images, not {count}; use drop_last")
        if labels.shape[:1] != (count,):
            raise ValueError(f"{count} images came with {len(labels) if labels.ndim else 1} labels")
        if self.network.model.get_submodule(self.network.head_name) is not self.network.head:
            raise ValueError(f"the layer {self.network.head_name!r} was replaced; make the learner after that")
        self._strength.check_ready()

    def _check_labels(self, images: Tensor, labels: Tensor) -> None:
        network, kind = self.network, type(self.network.model).__name__
        check_label_form(labels, images.shape[0], network.num_classes)
        if self.executor.passes.check_values:
            try:
                check_labels(labels, network.num_classes)
            except ValueError as error:
                head = f"the head of {kind} is its layer {network.head_name!r}, with {network.num_classes} outputs"
                raise ValueError(f"{error}; {head}") from None

    def state_dict(self) -> dict[str, Any]:
        """The state for an exact resume, apart from the states of model, optimiser and scaler.

        Returns:
            Plain values and tensors, for `torch.save`.
        """
        return {
            "source": self.source.state_dict(),
            "meta_optimizer": None if self.meta_optimizer is None else self.meta_optimizer.state_dict(),
            "half_steps": self.half_steps,
            "strength": self._strength.state_dict(),
            "initial": self.executor.diagnostics.initial,
            "last_real": update_to_state(self.algorithm.last_real),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state.

        Args:
            state: What :meth:`state_dict` returned, from any device.

        Raises:
            ValueError: If it is another state.
        """
        if missing := self.state_dict().keys() - state.keys():
            raise ValueError(f"this is not a state of {type(self).__name__}: it lacks {', '.join(sorted(missing))}")
        self.source.load_state_dict(state["source"])
        if self.meta_optimizer is not None:
            load_optimizer_state(self.meta_optimizer, state["meta_optimizer"])
        device = self.network.head.weight.device
        self._strength.load_state_dict(state["strength"])
        self.algorithm.half_steps = state["half_steps"]
        self.algorithm.last_real = update_from_state(state["last_real"], device)
        self.executor.diagnostics.initial = [value.to(device) for value in state["initial"]]
        if self._graphs is not None:
            self._graphs.reset()


class JointAugmentation(LearnableAugmentation):
    """The ablation without a meta loop: f and CovNet take one step on the same ISDA loss.

    Σ only ever raises that loss (eq. 4), so CovNet learns Σ → 0 and the augmentation disappears.

    Args:
        model: See :class:`LearnableAugmentation`, whose options this class shares.

    >>> import torch, semaug
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> learner = semaug.JointAugmentation(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> learner.set_progress(0.0)
    >>> "meta_loss" in learner.step(torch.randn(6, 3, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    False
    """

    _algorithm = JointTraining


def _as_network(model: nn.Module | Network, frozen_blocks: FrozenBlocks, sync_batch_norm: bool) -> Network:
    if not isinstance(model, nn.Module | Network):
        raise ValueError(f"model must be an nn.Module or a semaug.Network, not a {type(model).__name__}")
    if not isinstance(model, Network):
        return Network(model, frozen_blocks, sync_batch_norm=sync_batch_norm)
    if frozen_blocks not in ("auto", model.frozen_blocks):
        raise ValueError(f"the Network has frozen_blocks={model.frozen_blocks!r}, not {frozen_blocks!r}")
    if sync_batch_norm and not model.sync_batch_norm:
        raise ValueError("the Network normalises over each rank's own images; make it with sync_batch_norm=True")
    return model


def _learned(source: Source) -> list[nn.Parameter]:
    return [parameter for parameter in source.parameters() if parameter.requires_grad]


def _check_source(source: Source, network: Network) -> None:
    for size in ("feature_dim", "num_classes"):
        own, needed = getattr(source, size, None), getattr(network, size)
        if own not in (None, needed):
            kind = type(source).__name__
            raise ValueError(f"{kind} has {size}={own}, and the head {network.head_name!r} needs {size}={needed}")


def _check_owner(option: str, optimizer: Any, module: nn.Module, parameters: Iterable[Tensor]) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"{option} must be a torch optimiser, not a {type(optimizer).__name__}")
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if owned.isdisjoint(parameters):
        raise ValueError(
            f"{option} has none of the parameters of this {type(module).__name__} that it should train; make it from "
            "them, after any layer was replaced"
        )


def _check_choice(option: str, value: str, choices: Any) -> None:
    names = get_args(choices)
    if value not in names:
        raise ValueError(f"{option} must be {' or '.join(map(repr, names))}, not {value!r}")
