"""Algorithm 1 of the paper: pseudo update, meta update, real update. And the pipelined order of the same updates.

f is the classifier with parameters θ_f, g the covariance network with parameters θ_g. A loaded batch is cut in two
halves. One *half step* on the halves X and X_meta is, in the paper's order:

1. **Pseudo update.** ``θ̃_f(θ_g) = θ_f − α ∇_{θ_f} L_train(X; θ_f, θ_g)``: the step that f's optimiser would take on
   the ISDA loss. Neither f nor its optimiser changes.
2. **Meta update.** One step on θ_g along ``∇_{θ_g} L_meta(X_meta; θ̃_f(θ_g))``, the gradient of the cross-entropy
   after the pseudo update.
3. **Real update.** One step of f's optimiser on ``L_train(X; θ_f, θ_g)`` with the new θ_g.

Then the halves change places. θ_f and X are the same in steps 1 and 3, so one forward pass serves both. A half step is
what the paper calls an iteration, after which it exchanges the halves: "every ten iterations" is ten half steps.

By the chain rule the gradient of step 2 is, with ``v = ∇_θ̃ L_meta`` and the direction ``d = (∂θ̃_f/∂∇L_train) ⊙ v``,

    ``∇_{θ_g} L_meta = ∂/∂θ_g ⟨∇_{θ_f} L_train(X; θ_f, θ_g), d⟩``.

The *pipelined* order takes the real update first. The parameters after it are the pseudo-updated ones, and the next
half batch, whose forward pass at these parameters is needed anyway, serves as the meta batch. CovNet lags by one half
step, and each half batch goes forward once instead of twice.

This module holds the algorithm alone. Passes, precision, micro-batches and sums over ranks are the executor's.
"""

from typing import Literal

import torch
from torch import Tensor

from semaug.isda.strength import Strength
from semaug.meta.diagnostics import Metrics
from semaug.meta.executor import Executor
from semaug.meta.sensitivity import clipped, direction_of, pseudo_step
from semaug.meta.updates import HalfBatch, MetaLoss, Update

Order = Literal["paper", "pipelined"]


class Algorithm1:
    """Half steps on f and g.

    Args:
        executor: Computes losses and gradients, and applies the optimisers' steps.
        order: ``"paper"`` or ``"pipelined"``.
        interval: The pseudo and meta updates run in one of `interval` half steps.
        detach_real: Whether Σ is a constant in the real update. The authors' code lets its gradient flow into the
            features.
        strength: λ during training.
    """

    def __init__(self, executor: Executor, order: Order, interval: int, detach_real: bool, strength: Strength) -> None:
        self.executor, self.optimizer = executor, executor.optimizer
        self.order, self.interval, self.detach_real, self.strength = order, interval, detach_real, strength
        self.half_steps = 0
        self.last_real: Update | None = None  # pipelined: the real update that the next meta update goes through

    def half_step(self, batch: HalfBatch, meta_batch: HalfBatch) -> Metrics:
        """Take one half step.

        Args:
            batch: The half batch X that f is trained on.
            meta_batch: The half batch X_meta; the pipelined order does not need it.

        Returns:
            The diagnostics of the half step.
        """
        self.executor.passes.record = self.is_differentiated()
        self.optimizer.zero_grad(set_to_none=True)  # frees the old gradients before two graphs are held
        metrics = self.paper_order(batch, meta_batch) if self.order == "paper" else self.pipelined_order(batch)
        self.half_steps += 1
        return metrics

    def paper_order(self, batch: HalfBatch, meta_batch: HalfBatch) -> Metrics:
        """Pseudo update, meta update, real update."""
        metrics: Metrics = {}
        if self.is_differentiated():
            point, pseudo = self.pseudo_update(batch)
            metrics |= self.meta_update(pseudo, self.executor.meta_loss_at(point, meta_batch), detach=True)
        return metrics | self.real_update(batch)

    def pipelined_order(self, batch: HalfBatch) -> Metrics:
        """Meta update through the last real update, then the real update."""
        metrics: Metrics = {}
        if self.last_real is not None:
            metrics |= self.meta_update(self.last_real, self.executor.meta_loss(batch), detach=self.detach_real)
            self.last_real = None
        return metrics | self.real_update(batch)

    def is_differentiated(self, later: int = 0) -> bool:
        """Whether a meta update goes through this half step's update of f, or through that of a later half step.

        With an odd interval first and second halves of batches take turns. With an even one, every second meta update
        is a half step late so that they do.
        """
        ahead = 0 if self.order == "paper" else 1  # the pipelined order does so in the next half step
        turn, place = divmod(self.half_steps + later + ahead, self.interval)
        return self.executor.learns_source and place == (0 if self.interval % 2 else turn % 2)

    def pseudo_update(self, batch: HalfBatch) -> tuple[dict[str, Tensor], Update]:
        """Step 1: the point ``θ̃_f`` to which one step of f's optimiser on the ISDA loss of X takes the late parameters.

        The update that comes with it has the sensitivity of that step.
        """
        late = self.executor.late_parameters()
        gradients, clipping = self.executor.train_gradients(batch, self.strength.value)
        steps = pseudo_step(self.optimizer, list(late.values()), gradients)
        point = {name: value for name, (value, _) in zip(late, steps, strict=True)}
        slopes = dict(zip(late, clipped([slope for _, slope in steps], clipping), strict=True))
        return point, Update(batch, dict(late), slopes, self.strength.value, self.executor.precision)

    def meta_update(self, update: Update, meta_loss: MetaLoss, detach: bool) -> Metrics:
        """Step 2: one step on θ_g along the gradient of the meta loss through an update of f.

        Args:
            update: The pseudo update, or in the pipelined order the last real update.
            meta_loss: L_meta after the update, with its gradient v in the late parameters.
            detach: Whether Σ is a constant in the update, apart from θ_g.

        Returns:
            ``meta_loss`` and ``meta_gradient_norm``.
        """
        direction = direction_of(meta_loss.gradient, update.sensitivity)
        gradients = self.executor.source_gradients(update, direction, meta_loss, detach)
        return self.executor.step_source(gradients, meta_loss)

    def real_update(self, batch: HalfBatch) -> Metrics:
        """Step 3: one step of f's optimiser on the ISDA loss of X with the present θ_g."""
        strength = self.strength.value.clone()  # λ of this update: the backward pass also chooses the next one
        metrics, clipping = self.executor.real_backward(batch, self.strength, self.detach_real)
        if self.order == "pipelined" and self.is_differentiated():
            self.last_real = self._differentiable(batch, clipping, strength)
        if not self.executor.step_network():  # fp16 overflowed: the step may have been skipped
            self.last_real = None
        return metrics

    def _differentiable(self, batch: HalfBatch, clipping: Tensor | float, strength: Tensor) -> Update:
        """The real update before it is applied, with copies of the values that it will overwrite."""
        late = self.executor.late_parameters()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in late.values()]
        slopes = [slope for _, slope in pseudo_step(self.optimizer, list(late.values()), gradients, move=False)]
        return Update(
            batch,
            {name: parameter.detach().clone() for name, parameter in late.items()},
            dict(zip(late, clipped(slopes, clipping), strict=True)),
            strength,
            self.executor.precision,
        )


class JointTraining(Algorithm1):
    """The ablation without a meta loop: f and g take one step on the same loss, which drives Σ to 0 (eq. 4)."""

    def half_step(self, batch: HalfBatch, meta_batch: HalfBatch) -> Metrics:
        """Take one step on θ_f and one on θ_g, both on L_train."""
        gradients = self.executor.joint_source_gradients(batch, self.strength.value)
        metrics = self.real_update(batch)
        self.executor.apply_source_gradients(gradients)
        self.half_steps += 1
        return metrics

    def is_differentiated(self, later: int = 0) -> bool:
        """No meta update goes through any update of f."""
        return False
