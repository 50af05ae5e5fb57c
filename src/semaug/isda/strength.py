"""The strength λ during training: the paper's schedule, or the automatic strength.

The paper's λ grows with training, ``λ_t = (t/T)^α · λ0``, and λ0 has to be guessed: good values lie between 3 and 80,
depending on network, data and length of training. :class:`AutoStrength` needs no guess. It chooses λ such that
augmentation raises the loss by a share of the distance from the cross-entropy CE to log C, the loss of a random guess.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from semaug.isda.checks import check_strength
from semaug.isda.covariance import Covariance
from semaug.isda.loss import plain_logits, target_of
from semaug.isda.precision import LARGEST_STRENGTH, LARGEST_TERM, WideBuffers
from semaug.util import distributed

StrengthOption = Literal["auto"] | float
"""``"auto"``, or λ0 of the paper's schedule."""
SHARE = 0.2
"""How far λ raises the loss at the end of training, as a share of the way from the cross-entropy to log C."""
RATE = 0.1  # share of the way to the solution that λ takes in one update
NEWTON_STEPS = 2  # from the present λ, which is near the solution


def strength(step: float, total: float, maximum: float = 10.0, power: float = 1.0) -> float:
    """Compute ``λ_t = (t/T)^α · λ0``: augmentation grows as the features become meaningful.

    Args:
        step: Progress t, from 0 to `total`; usually the epoch.
        total: Length of training T in the same unit, positive.
        maximum: λ0, the strength at the end of training, from 0 to 1e12.
        power: α, at least 0; with 1, λ grows linearly, with 0, it is constant.

    Returns:
        λ at this step.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> import semaug
        >>> semaug.strength(25, 100, maximum=10.0)
        2.5
    """
    if total <= 0 or not 0 <= step <= total:
        raise ValueError(f"strength needs 0 ≤ step ≤ total and total > 0, not step {step} of {total}")
    if not (math.isfinite(power) and power >= 0):
        raise ValueError(f"strength needs a finite power ≥ 0, not {power}")
    check_strength(maximum)
    return float((step / total) ** power * maximum)


class Strength(WideBuffers, ABC):
    """λ during training: a number on the training device, which the host need not read.

    Attributes:
        value: λ, a scalar of type fp64. It is a buffer, and thus part of the state dict.
    """

    value: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value, dtype=torch.float64))

    @abstractmethod
    def set_progress(self, progress: float) -> None:
        """Set the progress of training.

        Args:
            progress: From 0 at the start of training to 1 at its end.

        Raises:
            ValueError: If it is outside this range.
        """

    def check_ready(self) -> None:
        """Raise `ValueError` if λ needs the progress of training and it was never set."""

    def observe(
        self,
        features: Tensor,
        labels: Tensor,
        head: tuple[Tensor, Tensor | None],
        covariance: Covariance,
        share: float = 1.0,
        label_smoothing: float = 0.0,
    ) -> None:
        """Observe a micro-batch whose loss was computed with the present λ; by default this has no effect.

        Args:
            features: Features (N, D).
            labels: Class indices (N,), or probabilities (N, C).
            head: Weight (C, D) and bias (C,).
            covariance: Σ of the samples.
            share: Its share of the batch of all ranks.
            label_smoothing: Label smoothing of the loss.
        """

    def solve(self) -> Tensor | None:
        """Choose λ for the next batch from the micro-batches observed, but do not change it yet.

        Returns:
            What :meth:`update` will move λ towards; None if λ does not depend on the batch.
        """
        return None

    def update(self) -> None:
        """Update λ from the micro-batches observed since the last call; by default it does not change."""

    def discard(self) -> None:
        """Forget the micro-batches observed since the last update, of a step that was not taken."""


class Schedule(Strength):
    """The paper's schedule, ``λ = progress^α · λ0``. Before the first call of :meth:`set_progress` λ is λ0.

    Args:
        maximum: λ0, from 0 to 1e12.
        power: α, at least 0.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, maximum: float, power: float = 1.0) -> None:
        super().__init__(strength(1, 1, maximum, power))
        self.maximum, self.power = maximum, power

    def set_progress(self, progress: float) -> None:
        """Set λ; see :meth:`Strength.set_progress`."""
        self.value.fill_(strength(progress, 1, self.maximum, self.power))


class AutoStrength(Strength):
    """The automatic strength: augmentation raises the loss by a share of its distance to the loss of a random guess.

    The cross-entropy CE of a batch is ``log C − CE`` below that of a random guess among C classes. The ISDA loss of
    the batch grows with λ, from CE at λ = 0, and is convex in λ. After each batch, Newton's method finds the λ at
    which the loss of that batch would be ``CE + share · progress · (log C − CE)``, and λ moves a tenth of the way
    there. A network at chance is not augmented; one that fits its images ends with the loss ``share · log C``. Only
    the logits and the terms that Σ adds to them enter, so the scale of features, head and Σ has no influence. All this
    holds for soft labels and label smoothing too; there CE is at least the entropy of the label. Weights of images and
    classes do not enter: the loss meant here is the unweighted one.

    λ and all that it is computed from stay on the training device. Ranks agree, since they sum what enters.

    Args:
        share: The share at the end of training.

    Raises:
        ValueError: If `share` is not positive.

    Examples:
        >>> import semaug, torch
        >>> strength, head = semaug.AutoStrength(), (torch.eye(2), None)
        >>> strength.set_progress(1.0)  # the end of training
        >>> features, labels = torch.tensor([[20.0, 0.0]]), torch.tensor([0])
        >>> for _ in range(100):
        ...     strength.observe(features, labels, head, semaug.Diagonal(torch.ones(1, 2)))
        ...     strength.update()
        >>> semaug.isda_loss(features, labels, *head, semaug.Diagonal(torch.ones(1, 2)), strength.value)  # 0.2 log 2
        tensor(0.1386)
    """

    progress: Tensor

    def __init__(self, share: float = SHARE) -> None:
        super().__init__(0.0)
        if not (math.isfinite(share) and share > 0):
            raise ValueError(f"share must be a positive number, not {share}")
        self.share = share
        self.register_buffer("progress", torch.zeros((), dtype=torch.float64))
        self._batch: list[tuple[Tensor, Tensor, float]] = []
        self._solution: Tensor | None = None
        self._started = False

    def set_progress(self, progress: float) -> None:
        """Set the progress, by which the share is multiplied; see :meth:`Strength.set_progress`."""
        if not 0 <= progress <= 1:
            raise ValueError(f"progress must lie between 0 and 1, not {progress}")
        self.progress.fill_(progress)
        self._started = True

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._started = self._started or float(state_dict.get(f"{prefix}progress", 0)) > 0

    def check_ready(self) -> None:
        """Check that the progress was set; see :meth:`Strength.check_ready`."""
        if not self._started:
            raise ValueError("strength='auto' needs set_progress(progress) before the first step, from 0 to 1")

    @torch.no_grad()
    def observe(
        self,
        features: Tensor,
        labels: Tensor,
        head: tuple[Tensor, Tensor | None],
        covariance: Covariance,
        share: float = 1.0,
        label_smoothing: float = 0.0,
    ) -> None:
        """Compute logits and added terms of a micro-batch.

        Args:
            features, labels, head, covariance, share, label_smoothing: As in :meth:`Strength.observe`.

        Raises:
            ValueError: If the micro-batch is empty.
        """
        if not len(labels):
            raise ValueError("the micro-batch is empty: the strength needs at least one sample")
        target = target_of(labels, head[0], label_smoothing)
        logits = plain_logits(features, *head)
        # For a soft label that has one class, the term of that class is 0 up to rounding: not less, or the bound of λ
        # would be that of a falling loss.
        added = (covariance.quadratic(head[0], target) / 2).clamp(0, LARGEST_TERM)
        if target.is_floating_point():
            logits = logits - (target * logits).sum(1, keepdim=True)
        else:
            logits = logits - logits.gather(1, target[:, None])
        self._batch.append((logits, added, share / len(labels)))

    @torch.no_grad()
    def solve(self) -> Tensor:
        """Solve for the λ at which augmentation takes its share of the observed batch; see :meth:`Strength.solve`."""
        logits, added = (torch.cat(parts) for parts in list(zip(*self._batch, strict=True))[:2])
        weights = torch.cat([torch.full_like(part[:, 0], share) for part, _, share in self._batch])
        self._batch.clear()
        share, start = (value.to(logits.dtype) for value in (self.share * self.progress, self.value))
        solution = _solve(logits, added, weights, share, start)
        self._solution = solution.to(self.value.dtype).where(solution.isfinite(), self.value)
        return self._solution

    @torch.no_grad()
    def update(self) -> None:
        """Move λ towards the solution for the observed batch; see :meth:`Strength.update`."""
        if self._batch:
            self.solve()
        if self._solution is not None:
            self.value.lerp_(self._solution, RATE)
            self._solution = None

    def discard(self) -> None:
        """Forget the observed batch; see :meth:`Strength.discard`."""
        self._batch.clear()
        self._solution = None


def make_strength(value: StrengthOption, power: float = 1.0) -> Strength:
    """Make the strength that an option describes; `power` is α of the paper's schedule.

    Raises:
        ValueError: If an argument is out of range.
    """
    if isinstance(value, str):
        if value != "auto":
            raise ValueError(f"strength must be a number or 'auto', not {value!r}")
        return AutoStrength()
    return Schedule(value, power)


def _solve(logits: Tensor, added: Tensor, weights: Tensor, share: Tensor, start: Tensor) -> Tensor:
    """The λ ≥ 0 at which the loss ``Σ_i w_i logsumexp_j(l_ij + λ·t_ij)`` is a share of the way from λ = 0 to log C.

    With one rival class per sample in place of the sum over classes, the loss is smaller and linear in λ. That gives an
    upper bound of λ. Newton's method on a convex function approaches the solution from above.

    Args:
        logits: Logits l (N, C), less that of the true class.
        added: What λ = 1 adds to them, t (N, C).
        weights: Weights w (N,) of the samples; their sum over all ranks is 1.
        share: The share of the way, a scalar; if the loss is above log C without λ, λ is 0.
        start: Where to start, a scalar.

    Returns:
        λ, a scalar; not finite if nothing is added to any logit.
    """
    rival = logits.masked_fill(added == 0, -math.inf).argmax(1, keepdim=True)
    of_rival = (part.gather(1, rival)[:, 0] for part in (logits, added))
    plain, level, slope = _sums(weights, logits.logsumexp(1), *of_rival)
    goal = plain + share * (math.log(logits.shape[1]) - plain).clamp_min(0)
    bound = ((goal - level) / slope).clamp(0, LARGEST_STRENGTH)  # NaN or the limit if nothing is added
    value = torch.minimum(start, bound)
    for _ in range(NEWTON_STEPS):
        augmented = torch.addcmul(logits, added, value)
        shares = augmented.log_softmax(1)
        level, slope = _sums(weights, augmented[:, 0] - shares[:, 0], (shares.exp() * added).sum(1))
        value = torch.minimum((value + (goal - level) / slope).clamp_min(0), bound)
    return value / (slope > 0)


def _sums(weights: Tensor, *values: Tensor) -> list[Tensor]:
    """The weighted sums of values (N,) over the samples of all ranks."""
    return distributed.sum_over_ranks([torch.dot(weights, value) for value in values])
