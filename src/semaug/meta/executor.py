"""Losses and gradients of a half step, over micro-batches, ranks and precisions.

:mod:`semaug.meta.algorithm` says what is computed. This module computes it: under autocast and a gradient scaler, in
micro-batches that save memory, and with sums over all ranks, such that several processes do what one would do on the
whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from semaug.isda.checks import check_covariance
from semaug.isda.precision import widened
from semaug.isda.sources import Source
from semaug.isda.strength import Strength
from semaug.meta.diagnostics import Diagnostics, Metrics, sample_means
from semaug.meta.gradient import Engine, meta_gradient
from semaug.meta.losses import TrainLoss, meta_loss
from semaug.meta.passes import Passes
from semaug.meta.precision import MixedPrecision
from semaug.meta.problem import TrainProblem, global_norm
from semaug.meta.streams import SideStream
from semaug.meta.updates import HalfBatch, MetaLoss, MicroBatch, Update
from semaug.network.network import Network
from semaug.util import distributed

PseudoUpdate = Literal["global", "local"]


class Executor:
    """Computes the losses and gradients of Algorithm 1 and applies the optimisers' steps.

    Args:
        network: The classifier f.
        source: The source of Σ, g.
        optimizer: Optimiser of f.
        meta_optimizer: Optimiser of g; None if g has no parameters.
        engine: How the meta-gradient is computed.
        pseudo: ``"global"``: pseudo update and meta loss over all ranks; ``"local"``: each rank's own.
        label_smoothing: Label smoothing of L_train.
        class_weights: Weights (C,) of the classes in L_train and L_meta, or None.
        clip_norm: Maximum norm of f's gradient, or None.
        micro_batch: Maximum number of images in one pass, or None for the whole half batch.
        mixed: Precision of the passes, and the gradient scaler.
        check_values: Whether to check features for NaN, for which the host waits.
    """

    def __init__(
        self,
        network: Network,
        source: Source,
        optimizer: Optimizer,
        meta_optimizer: Optimizer | None,
        *,
        engine: Engine,
        pseudo: PseudoUpdate,
        label_smoothing: float,
        class_weights: Tensor | None,
        clip_norm: float | None,
        micro_batch: int | None,
        mixed: MixedPrecision,
        check_values: bool,
    ) -> None:
        self.network, self.source = network, source
        self.optimizer, self.meta_optimizer = optimizer, meta_optimizer
        self.engine, self.local = engine, pseudo == "local"
        self.label_smoothing, self.clip_norm, self.micro_batch = label_smoothing, clip_norm, micro_batch
        self.mixed, self.class_weights = mixed, class_weights
        self.passes = Passes(network, source, mixed, check_values)
        self.source_parameters = [parameter for parameter in source.parameters() if parameter.requires_grad]
        self.diagnostics = Diagnostics(self.source_parameters)
        self.side = SideStream(network.head.weight.device)

    # -- half batches -------------------------------------------------------------------------------------------------

    def cut(self, images: Tensor, labels: Tensor) -> tuple[HalfBatch, HalfBatch]:
        """Cut a batch in two halves, and each half into micro-batches.

        Every rank has as many micro-batches, since ranks may communicate in each of them. So with a `micro_batch` of 1
        and halves of different sizes some micro-batches have two images.
        """
        halves = list(zip(images.tensor_split(2), labels.tensor_split(2), strict=True))
        sizes_of_ranks = distributed.gather_numbers([len(own) for _, own in halves])
        first, second = (
            self._micro_batches(*half, sizes)
            for half, sizes in zip(halves, zip(*sizes_of_ranks, strict=True), strict=True)
        )
        return first, second

    def _micro_batches(self, images: Tensor, labels: Tensor, sizes: Sequence[int]) -> HalfBatch:
        count, weight = images.shape[0], images.shape[0] / sum(sizes)
        pieces = 1 if self.micro_batch is None else min(-(-max(sizes) // self.micro_batch), *sizes)
        chunks = zip(images.tensor_split(pieces), labels.tensor_split(pieces), strict=True)
        return [MicroBatch(chunk, chunk_labels, len(chunk) / count, weight) for chunk, chunk_labels in chunks]

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> torch.dtype | None:
        """The precision of the backbone's passes; None for that of the parameters."""
        return self.mixed.dtype

    @property
    def learns_source(self) -> bool:
        """Whether the source of Σ has parameters to learn."""
        return bool(self.source_parameters)

    def late_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of f that the optimiser owns and the pseudo update moves, by name."""
        owned = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        return {name: parameter for name, parameter in self.network.late_parameters().items() if parameter in owned}

    def _head(self) -> tuple[Tensor, Tensor | None]:
        return self.network.head_parameters({})

    # -- gradients of f -----------------------------------------------------------------------------------------------

    def train_gradients(self, batch: HalfBatch, strength: Tensor) -> tuple[list[Tensor], Tensor | float]:
        """The gradient of L_train in the late parameters, with Σ a constant in the features."""
        gradients, _ = self._gradients(
            batch, self._detached_train_loss(strength), list(self.late_parameters().values()), self.local
        )
        return gradients, self._clip_(gradients)

    def meta_loss(self, batch: HalfBatch) -> MetaLoss:
        """L_meta, the head's cross-entropy, at the present parameters, by the pass that the real update uses too."""
        late = self.late_parameters()

        def loss(part: MicroBatch) -> Tensor:
            return meta_loss(self.passes.first(part), part.labels, *self._head(), self._image_weights(part))

        gradients, value = self._gradients(batch, loss, list(late.values()))
        return MetaLoss(value, dict(zip(late, gradients, strict=True)))

    @torch.enable_grad()
    def meta_loss_at(self, point: Mapping[str, Tensor], batch: HalfBatch) -> MetaLoss:
        """L_meta at other late parameters. Its graph is freed before this returns."""
        point = {name: parameter.requires_grad_() for name, parameter in point.items()}
        head = self.network.head_parameters(point)
        with ExitStack() as stack:

            def loss(part: MicroBatch) -> Tensor:
                with self.mixed.cast():
                    features = stack.enter_context(self.network.at(point, part.images))
                return meta_loss(features, part.labels, *head, self._image_weights(part))

            gradients, value = self._gradients(batch, loss, list(point.values()), self.local, retain=False)
        return MetaLoss(value, dict(zip(point, gradients, strict=True)), batch[0].weight if self.local else None)

    def real_backward(self, batch: HalfBatch, strength: Strength, detach: bool) -> tuple[Metrics, Tensor | float]:
        """Write the gradient of L_train, with the present θ_g, into the parameters' ``.grad``, and choose the next λ.

        Args:
            batch: The half batch X.
            strength: λ during training.
            detach: Whether Σ is a constant in the features.

        Returns:
            The diagnostics, and the factor by which the gradient was clipped.
        """
        weight, bias = self._head()
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        metrics: Metrics = {}
        solution: Tensor | None = None
        for part in batch:
            features = self.passes.real(part)
            self.passes.count(part, features)
            if part.tape is not None and part.tape.late is not None:
                part.tape.late.release_outputs()  # the backward pass frees them
            train_loss = self._train_loss(part, strength.value, features.detach() if detach else None)
            covariance = train_loss.covariance(features)
            if self.passes.check_values:
                check_covariance(covariance)
            loss = train_loss(features, weight, bias, covariance)
            share = part.share * part.weight
            part.features = widened(features.detach())
            with self.side.fork():  # many small kernels, which the backward pass need not wait for
                strength.observe(part.features, part.labels, (weight, bias), covariance, share, self.label_smoothing)
                means = sample_means(train_loss, part.features, (weight, bias), covariance, loss.detach())
                if part.tape is not None and part.tape.rest is not None:
                    means["rest_loss"] = part.tape.rest.detach()
                sums = {name: share * value.double() + sums.get(name, 0) for name, value in means.items()}
                if part is batch[-1]:
                    solution = strength.solve()
                    metrics = self.diagnostics.summary(sums, widened(weight[:0]).dtype)
            self.mixed.scaled(share * _with_rest(part, loss)).backward(inputs=trained)
            self.side.join(*metrics.values(), *([] if solution is None else [solution]))
            if part.tape is not None:
                part.tape.rest = None
        strength.update()
        distributed.sum_gradients_(trained)
        self.mixed.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        clipping = self._clip_(gradients)
        if self.mixed.scaler is None and gradients:
            metrics["gradient_norm"] = global_norm(gradients)
        return metrics, clipping

    def step_network(self) -> bool:
        """Take one step of f's optimiser."""
        return self.mixed.step(self.optimizer, update=True)

    # -- gradients of g -----------------------------------------------------------------------------------------------

    def source_gradients(
        self, update: Update, direction: Mapping[str, Tensor], meta_loss: MetaLoss, detach: bool
    ) -> list[Tensor]:
        """``∂/∂θ_g ⟨∇L_train, d⟩``: the mixed derivative of L_train in θ_g and along a direction of θ_f.

        Args:
            update: The update of f that the meta loss is differentiated through.
            direction: d, by the names of the late parameters.
            meta_loss: The meta loss, which says how ranks are weighted.
            detach: Whether Σ is a constant in the features, apart from θ_g.

        Returns:
            This rank's part of the gradients in the parameters of the source.
        """
        total: list[Tensor] | None = None
        for part in update.batch:
            assert part.features is not None and part.tape is not None  # noqa: PT018
            features = widened(part.features.detach())
            weight, bias = self.network.head_parameters(update.parameters)
            head = weight.detach(), None if bias is None else bias.detach()
            train_loss = self._train_loss(part, update.strength, features if detach else None)
            problem = TrainProblem(
                self.network,
                part.tape,
                update.parameters,
                features,
                train_loss,
                update.precision,
                partial(train_loss.along, features, head),
                part.share * (part.weight if meta_loss.rank_weight is None else meta_loss.rank_weight),
            )
            total = _sum(total, meta_gradient(problem, direction, self.source_parameters, self.engine))
        return total or []

    def step_source(self, gradients: list[Tensor], meta_loss: MetaLoss) -> Metrics:
        """Take one step of g's optimiser along the meta-gradient, summed over ranks."""
        value = meta_loss.value.detach() * (1.0 if meta_loss.rank_weight is None else meta_loss.rank_weight)
        *gradients, value = distributed.sum_over_ranks([*gradients, value])
        norm = global_norm(gradients)
        self.apply_source_gradients(gradients)
        return {"meta_loss": value, "meta_gradient_norm": norm}

    def joint_source_gradients(self, batch: HalfBatch, strength: Tensor) -> list[Tensor]:
        """The gradient of L_train itself in θ_g, for joint training."""
        if not self.learns_source:
            return []
        return self._gradients(batch, self._detached_train_loss(strength), self.source_parameters)[0]

    def apply_source_gradients(self, gradients: list[Tensor]) -> None:
        """Take one step of g's optimiser along gradients that are already those of all ranks."""
        if self.meta_optimizer is None:
            return
        self.meta_optimizer.zero_grad(set_to_none=True)
        for parameter, gradient in zip(self.source_parameters, gradients, strict=True):
            parameter.grad = _laid_out_like(parameter, self.mixed.scaled(gradient))
        self.mixed.unscale_(self.meta_optimizer)
        self.mixed.step(self.meta_optimizer)

    def _detached_train_loss(self, strength: Tensor) -> Callable[[MicroBatch], Tensor]:
        """L_train of a micro-batch with Σ a constant in the features."""

        def loss(part: MicroBatch) -> Tensor:
            features = self.passes.first(part)
            self.passes.count(part, features)
            return _with_rest(part, self._train_loss(part, strength, features.detach())(features, *self._head()))

        return loss

    def _train_loss(self, part: MicroBatch, strength: Tensor, source_input: Tensor | None) -> TrainLoss:
        weights = self._image_weights(part)
        return TrainLoss(self.source, part.labels, strength, source_input, self.label_smoothing, weights)

    def _image_weights(self, part: MicroBatch) -> Tensor | None:
        """The weights (n,) of a micro-batch's images: those of its mixture times those of its classes."""
        if self.class_weights is None:
            return part.image_weights
        labels, weights = part.labels, self.class_weights
        of_classes = labels.to(weights.dtype) @ weights if labels.is_floating_point() else weights[labels]
        return of_classes if part.image_weights is None else of_classes * part.image_weights

    def _gradients(
        self,
        batch: HalfBatch,
        loss_of: Callable[[MicroBatch], Tensor],
        parameters: Sequence[Tensor],
        local: bool = False,
        retain: bool = True,
    ) -> tuple[list[Tensor], Tensor]:
        """The gradient of a loss over all micro-batches and ranks, and this rank's part of its value.

        With `local` the gradient is that of this rank's half batch alone. Without `retain` the graph is freed.
        """
        total: list[Tensor] | None = None
        value = torch.zeros((), device=self.network.head.weight.device)
        for part in batch:
            loss = part.share * (1.0 if local else part.weight) * loss_of(part)
            scaled = self.mixed.scaled(loss)
            total = _sum(total, torch.autograd.grad(scaled, parameters, retain_graph=retain, materialize_grads=True))
            value = value + loss.detach()
            if not part.is_whole and part.tape is not None:
                part.tape.rest = None  # it belongs to the graph of the late part, which is freed here
        own = total or []
        return self.mixed.unscaled(own if local else distributed.sum_over_ranks(own)), value

    def _clip_(self, gradients: list[Tensor]) -> Tensor | float:
        """Scale gradients in place to a norm of at most `clip_norm`; returns the factor."""
        if self.clip_norm is None:
            return 1.0
        factor = (self.clip_norm / (global_norm(gradients) + 1e-6)).clamp_max(1.0)
        torch._foreach_mul_(gradients, factor)
        return factor


def _with_rest(part: MicroBatch, loss: Tensor) -> Tensor:
    """The head's loss plus, for a composite model, the rest of its loss."""
    return loss if part.tape is None or part.tape.rest is None else loss + part.tape.rest


def _laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the memory layout of its parameter, which fused optimisers need."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _sum(total: list[Tensor] | None, gradients: Sequence[Tensor]) -> list[Tensor]:
    return list(gradients) if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
