"""The network under training, with its optimiser, schedule, learner, gradient scaler and moving average."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from semaug.inference.classifier import as_composite
from semaug.meta.optimizers import load_optimizer_state, make_optimizer, set_learning_rate
from semaug.meta.state import gather_learner_state, take_rank_state
from semaug.network.blocks import find_blocks, find_head, freeze_blocks
from semaug.network.models import build_model, load_weights
from semaug.training.batches import class_weights
from semaug.training.checks import refuse_single_values
from semaug.training.methods import METHODS, make_learner, parameter_groups
from semaug.training.probing import Probe
from semaug.training.settings import TrainConfig, required
from semaug.util import distributed
from semaug.util.errors import ModelError, SettingError
from semaug.util.names import counted
from semaug.util.progress import Progress


def build_network(config: TrainConfig, classes: int, device: torch.device, progress: Progress) -> nn.Module:
    """Build the network of a run on its device, as the composite model of the method if there is one.

    Args:
        config: Resolved settings of the run.
        classes: Number of classes.
        device: Where to train.
        progress: Prints what is built.

    Raises:
        ModelError: There is no such network, or no composite model can be built of it.
        SettingError: The network cannot process images of this size.
    """
    where = str(device) if not distributed.is_running() else f"{distributed.world_size()} × {device.type}"
    rate = f"recipe {config.recipe}, {config.optimizer} at {config.lr:.3g} for {config.batch_size} images"
    progress.say(f"{config.model} by {config.method}, {counted(required(config.epochs), 'epoch')}, {rate}, on {where}")
    drop_path = required(config.drop_path)
    with _fits_images(config, ArithmeticError, AssertionError):
        model = build_model(required(config.model), classes, required(config.crop), bool(config.pretrained), drop_path)
    plain, composite = model, METHODS[config.method].composite
    if config.freeze != "all":
        try:
            freeze_blocks(plain, required(config.freeze))
        except ValueError as error:  # the network has fewer blocks
            raise SettingError(str(error)) from error
    try:
        model = as_composite(composite, plain, classes).to(device)
    except ValueError as error:  # no stages to build a P2P-Net of
        raise ModelError(str(error)) from error
    if config.weights is not None:
        try:
            loaded = load_weights(plain, config.weights)
        except ModelError:
            if composite is None:
                raise
            loaded = load_weights(model, config.weights)  # of a P2P-Net
        progress.say(f"{config.weights}: {loaded}")
    with _fits_images(config, ArithmeticError, AssertionError, RuntimeError, ValueError), torch.no_grad():
        # one image, which costs less than a step; layers may leave nothing of a small one, or need another size
        model.eval()(torch.zeros(1, 3, required(config.crop), required(config.crop), device=device))
    model.train()
    # On a CPU it would be faster too, but torch's batch norm of a training batch is less exact in this layout there:
    # errors of 1.6e-5 instead of 5e-7, and of 1 % instead of 0.1 % in the gradients of a ResNet-18.
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model


@contextmanager
def _fits_images(config: TrainConfig, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a network that cannot process images of the run's size into a SettingError."""
    try:
        yield
    except errors as error:
        reason = str(error).strip().partition("\n")[0]
        message = f"{config.model} cannot process images of {config.crop} px ({reason}); choose another `crop`"
        raise SettingError(message, on_all_ranks=True) from error


def cosine_schedule(epoch: float, epochs: int, warmup_epochs: float, lr_decay: str = "step") -> float:
    """Factor of the learning rate: linear warm-up, then cosine decay to zero.

    Args:
        epoch: Epochs since the start, with a fraction.
        epochs: Epochs in all.
        warmup_epochs: Length of the warm-up; at most a tenth of training counts.
        lr_decay: ``"step"``, or ``"epoch"`` for a cosine that is constant within an epoch.

    Returns:
        The factor, from 0 to 1.
    """
    warmup = min(warmup_epochs, epochs / 10)
    if epoch < warmup:
        return min(1.0, (epoch + 1e-3) / warmup)
    if lr_decay == "epoch":
        epoch = max(math.floor(epoch), warmup)
    return 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


class Optimization:
    """A network and everything that trains it, in the state in which training starts.

    Args:
        model: The network.
        config: Resolved settings of the run.
        device: The device of the network.
        class_images: Number of training images of each class.

    Raises:
        SettingError: If the method cannot train the network with these settings.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, device: torch.device, class_images: Sequence[int]
    ) -> None:
        model = Probe(model) if config.freeze == "all" else model
        self.model, self.config, self.device = model, config, device
        self.optimizer = _make_optimizer(model, config)
        self.scaler = GradScaler(device.type) if config.precision == "fp16" else None
        try:
            options = (
                "label_smoothing", "clip_norm", "micro_batch", "compile", "sync_batch_norm", "autocast", "graphs"
            )  # fmt: skip
            settings = {name: getattr(config, name) for name in options}
            if config.class_weights != "none":
                settings["class_weights"] = class_weights(torch.tensor(class_images), config.class_weights)
            self.learner = make_learner(
                config.method, config.augmentation, model, self.optimizer,
                scaler=self.scaler, class_images=class_images, **settings,
            )  # fmt: skip
        except ValueError as error:  # the network cannot be split, or a setting is out of range
            raise SettingError(str(error), on_all_ranks=True) from error
        self.learner.check_values = False  # the device would have to wait; the trainer checks the numbers
        self.average: AveragedModel | None = None
        if config.ema:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True)
        if not (config.sync_batch_norm and distributed.is_running()):
            refuse_single_values(model)
        self._frozen = [module for module in model.modules() if config.freeze and _is_frozen(module)]
        self._seed_rank()

    @property
    def evaluated(self) -> nn.Module:
        """The network to evaluate: the moving average if there is one."""
        return self.model if self.average is None else self.average.module

    def set_learning_rates(self, epoch: float) -> float:
        """Set the learning rates for a time in epochs; returns that of the network."""
        config = self.config
        epochs, warmup = required(config.epochs), required(config.warmup_epochs)
        factor = cosine_schedule(epoch, epochs, warmup, required(config.lr_decay))
        for group in self.optimizer.param_groups:
            set_learning_rate(group, group["initial_lr"] * factor)
        for group in self.learner.meta_optimizer.param_groups if self.learner.meta_optimizer is not None else ():
            set_learning_rate(group, self.config.augmentation.meta_lr * factor)
        return required(self.config.lr) * factor

    def step(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Train on this rank's images (N, 3, H, W) and labels, class indices (N,) or probabilities (N, C).

        Returns:
            Metrics of the step.
        """
        metrics = self.learner.step(images, labels)
        if self.average is not None:
            # Over the last tenth of the steps at most, so that the average of a short run forgets the initial weights.
            count = int(self.average.n_averaged)  # which is on the CPU
            decay = min(required(self.config.ema), (1 + count) / (10 + count))
            self.average.multi_avg_fn = get_ema_multi_avg_fn(decay)
            self.average.update_parameters(self.model)
        return metrics

    def set_training_mode(self) -> None:
        """Put the network into training mode, except modules that are frozen as a whole."""
        self.model.train()
        for module in self._frozen:
            module.eval()

    def average_buffers(self) -> None:
        """Average the running statistics over ranks; possible at any time, as updates are linear in them."""
        for network in dict.fromkeys((self.model, self.evaluated)):
            distributed.average_buffers_(network)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to resume exactly. Call it on all ranks; it is complete on rank 0 alone."""
        on_gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "learner": gather_learner_state(self.learner.state_dict()),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "random_of_ranks": distributed.gather_objects((torch.get_rng_state(), on_gpu)),
        }

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Restore a state, possibly of another number of ranks, from a dictionary with the items of `state_dict`."""
        self.model.load_state_dict(content["model"])
        load_optimizer_state(self.optimizer, content["optimizer"])
        self.learner.load_state_dict(take_rank_state(content["learner"], self.config.micro_batch))
        if self.scaler is not None:
            self.scaler.load_state_dict(content["scaler"])
        if self.average is not None:
            self.average.load_state_dict(content["average"])
        random_states = content["random_of_ranks"]
        if len(random_states) != distributed.world_size() and distributed.rank() > 0:
            self._seed_rank()
            return
        on_cpu, on_gpu = random_states[distributed.rank()]
        torch.set_rng_state(on_cpu)
        if self.device.type == "cuda" and on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, self.device)

    def _seed_rank(self) -> None:
        """Give every rank except the first its own random numbers, for its dropout masks."""
        if distributed.rank() > 0:
            torch.manual_seed(torch.initial_seed() + 1_000_003 * distributed.rank() + self.learner.half_steps)


def _make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    lr, decay, capturable = required(config.lr), required(config.weight_decay), config.precision != "fp16"
    layer_decay = required(config.layer_decay)
    own = parameter_groups(model, lr) if layer_decay == 1 else layer_groups(model, lr, decay, layer_decay)
    groups = [{**group, "initial_lr": group["lr"]} for group in own]
    if config.optimizer == "adamw":
        return make_optimizer(AdamW, groups, capturable, weight_decay=decay)
    return make_optimizer(SGD, groups, capturable, momentum=config.momentum, weight_decay=decay)


def layer_groups(model: nn.Module, lr: float, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with a smaller learning rate for earlier blocks.

    The same groups as timm's ``param_groups_layer_decay``, for all networks whose blocks are known.

    Args:
        model: The network.
        lr: Learning rate of the head and what comes after the last block.
        weight_decay: Weight decay, except of parameters with one dimension and those that a timm network names.
        layer_decay: Factor of the rate from a block to the one before it.

    Returns:
        Groups for a torch optimiser.
    """
    blocks = find_blocks(model, find_head(model)[0])
    layer_of = {name: layer for layer, block in enumerate(blocks) for name in block.parameters}
    undecayed = cast(Any, model).no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    groups: dict[tuple[int, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = layer_of.get(name, len(blocks))
            decay = 0.0 if parameter.ndim <= 1 or name in undecayed else weight_decay
            rate = lr * layer_decay ** (len(blocks) - layer)
            group = groups.setdefault((layer, decay), {"params": [], "lr": rate, "weight_decay": decay})
            group["params"].append(parameter)
    return list(groups.values())


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters, and none of them is trained."""
    trained = [parameter.requires_grad for parameter in module.parameters()]
    return bool(trained) and not any(trained)
