"""Algorithm 1, its pipelined variant and the authors' training loop, transcribed literally and apart from the library.

Networks are deepcopied, the pseudo update is differentiated as it stands (double backward), the loss is the naive
N×C×D formula, and SGD is written out (in the authors' loop it is torch's). Only torch is used.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

Parameters = dict[str, Tensor]


def naive_isda(
    features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, variance: Tensor, strength: float
) -> Tensor:
    difference = weight[None, :, :] - weight[labels][:, None, :]
    added = (difference * variance[:, None, :] * difference).sum(2)
    return F.cross_entropy(features @ weight.T + bias + strength / 2 * added, labels)


@dataclass
class Literal:
    model: nn.Module
    head: str
    covnet: nn.Module  # features (N, D) → variances (N, D)
    late: list[str]
    lr: float
    meta_lr: float
    strength: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    detach_real: bool = False
    clip: float | None = None
    interval: int = 1
    rest: Callable[[Any, Tensor], Tensor] | None = None  # of the loss, from what the model puts out
    short: bool = True  # whether the pass on the meta batch ends at the head, whose cross-entropy is the meta loss
    buffers: Parameters = field(default_factory=dict)
    half_steps: int = 0
    previous: tuple | None = None

    def forward(
        self, module: nn.Module, parameters: Parameters, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor | float]:
        """The head's input, in a network with the given parameters, and the rest of the loss; statistics move."""
        kept: list[Tensor] = []

        def keep(head: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not kept:
                self.state_at_head = torch.get_rng_state()
            kept.append(args[0])

        handle = module.get_submodule(self.head).register_forward_pre_hook(keep)
        output = functional_call(module, parameters, (images,))
        handle.remove()
        return kept[0], 0.0 if self.rest is None else self.rest(output, labels)

    def has_meta_update(self, half_step: int) -> bool:
        """One in `interval` half steps; if that is even, by turns the first and the second half of a batch."""
        late = 1 if self.interval % 2 == 0 else 0
        return half_step in [n * self.interval + late * (n % 2) for n in range(half_step + 1)]

    def parameters(self) -> Parameters:
        return {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}

    def head_of(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        return parameters[self.head + ".weight"], parameters[self.head + ".bias"]

    def covnet_at(self, values: Parameters, features: Tensor) -> Tensor:
        return functional_call(self.covnet, values, (features,))

    def clip_factor(self, gradients: list[Tensor]) -> Tensor | float:
        if self.clip is None:
            return 1.0
        norm = torch.cat([g.detach().flatten() for g in gradients]).norm()
        return min(1.0, self.clip / (norm + 1e-6))

    def sgd(self, name: str, value: Tensor, gradient: Tensor, keep: bool) -> Tensor:
        gradient = gradient + self.weight_decay * value.detach()
        if self.momentum:
            buffer = self.buffers.get(name)
            buffer = gradient if buffer is None else self.momentum * buffer + gradient
            if keep:
                self.buffers[name] = buffer.detach().clone()
            gradient = gradient + self.momentum * buffer if self.nesterov else buffer
        return value.detach() - self.lr * gradient

    def real_update(self, images: Tensor, labels: Tensor) -> None:
        parameters = self.parameters()
        features, rest = self.forward(self.model, parameters, images, labels)
        variance = self.covnet(features.detach() if self.detach_real else features)
        loss = naive_isda(features, labels, *self.head_of(parameters), variance, self.strength) + rest
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        factor = self.clip_factor(list(gradients))
        with torch.no_grad():
            for (name, parameter), gradient in zip(self.model.named_parameters(), gradients, strict=True):
                parameter.copy_(self.sgd(name, parameter, factor * gradient, keep=True))

    def meta_step(self, meta_loss: Callable[[Parameters], Tensor]) -> None:
        values = {name: p.detach().clone().requires_grad_() for name, p in self.covnet.named_parameters()}
        gradients = torch.autograd.grad(meta_loss(values), list(values.values()))
        with torch.no_grad():
            for parameter, gradient in zip(self.covnet.parameters(), gradients, strict=True):
                parameter.sub_(self.meta_lr * gradient)

    def paper_half_step(self, images: Tensor, labels: Tensor, meta_images: Tensor, meta_labels: Tensor) -> None:
        start = torch.get_rng_state()
        pseudo_net = copy.deepcopy(self.model)

        def meta_loss(values: Parameters) -> Tensor:
            torch.set_rng_state(start)
            parameters = self.parameters()
            features, rest = self.forward(pseudo_net, parameters, images, labels)
            variance = self.covnet_at(values, features.detach())
            loss = naive_isda(features, labels, *self.head_of(parameters), variance, self.strength) + rest
            gradients = torch.autograd.grad(loss, [parameters[n] for n in self.late], create_graph=True)
            factor = self.clip_factor(list(gradients))
            for name, gradient in zip(self.late, gradients, strict=True):
                parameters[name] = self.sgd(name, parameters[name], factor * gradient, keep=False)
            meta_features, _ = self.forward(pseudo_net, parameters, meta_images, meta_labels)
            if self.short:
                torch.set_rng_state(self.state_at_head)
            weight, bias = self.head_of(parameters)
            return F.cross_entropy(meta_features @ weight.T + bias, meta_labels)

        if self.has_meta_update(self.half_steps):
            self.meta_step(meta_loss)
            end = torch.get_rng_state()
            torch.set_rng_state(start)
            self.real_update(images, labels)
            torch.set_rng_state(end)
        else:
            self.real_update(images, labels)
        self.half_steps += 1

    def pipelined_half_step(self, images: Tensor, labels: Tensor) -> None:
        start = torch.get_rng_state()
        if self.previous is not None:
            before, old_images, old_labels, old_start, buffers = self.previous
            old_net, new_net = copy.deepcopy(self.model), copy.deepcopy(self.model)

            def meta_loss(values: Parameters) -> Tensor:
                torch.set_rng_state(old_start)
                parameters = {name: p.detach().clone().requires_grad_() for name, p in before.items()}
                features, rest = self.forward(old_net, parameters, old_images, old_labels)
                variance = self.covnet_at(values, features.detach() if self.detach_real else features)
                loss = naive_isda(features, old_labels, *self.head_of(parameters), variance, self.strength) + rest
                gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
                factor = self.clip_factor(list(gradients))
                now, self.buffers = self.buffers, buffers
                moved = self.parameters()
                by_name = dict(zip(parameters, gradients, strict=True))
                for name in self.late:
                    moved[name] = self.sgd(name, parameters[name], factor * by_name[name], keep=False)
                self.buffers = now
                torch.set_rng_state(start)
                new_features, _ = self.forward(new_net, moved, images, labels)
                weight, bias = self.head_of(moved)
                return F.cross_entropy(new_features @ weight.T + bias, labels)

            self.meta_step(meta_loss)
            self.previous = None
        torch.set_rng_state(start)
        if self.has_meta_update(self.half_steps + 1):
            self.previous = (self.parameters(), images, labels, start, dict(self.buffers))
        self.real_update(images, labels)
        self.half_steps += 1


@dataclass
class Released:
    """The authors' released loop (LearnableISDA, `train.py` and `meta.py`) on one GPU, in our words.

    Both learning rates warm up and follow a cosine, by batches; λ grows by epochs. A copy of the network takes the
    pseudo step, with all parameters. Σ is detached from the features there and in the real step it is not. The momentum
    buffer is a constant in the pseudo step. Both optimisers are torch's SGD.
    """

    model: nn.Module
    head: str
    covnet: nn.Module  # features (N, D) → variances (N, D)
    lr: float
    meta_lr: float
    strength: float  # λ0
    epochs: int
    warmup_epochs: int
    batches: int  # in an epoch
    momentum: float = 0.9

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=self.momentum)
        self.meta_optimizer = torch.optim.SGD(self.covnet.parameters(), lr=self.meta_lr)

    def rate_factor(self, epoch: int, batch: int) -> float:
        if epoch < self.warmup_epochs:
            return (1 + epoch * self.batches + batch) / (1 + self.warmup_epochs * self.batches)
        done = (epoch - self.warmup_epochs) * self.batches + batch
        return 0.5 * (1 + math.cos(math.pi * done / ((self.epochs - self.warmup_epochs) * self.batches)))

    def strength_at(self, epoch: int) -> float:
        return self.strength * epoch / self.epochs

    def train_batch(self, epoch: int, batch: int, images: Tensor, labels: Tensor) -> None:
        for optimizer, rate in ((self.optimizer, self.lr), (self.meta_optimizer, self.meta_lr)):
            optimizer.param_groups[0]["lr"] = rate * self.rate_factor(epoch, batch)
        first, second = zip(images.chunk(2), labels.chunk(2), strict=True)
        self.half_step(self.strength_at(epoch), *first, *second)
        self.half_step(self.strength_at(epoch), *second, *first)

    def features(self, network: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
        inputs: list[Tensor] = []
        handle = network.get_submodule(self.head).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        functional_call(network, parameters, (images,))
        handle.remove()
        return inputs[0]

    def half_step(
        self, strength: float, images: Tensor, labels: Tensor, meta_images: Tensor, meta_labels: Tensor
    ) -> None:
        weight, bias = self.head + ".weight", self.head + ".bias"
        own = dict(self.model.named_parameters())
        # the pseudo step, of a copy that is thrown away with its BatchNorm statistics
        pseudo_net = copy.deepcopy(self.model)
        before = dict(pseudo_net.named_parameters())
        features = self.features(pseudo_net, before, images)
        variance = self.covnet(features.detach())
        loss = naive_isda(features, labels, before[weight], before[bias], variance, strength)
        gradients = torch.autograd.grad(loss, list(before.values()), create_graph=True)
        rate, after = self.optimizer.param_groups[0]["lr"], {}
        for (name, value), gradient in zip(before.items(), gradients, strict=True):
            buffer = self.optimizer.state[own[name]].get("momentum_buffer")
            step = gradient if buffer is None else self.momentum * buffer.detach() + gradient
            after[name] = value.detach() - rate * step
        # the step of CovNet
        meta_features = self.features(pseudo_net, after, meta_images)
        self.meta_optimizer.zero_grad()
        F.cross_entropy(meta_features @ after[weight].T + after[bias], meta_labels).backward()
        self.meta_optimizer.step()
        # the real step
        features = self.features(self.model, own, images)
        self.optimizer.zero_grad()
        naive_isda(features, labels, own[weight], own[bias], self.covnet(features), strength).backward()
        self.optimizer.step()
