"""The meta loop (Algorithm 1): pseudo update, meta update, real update; the paper's order and the pipelined order.

A batch is cut in two halves. One *half step* of the paper's order, on the halves X and X_meta:

1. **pseudo update**: ``θ̃_f = θ_f − α ∇ L_train(θ_f; θ_g)``, the ISDA loss on X; f's optimiser is left as it is;
2. **meta update**: cross-entropy on X_meta at θ̃_f, differentiated through step 1 to CovNet's θ_g: one step on θ_g;
3. **real update**: ISDA loss on X at the old θ_f with the new θ_g: one step on θ_f.

Then the halves change places. θ_f and X are the same in steps 1 and 3, so one forward pass serves both.

The *pipelined* order takes the real update first. Its end is then the pseudo-updated point, and the next half batch,
whose forward pass there has to be made anyway, is the meta batch: CovNet is one half step late, and each half batch
goes forward once instead of twice.

Where torch.distributed runs, each rank has its part of either half (:func:`semaug.util.distributed.shard`). Losses are
weighted by the parts' shares and their gradients summed over ranks wherever an optimiser or a direction comes of them,
so that the ranks, which start equal, stay equal, and do what one process would do on the whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils import _pytree as pytree

from semaug.isda import loss as functional
from semaug.isda.covariance import Covariance, Diagonal
from semaug.isda.precision import full_precision, widened
from semaug.isda.sources import CovNet, Source
from semaug.isda.strength import strength as strength_at
from semaug.meta.gradient import Engine, HeadLoss, HeadLossAlong, TrainProblem, global_norm, meta_gradient
from semaug.meta.sensitivity import pseudo_step, sensitivities
from semaug.network.network import Network, Tape
from semaug.util import distributed

Order = Literal["paper", "pipelined"]
Objective = Literal["loss", "alignment"]
PseudoUpdate = Literal["global", "local"]
Metrics = dict[str, Tensor]


@dataclass
class Part:
    """What goes through the network at once: a half batch, or a micro-batch of it."""

    images: Tensor
    labels: Tensor
    share: float = 1.0  # of the half batch
    weight: float = 1.0  # of this rank's half batch in that of all ranks
    features: Tensor | None = None  # with their graph where the part is the whole half batch
    tape: Tape | None = None
    counted: bool = False  # in the statistics of the source


@dataclass
class Pseudo:
    """The pseudo update: where it takes the late parameters, and how that depends on the gradient of L_train."""

    point: dict[str, Tensor]
    sensitivity: dict[str, Tensor | float]
    gradient: dict[str, Tensor] | None  # of L_train, where the meta objective looks at it


@dataclass
class _RealStep:
    """A real update that the pipelined order differentiates one half step later."""

    parts: list[Part]
    parameters: dict[str, Tensor]  # late ones, before the update
    sensitivity: dict[str, Tensor | float]
    strength: float
    precision: torch.dtype | None  # of its pass, in which it is differentiated, whatever comes after
    gradient: dict[str, Tensor] | None = None


class LearnableAugmentation:
    """Trains a classifier with semantic augmentation whose covariance is learned by the meta loop.

    ``model`` is any classifier with a linear head (or a :class:`~semaug.network.network.Network`, which can also be made of a
    model with several losses), ``optimizer`` any torch optimiser of its parameters, ``source`` where Σ comes from (by
    default the paper's CovNet) and ``meta_optimizer`` an optimiser of the source's parameters (by default SGD at 0.001,
    as in the paper). A source without parameters
    has no meta loop: then this is training with ISDA or with a constant Σ.

    ``strength`` is λ0; :meth:`set_progress` makes λ grow as ``progress^strength_power · λ0``, and without it λ stays
    at λ0. ``frozen_blocks``: the stem and that many blocks keep out of the pseudo update. ``interval``: the meta loop
    runs every that many half steps. ``objective``: CovNet is to lower the meta loss after the step, as in the paper
    (``"loss"``), or to turn the step, at its length, towards where the meta loss falls (``"alignment"``): a larger Σ
    that only makes the same step longer is then worth nothing. ``detach_real``: stop gradients from Σ into the features
    in the real update; the authors' code lets them flow. ``clip_norm`` clips f's gradient, in the pseudo update (over
    the late parameters, its factor taken as constant) and in the real one. ``micro_batch``: at most this many images go
    through the network at once and gradients are summed, for the same half batch in less memory (BatchNorm sees, and
    class-wise statistics take in, one micro-batch after the other). ``autocast``: precision of the backbone, by default
    that of the ``torch.autocast`` around :meth:`step`, if there is one; with ``scaler`` for fp16.
    ``check_values=False`` skips the look at labels and features, for which the host waits.

    Under torch.distributed every rank makes a learner, which starts as rank 0's, and calls ``step`` with its part of
    the batch. ``pseudo="local"``: each rank makes the pseudo update from its own images alone and looks at its own
    meta loss, as in the authors' code; only CovNet's gradient and that of the real update are averaged, which sends
    less. ``sync_batch_norm``: BatchNorm normalises by the images of all ranks; otherwise each rank by its own.

    >>> learner = LearnableAugmentation(model, optimizer, strength=10.0, frozen_blocks=10)      # doctest: +SKIP
    >>> for epoch in range(epochs):                                                             # doctest: +SKIP
    ...     learner.set_progress(epoch / epochs)
    ...     for images, labels in loader:
    ...         metrics = learner.step(images, labels)
    """

    def __init__(
        self,
        model: nn.Module | Network,
        optimizer: Optimizer,
        source: Source | None = None,
        meta_optimizer: Optimizer | None = None,
        *,
        strength: float = 10.0,
        strength_power: float = 1.0,
        frozen_blocks: int = 0,
        interval: int = 1,
        order: Order = "paper",
        engine: Engine = "jvp",
        objective: Objective = "loss",
        detach_real: bool = False,
        label_smoothing: float = 0.0,
        clip_norm: float | None = None,
        micro_batch: int | None = None,
        autocast: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        check_values: bool = True,
        pseudo: PseudoUpdate = "global",
        sync_batch_norm: bool = False,
    ) -> None:
        if order not in ("paper", "pipelined"):
            raise ValueError(f"order must be 'paper' or 'pipelined', not {order!r}")
        if engine not in ("jvp", "double_backward"):
            raise ValueError(f"engine must be 'jvp' or 'double_backward', not {engine!r}")
        if objective not in ("loss", "alignment"):
            raise ValueError(f"objective must be 'loss' or 'alignment', not {objective!r}")
        if pseudo not in ("global", "local"):
            raise ValueError(f"pseudo must be 'global' or 'local', not {pseudo!r}")
        if pseudo == "local" and order == "pipelined":
            raise ValueError("in the pipelined order the real update is the pseudo update: it cannot be a rank's own")
        if pseudo == "local" and sync_batch_norm:
            raise ValueError("a pseudo update of a rank's own does not go with sync_batch_norm")
        for option, value in (("interval", interval), ("micro_batch", 1 if micro_batch is None else micro_batch)):
            if value < 1:
                raise ValueError(f"{option} must be at least 1, not {value}")
        if isinstance(model, Network) and frozen_blocks not in (0, model.frozen_blocks):
            raise ValueError(f"the network given has {model.frozen_blocks} frozen blocks, not {frozen_blocks}")
        if isinstance(model, Network) and sync_batch_norm and not model.sync_batch_norm:
            raise ValueError("the network given has BatchNorm for each rank; give it sync_batch_norm=True")
        if not isinstance(model, Network):
            model = Network(model, frozen_blocks, sync_batch_norm=sync_batch_norm)
        self.network = model
        self.optimizer = optimizer
        weight = self.network.head.weight
        self.source = (source or CovNet(self.network.feature_dim)).to(weight.device)
        for module in (self.network.model, self.source):
            distributed.broadcast_([*module.parameters(), *module.buffers()])
        self._learned = [parameter for parameter in self.source.parameters() if parameter.requires_grad]
        self.meta_optimizer = meta_optimizer or (SGD(self._learned, lr=0.001) if self._learned else None)
        self.max_strength, self.strength_power = strength, strength_power
        self.strength = strength_at(1, 1, strength, strength_power)
        self.interval, self.order, self.engine, self.objective = interval, order, engine, objective
        self.detach_real, self.label_smoothing, self.clip_norm = detach_real, label_smoothing, clip_norm
        self.autocast, self.scaler, self.check_values = autocast, scaler, check_values
        self.micro_batch, self.pseudo = micro_batch, pseudo
        self.half_steps = 0
        self._initial = [parameter.detach().clone() for parameter in self._learned]
        self._last_real: _RealStep | None = None
        self._around: torch.dtype | None = None  # precision of the autocast around the step

    def set_progress(self, progress: float) -> None:
        """Set λ to ``progress^strength_power · λ0``, where ``progress`` goes from 0 to 1 over training."""
        self.strength = strength_at(progress, 1, self.max_strength, self.strength_power)

    def step(
        self, images: Tensor, labels: Tensor, meta_images: Tensor | None = None, meta_labels: Tensor | None = None
    ) -> Metrics:
        """Two half steps on a batch of at least two images; returns the mean of their diagnostics, as tensors.

        Each half is the meta batch of the other one, unless the paper's order is given ``meta_images`` with their
        labels (images that f is not trained on, or the halves changed places and seen otherwise): the first half of
        those is then the meta batch of the first half, and the second of the second.

        ``train_loss`` (ISDA), ``augmentation_share`` (the part of it that augmentation adds), ``accuracy`` on the
        batch, ``variance_mean`` and its spread over samples and dimensions (``variance_std_samples``,
        ``variance_std_dims``), ``drift`` (of the source's parameters from their initialisation, relative) and, where
        the meta loop ran, ``meta_loss`` and ``meta_gradient_norm``. All are those of all ranks together.
        """
        device = images.device.type
        self._around = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if self._precision() == torch.float16 and self._around is not None and self.scaler is None:
            raise ValueError("autocast to fp16 around step() needs scaler=…, the GradScaler; or take bf16")
        with torch.autocast(device, enabled=False):  # it is on where it should be
            return self._step(images, labels, meta_images, meta_labels)

    def _step(self, images: Tensor, labels: Tensor, meta_images: Tensor | None, meta_labels: Tensor | None) -> Metrics:
        self._check(images, labels)
        self.network.prepare(images)
        halves = list(zip(images.tensor_split(2), labels.tensor_split(2), strict=True))
        meta_halves = halves[::-1]
        if meta_images is not None and meta_labels is not None:
            if self.order != "paper":
                raise ValueError("in the pipelined order the next half batch is the meta batch: there is no other one")
            self._check(meta_images, meta_labels)
            middle = [len(meta_images) // 2]  # so that halves that change places stay halves
            meta_halves = list(zip(meta_images.tensor_split(middle), meta_labels.tensor_split(middle), strict=True))
        all_halves = [*halves, *meta_halves]
        sizes = zip(*distributed.gather_numbers([len(labels) for _, labels in all_halves]), strict=True)  # on each rank
        parts = [self._parts(*half, each) for half, each in zip(all_halves, sizes, strict=True)]
        first = self._half_step(parts[0], parts[2])
        second = self._half_step(parts[1], parts[3])
        return {
            name: torch.stack([metrics[name] for metrics in (first, second) if name in metrics]).mean()
            for name in {**first, **second}
        }

    def _check(self, images: Tensor, labels: Tensor) -> None:
        count = images.shape[0]
        if count < 2:
            raise ValueError(f"a batch is cut in two halves and needs at least 2 images, not {count}; use drop_last")
        if labels.shape[0] != count:
            raise ValueError(f"{count} images came with {labels.shape[0]} labels")
        if self.check_values:
            functional.check_labels(labels, self.network.num_classes)

    def _half_step(self, parts: list[Part], meta_parts: list[Part]) -> Metrics:
        self.optimizer.zero_grad(set_to_none=True)  # here, so that old gradients take no room beside two graphs
        metrics = self._paper_order(parts, meta_parts) if self.order == "paper" else self._pipelined_order(parts)
        self.half_steps += 1
        return metrics

    def _paper_order(self, parts: list[Part], meta_parts: list[Part]) -> Metrics:
        metrics: Metrics = {}
        if self._differentiated():
            pseudo = self.pseudo_update(parts)
            metrics |= self.meta_update(parts, pseudo, meta_parts)
        return metrics | self.real_update(parts)

    def _pipelined_order(self, parts: list[Part]) -> Metrics:
        metrics: Metrics = {}
        if self._last_real is not None:
            metrics |= self._late_meta_update(self._last_real, parts)
            self._last_real = None
        return metrics | self.real_update(parts, keep=self._differentiated())

    def _differentiated(self) -> bool:
        """Whether a meta update looks through this half step's pseudo update (or, pipelined, through its real one)."""
        ahead = 0 if self.order == "paper" else 1
        return bool(self._learned) and (self.half_steps + ahead) % self.interval == 0

    # -- the three updates of Algorithm 1 -----------------------------------------------------------------------------

    def pseudo_update(self, parts: list[Part]) -> Pseudo:
        """Where one step of f's optimiser on the ISDA loss takes the late parameters, and its sensitivity."""
        late = self._late_parameters()

        def loss(part: Part, features: Tensor) -> Tensor:
            self._count(part, features)
            return self._train_loss(part.labels, features.detach())(features, *self._head())

        gradients, _ = self._summed_gradients(parts, loss, list(late.values()), self.pseudo == "local")
        factor = self._clip_(gradients)
        steps = pseudo_step(self.optimizer, list(late.values()), gradients)
        return Pseudo(
            {name: point for name, (point, _) in zip(late, steps, strict=True)},
            {name: factor * slope for name, (_, slope) in zip(late, steps, strict=True)},
            self._looked_at(late, gradients),
        )

    def meta_update(self, parts: list[Part], pseudo: Pseudo, meta_parts: list[Part]) -> Metrics:
        """One step on θ_g along the gradient, through the pseudo update, of the cross-entropy on the meta batch."""
        gradient, meta_loss = self._gradient_at(pseudo.point, meta_parts)
        return self._update_source(
            parts,
            self._late_parameters(),
            self._direction(gradient, pseudo.sensitivity, pseudo.gradient),
            meta_loss,
            strength=self.strength,
            precision=self._precision(),
            detach=True,
            own_weight=meta_parts[0].weight if self.pseudo == "local" else None,
        )

    @torch.enable_grad()
    def _gradient_at(self, point: Mapping[str, Tensor], parts: list[Part]) -> tuple[dict[str, Tensor], Tensor]:
        """Gradient and value of the cross-entropy at other late parameters, this rank's part of the value.

        Its graph ends with this call.
        """
        local = self.pseudo == "local"
        point = {name: parameter.requires_grad_() for name, parameter in point.items()}
        total: list[Tensor] | None = None
        value = torch.zeros((), device=self.network.head.weight.device)
        for part in parts:
            with self._autocast():
                features, rest = self.network.forward_at(point, part.images, part.labels)
            loss = self._meta_loss(features, part.labels, *self.network.head_parameters(point))
            loss = part.share * (1.0 if local else part.weight) * (loss if rest is None else loss + rest)
            send = not local and part is parts[-1]
            total = self._add_gradients(total, loss, list(point.values()), send, retain=False)
            value = value + loss.detach()
        return dict(zip(point, self._unscaled(total or []), strict=True)), value

    def _late_meta_update(self, last: _RealStep, parts: list[Part]) -> Metrics:
        """The meta update of the pipelined order: the last real update has been the pseudo update."""
        late = self._late_parameters()

        def loss(part: Part, features: Tensor) -> Tensor:
            return self._meta_loss(features, part.labels, *self._head())

        gradients, meta_loss = self._summed_gradients(parts, loss, list(late.values()))
        gradient = dict(zip(late, gradients, strict=True))
        return self._update_source(
            last.parts,
            last.parameters,
            self._direction(gradient, last.sensitivity, last.gradient),
            meta_loss,
            strength=last.strength,
            precision=last.precision,
            detach=self.detach_real,
        )

    def real_update(self, parts: list[Part], keep: bool = False) -> Metrics:
        """One step of f's optimiser on the ISDA loss with the present θ_g; `keep` it for differentiation."""
        weight, bias = self._head()
        trained = self._trained()
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        for part in parts:
            features = self._real_pass(part)
            self._count(part, features)
            if part.tape is not None and part.tape.late is not None:
                part.tape.late.forget_outputs()  # the graph will not hold them for us any longer
            covariance = self.source(widened(features.detach() if self.detach_real else features), part.labels)
            loss = self._isda(features, part.labels, weight, bias, covariance, self.strength)
            weight_of_part = part.share * part.weight
            with distributed.summing_(trained) if part is parts[-1] else nullcontext():
                self._scaled(weight_of_part * self._with_rest(part, loss)).backward(inputs=trained)
            part.features = widened(features.detach())
            found = self._looked_at_part(part, loss.detach(), covariance)
            if part.tape is not None and part.tape.rest is not None:
                found["rest_loss"] = part.tape.rest.detach()
                part.tape.rest = None
            sums = {name: weight_of_part * value.double() + sums.get(name, 0) for name, value in found.items()}
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        factor = self._clip_(gradients)
        if keep:
            self._keep(parts, factor)
        if self.scaler is None:
            self.optimizer.step()
        else:
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() < scale:  # the step overflowed and was left out: nothing to differentiate
                self._last_real = None
        return self._diagnostics(sums)

    def _keep(self, parts: list[Part], factor: Tensor | float) -> None:
        late = self._late_parameters()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in late.values()]
        slopes = sensitivities(self.optimizer, list(late.values()), gradients)
        self._last_real = _RealStep(
            parts,
            {name: parameter.detach().clone() for name, parameter in late.items()},
            {name: factor * slope for name, slope in zip(late, slopes, strict=True)},
            self.strength,
            self._precision(),
            self._looked_at(late, gradients, copy=True),  # which the optimiser may change
        )

    def _looked_at(
        self, late: Mapping[str, Tensor], gradients: list[Tensor], copy: bool = False
    ) -> dict[str, Tensor] | None:
        if self.objective != "alignment":
            return None
        return {name: g.clone() if copy else g for name, g in zip(late, gradients, strict=True)}

    def _direction(
        self,
        gradient: Mapping[str, Tensor],
        sensitivity: Mapping[str, Tensor | float],
        train_gradient: Mapping[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """What L_train's gradient is to be moved along: the meta loss's `gradient` after the step, seen through it."""
        if train_gradient is not None:
            gradient = _across(gradient, _scaled(train_gradient, sensitivity))
        return _scaled(gradient, sensitivity)

    def _update_source(
        self,
        parts: list[Part],
        parameters: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
        meta_loss: Tensor,
        *,
        strength: float,
        precision: torch.dtype | None,
        detach: bool,
        own_weight: float | None = None,
    ) -> Metrics:
        """One step on θ_g along the mixed derivative of L_train, of `parts` at `parameters`, in θ_g and `direction`.

        What all ranks find is summed; with `own_weight` each has found a whole gradient and meta loss, and they are
        averaged with this weight.
        """
        assert self.meta_optimizer is not None
        total: list[Tensor] | None = None
        for part in parts:
            assert part.features is not None and part.tape is not None  # noqa: PT018
            features = widened(part.features.detach())
            head = [p if p is None else p.detach() for p in self.network.head_parameters(parameters)]
            problem = TrainProblem(
                self.network,
                part.tape,
                dict(parameters),
                features,
                self._train_loss(part.labels, features if detach else None, strength),
                precision,
                self._train_loss_along(part.labels, features, head, strength, detach),
                part.share * (part.weight if own_weight is None else own_weight),
            )
            total = _sum(total, meta_gradient(problem, direction, self._learned, self.engine))
        meta_loss = meta_loss.detach() * (1.0 if own_weight is None else own_weight)
        *gradients, meta_loss = distributed.sum_over_ranks([*(total or []), meta_loss])
        norm = global_norm(gradients)
        self.meta_optimizer.zero_grad(set_to_none=True)
        for parameter, value in zip(self._learned, gradients, strict=True):
            parameter.grad = value if self.scaler is None else self._scaled(value)
        if self.scaler is None:
            self.meta_optimizer.step()
        else:  # the scaler leaves out a step whose gradient overflowed
            self.scaler.unscale_(self.meta_optimizer)
            self.scaler.step(self.meta_optimizer)
        return {"meta_loss": meta_loss, "meta_gradient_norm": norm}

    # -- parts of the updates -----------------------------------------------------------------------------------------

    def _head(self) -> tuple[Tensor, Tensor | None]:
        return self.network.head_parameters({})

    def _trained(self) -> list[Tensor]:
        """What the optimiser moves, in the order of the network where that says what is sent first."""
        owned = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if not distributed.is_running():
            return owned
        place = {parameter: i for i, parameter in enumerate(self.network.model.parameters())}
        return sorted(owned, key=lambda parameter: place.get(parameter, len(place)))

    def _late_parameters(self) -> dict[str, nn.Parameter]:
        owned = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        return {name: parameter for name, parameter in self.network.late_parameters().items() if parameter in owned}

    def _parts(self, images: Tensor, labels: Tensor, sizes: Sequence[int]) -> list[Part]:
        """What goes through the network at once of a half batch that has these sizes on the ranks.

        Every rank has as many parts, since they may talk to each other in each; so with a `micro_batch` of 1 and sizes
        that differ some parts have two images.
        """
        count, weight = images.shape[0], images.shape[0] / sum(sizes)
        pieces = 1 if self.micro_batch is None else min(-(-max(sizes) // self.micro_batch), *sizes)
        chunks = zip(images.tensor_split(pieces), labels.tensor_split(pieces), strict=True)
        return [Part(chunk, chunk_labels, len(chunk) / count, weight) for chunk, chunk_labels in chunks]

    def _first_pass(self, part: Part) -> Tensor:
        """Features with a graph: of a half batch the whole one, which is kept; of a micro-batch the late part's."""
        if part.share == 1.0 and part.features is not None:
            return part.features
        with self._autocast():
            if part.share == 1.0:
                record = self._differentiated()
                features, part.tape = self.network.forward(part.images, part.labels, record)
            else:
                features, part.tape = self.network.forward_late(part.images, part.labels)
        part.features = features if part.share == 1.0 else features.detach()
        if self.check_values:
            functional.check_features(features.detach())
        return features

    def _real_pass(self, part: Part) -> Tensor:
        """Features with the graph of the whole network: those kept, or those of another pass with the same masks."""
        if part.share == 1.0:
            return self._first_pass(part)
        with self._autocast():
            again = part.tape is not None
            if part.tape is not None:
                features, part.tape = self.network.forward_again(part.tape, part.labels)
            else:
                features, part.tape = self.network.forward(part.images, part.labels)
        if self.check_values and not again:
            functional.check_features(features.detach())
        return features

    def _count(self, part: Part, features: Tensor) -> None:
        if not part.counted:
            self.source.update(features.detach(), part.labels)
            part.counted = True

    def _summed_gradients(
        self,
        parts: list[Part],
        loss_of: Callable[[Part, Tensor], Tensor],
        parameters: Sequence[Tensor],
        local: bool = False,
    ) -> tuple[list[Tensor], Tensor]:
        """Gradient of a loss over all parts, each weighted by its share, and this rank's part of its value.

        The gradient is that of all ranks together; if `local`, of this one alone.
        """
        total: list[Tensor] | None = None
        value = torch.zeros((), device=self.network.head.weight.device)
        for part in parts:
            loss = self._with_rest(part, loss_of(part, self._first_pass(part)))
            loss = part.share * (1.0 if local else part.weight) * loss
            total = self._add_gradients(total, loss, parameters, send=not local and part is parts[-1])
            value = value + loss.detach()
            if part.share < 1.0 and part.tape is not None:
                part.tape.rest = None  # its graph is that of the late part, and there will be another
        return self._unscaled(total or []), value

    def _with_rest(self, part: Part, loss: Tensor) -> Tensor:
        """The head's loss and, of a composite model, the rest."""
        return loss if part.tape is None or part.tape.rest is None else loss + part.tape.rest

    def _train_loss(self, labels: Tensor, source_input: Tensor | None, strength: float | None = None) -> HeadLoss:
        """L_train as a function of features and head, with Σ from `source_input` or, if None, from the features."""
        strength = self.strength if strength is None else strength

        def loss(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            covariance = self.source(widened(features if source_input is None else source_input), labels)
            return self._isda(features, labels, weight, bias, covariance, strength)

        return loss

    def _train_loss_along(
        self, labels: Tensor, features: Tensor, head: Sequence[Tensor | None], strength: float, detach: bool
    ) -> HeadLossAlong:
        """The derivative of L_train at `features` and `head` along a direction, in closed form for diagonal Σ."""
        weight, bias = head
        assert weight is not None

        def along(d_features: Tensor, d_weight: Tensor, d_bias: Tensor | None) -> Tensor | None:
            kinds: list[type] = []

            def variance_at(features: Tensor) -> Tensor:
                covariance: Covariance = self.source(features, labels)
                kinds.append(type(covariance))
                return covariance.diagonal()

            d_variance: Tensor | None = None
            if detach:
                variance = variance_at(features)
            else:
                variance, d_variance = torch.func.jvp(variance_at, (features,), (d_features,))[:2]
            if kinds != [Diagonal]:
                return None
            return functional.isda_loss_along(
                features,
                labels,
                weight,
                bias,
                Diagonal(variance),
                strength,
                direction=(d_features, d_weight, d_bias, d_variance),
                label_smoothing=self.label_smoothing,
            )

        return along

    def _isda(
        self,
        features: Tensor,
        labels: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        covariance: Covariance,
        strength: float,
    ) -> Tensor:
        return functional.isda_loss(
            features,
            labels,
            weight,
            bias,
            covariance,
            strength,
            label_smoothing=self.label_smoothing,
            validate=False,
        )

    def _meta_loss(self, features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with full_precision(features):
            return F.cross_entropy(F.linear(widened(features), weight, bias), labels)

    def _precision(self) -> torch.dtype | None:
        return self.autocast or self._around

    def _autocast(self) -> AbstractContextManager[Any]:
        precision = self._precision()
        if precision is None:
            return nullcontext()
        return torch.autocast(self.network.head.weight.device.type, precision)

    def _scaled(self, value: Tensor) -> Tensor:
        return value if self.scaler is None else self.scaler.scale(value)

    def _add_gradients(
        self, total: list[Tensor] | None, loss: Tensor, parameters: Sequence[Tensor], send: bool, retain: bool = True
    ) -> list[Tensor]:
        """The gradient of a loss, as the scaler scales it, added to `total`; if to `send`, the sum over all ranks."""

        def compute() -> Sequence[Tensor]:
            return torch.autograd.grad(self._scaled(loss), parameters, retain_graph=retain, materialize_grads=True)

        return distributed.summed_gradients(compute, parameters, total) if send else _sum(total, list(compute()))

    def _unscaled(self, gradients: list[Tensor]) -> list[Tensor]:
        if self.scaler is None or not gradients:
            return gradients
        return list(torch._foreach_div(gradients, self._scaled(torch.ones((), device=gradients[0].device))))

    def _clip_(self, gradients: list[Tensor]) -> Tensor | float:
        """Scale the gradients in place to a norm of at most ``clip_norm``; returns the factor."""
        if self.clip_norm is None:
            return 1.0
        factor = (self.clip_norm / (global_norm(gradients) + 1e-6)).clamp_max(1.0)
        torch._foreach_mul_(gradients, factor)
        return factor

    @torch.no_grad()
    def _looked_at_part(self, part: Part, loss: Tensor, covariance: Covariance) -> dict[str, Tensor]:
        """Means over the samples of a part, of which the diagnostics are made."""
        assert part.features is not None
        weight, bias = self._head()
        plain = functional.isda_loss(
            part.features, part.labels, weight, bias, None, label_smoothing=self.label_smoothing, validate=False
        )
        logits = functional.augmented_logits(part.features, part.labels, weight, bias, None, validate=False)
        answers = part.labels.argmax(1) if part.labels.is_floating_point() else part.labels
        variance = covariance.diagonal().double()
        return {
            "train_loss": loss,
            "plain_loss": plain,
            "accuracy": (logits.argmax(1) == answers).double().mean(),
            "variance": variance.mean(0),
            "variance_square": variance.square().mean(0),
            "variance_std_dims": variance.std(1, correction=0).mean(),
        }

    @torch.no_grad()
    def _diagnostics(self, means: dict[str, Tensor]) -> Metrics:
        """The diagnostics of the half batch of all ranks, from this rank's part of its means."""
        means = dict(zip(means, distributed.sum_over_ranks(list(means.values())), strict=True))
        plain, variance, square = (means.pop(name) for name in ("plain_loss", "variance", "variance_square"))
        metrics = {
            **means,
            "augmentation_share": 1 - plain / means["train_loss"].clamp_min(1e-12),
            "variance_mean": variance.mean(),
            "variance_std_samples": (square - variance.square()).clamp_min(0).sqrt().mean(),
        }
        if self._learned:
            moved = [parameter - start for parameter, start in zip(self._learned, self._initial, strict=True)]
            metrics["drift"] = global_norm(moved) / global_norm(self._initial)
        dtype = widened(self.network.head.weight[:0]).dtype
        return {name: value.to(dtype) for name, value in metrics.items()}

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is needed, besides the states of model, optimiser and scaler, to go on exactly."""
        last = self._last_real
        return {
            "source": self.source.state_dict(),
            "meta_optimizer": None if self.meta_optimizer is None else self.meta_optimizer.state_dict(),
            "half_steps": self.half_steps,
            "strength": self.strength,
            "initial": self._initial,
            "last_real": None if last is None else {**vars(last), "parts": [_part_state(part) for part in last.parts]},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state that :meth:`state_dict` gave, from whatever device it was saved."""
        self.source.load_state_dict(state["source"])
        if self.meta_optimizer is not None:
            self.meta_optimizer.load_state_dict(state["meta_optimizer"])
        self.half_steps, self.strength = state["half_steps"], state["strength"]
        device = self.network.head.weight.device
        self._initial = [value.to(device) for value in state["initial"]]
        last = pytree.tree_map_only(Tensor, lambda value: _moved(value, device), state["last_real"])
        if last is not None:
            last = {"precision": self.autocast, **last}  # which older states do not say
            last = _RealStep(**{**last, "parts": [Part(**{**p, "tape": Tape(**p["tape"])}) for p in last["parts"]]})
        self._last_real = last


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, except of a state of random numbers, which is bytes and stays."""
    return tensor if tensor.dtype == torch.uint8 else tensor.detach().to(device, copy=True)


def _scaled(gradient: Mapping[str, Tensor], sensitivity: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Each gradient times its sensitivity; at once where these are numbers."""
    slopes = [sensitivity[name] for name in gradient]
    numbers = [slope for slope in slopes if not isinstance(slope, Tensor)]
    if len(numbers) < len(slopes):
        return {name: slope * value for (name, value), slope in zip(gradient.items(), slopes, strict=True)}
    return dict(zip(gradient, torch._foreach_mul(list(gradient.values()), numbers), strict=True))


def _across(gradient: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a gradient that is orthogonal to a step: what is left of its slope when the step keeps its length."""
    ours, theirs = list(gradient.values()), [step[name] for name in gradient]
    along = _total(torch._foreach_mul(ours, theirs)) / _total(torch._foreach_mul(theirs, theirs)).clamp_min(1e-30)
    return dict(zip(gradient, torch._foreach_sub(ours, torch._foreach_mul(theirs, along)), strict=True))


def _total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def _part_state(part: Part) -> dict[str, Any]:
    return {**vars(part), "tape": {**vars(part.tape), "late": None}}


def _sum(total: list[Tensor] | None, gradients: list[Tensor]) -> list[Tensor]:
    """Running sum of gradients."""
    return gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]


class JointAugmentation(LearnableAugmentation):
    """The ablation without a meta loop: f and CovNet take one step on the same ISDA loss.

    Σ only ever raises that loss (eq. 4), so CovNet learns Σ → 0 and the augmentation disappears.
    """

    def _differentiated(self) -> bool:
        return False

    def _half_step(self, parts: list[Part], meta_parts: list[Part]) -> Metrics:
        def loss(part: Part, features: Tensor) -> Tensor:
            self._count(part, features)
            return self._train_loss(part.labels, features.detach())(features, *self._head())

        gradients = self._summed_gradients(parts, loss, self._learned)[0] if self._learned else []
        metrics = self.real_update(parts)
        for parameter, gradient in zip(self._learned, gradients, strict=True):
            parameter.grad = gradient
        if self.meta_optimizer is not None:
            self.meta_optimizer.step()
        self.half_steps += 1
        return metrics
