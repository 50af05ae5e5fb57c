"""The network under training, with its optimiser, schedule, learner, gradient scaler and moving average."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from semaug.inference.classifier import as_composite
from semaug.meta.optimizers import load_optimizer_state, make_optimizer, set_learning_rate
from semaug.meta.state import gather_learner_state, take_rank_state
from semaug.network.models import build_model, load_weights
from semaug.training.checks import refuse_single_values
from semaug.training.methods import METHODS, make_learner, parameter_groups
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
    """
    where = str(device) if not distributed.is_running() else f"{distributed.world_size()} × {device.type}"
    rate = f"{config.optimizer} at {config.lr:.3g} for {config.batch_size} images"
    progress.say(f"{config.model} by {config.method}, {counted(required(config.epochs), 'epoch')}, {rate}, on {where}")
    model = build_model(required(config.model), classes, required(config.crop), bool(config.pretrained))
    plain, composite = model, METHODS[config.method].composite
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
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model


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
        return (epoch + 1e-3) / warmup
    if lr_decay == "epoch":
        epoch = max(math.floor(epoch), warmup)
    return 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


class Optimization:
    """A network and everything that trains it, in the state in which training starts.

    Args:
        model: The network.
        config: Resolved settings of the run.
        device: The device of the network.

    Raises:
        SettingError: If the method cannot train the network with these settings.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, device: torch.device) -> None:
        self.model, self.config, self.device = model, config, device
        self.optimizer = _make_optimizer(model, config)
        self.scaler = GradScaler(device.type) if config.precision == "fp16" else None
        try:
            options = (
                "label_smoothing",
                "clip_norm",
                "micro_batch",
                "compile",
                "sync_batch_norm",
                "autocast",
                "graphs",
            )
            settings = {name: getattr(config, name) for name in options}
            self.learner = make_learner(
                config.method, config.augmentation, model, self.optimizer, scaler=self.scaler, **settings
            )
        except ValueError as error:  # the network cannot be split, or a setting is out of range
            raise SettingError(str(error), on_all_ranks=True) from error
        self.learner.check_values = False  # the device would have to wait; the trainer checks the numbers
        self.average: AveragedModel | None = None
        if config.ema is not None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True)
        if not (config.sync_batch_norm and distributed.is_running()):
            refuse_single_values(model)
        self._seed_rank()

    @property
    def evaluated(self) -> nn.Module:
        """The network to evaluate: the moving average if there is one."""
        return self.model if self.average is None else self.average.module

    def set_learning_rates(self, epoch: float) -> float:
        """Set the learning rates for a time in epochs; returns that of the network."""
        factor = cosine_schedule(epoch, required(self.config.epochs), self.config.warmup_epochs, self.config.lr_decay)
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
            self.average.update_parameters(self.model)
        return metrics

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
        """Give each rank but the first random numbers of its own, for its masks of dropout."""
        if distributed.rank() > 0:
            torch.manual_seed(torch.initial_seed() + 1_000_003 * distributed.rank() + self.learner.half_steps)


def _make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    groups = [{**group, "initial_lr": group["lr"]} for group in parameter_groups(model, required(config.lr))]
    decay, capturable = required(config.weight_decay), config.precision != "fp16"
    if config.optimizer == "adamw":
        return make_optimizer(AdamW, groups, capturable, weight_decay=decay)
    return make_optimizer(SGD, groups, capturable, momentum=config.momentum, weight_decay=decay)
