"""Theorem 1 in numbers: how fast the meta-gradient and the training gradient vanish on a small, smooth problem.

**The claim.** Run Algorithm 1 for T steps with ``α = min(1, k/T)`` and ``β = min(1/L, c/(σ√T))``, where L is the
Lipschitz constant of the gradients and σ² the variance of the meta-gradient over minibatches. Then

1. ``min_{t≤T} E‖∇_{θ_g} L_meta(θ̃(θ_g))‖² ≤ O(1/√T)``, where ``θ̃(θ_g) = θ_f − α ∇_{θ_f} L_train(θ_f; θ_g)``;
2. ``E‖∇_{θ_f} L_train(θ_f; θ_g)‖² → 0``.

**The problem** is the method itself, but small and smooth: features of three overlapping Gaussian classes; θ_f is the
linear head, θ_g a covariance network with tanh, L_train the ISDA loss on minibatches of a training set, L_meta the
cross-entropy on minibatches of another set. No plane separates a class, so L_train has a finite minimiser even for
Σ → 0. The head does not start at W = 0, where the meta-gradient is exactly zero. The meta-gradient is differentiated
through the update, independently of the library's engines. Norms are those of full-batch gradients, E is the mean over
seeds, and the minimum is over evenly spaced t, as many for each T. L and σ are measured at the start.

**The caveat.** θ̃ depends on θ_g through ``α∇L_train`` only. The meta-gradient therefore has the factor α = k/T, and its
square falls as 1/T² even if nothing is learned. ‖∇L_meta‖²/α² shows whether CovNet becomes stationary. There are four
schedules, which agree at the smallest T (except for the control):

- ``theorem``: as stated, with the same L and σ for every T. θ_g moves by at most ``T·β·O(α) = O(1/√T)``;
- ``rescaled``: with the L and σ of the run's own α. They have a factor α too, so β can grow as √T, and the usual
  argument gives ``min_t E‖∇L_meta‖²/α² ≤ O(1/√T)``, the theorem that one would want;
- ``fixed``: α = k/T_min for every T, β = c/(σ√T). The proof does not cover this: its term ``2αρ²/β`` grows as √T;
- ``frozen``: the control, α = k/T and β = 0.

Part 2 cannot hold with α = k/T, whose sum over a run is k. The proof uses ``Σα_t = ∞, Σα_t² < ∞, Σβ_t² < ∞``, so part 2
is measured on one long run with α_t and β_t ~ 1/t.

**What to expect** of ``python -m semaug.studies.theorem theorem.png`` (T = 32 … 2048, 12 seeds; 60 s on one core):
slopes fitted against T, in parentheses those of two other problems, ``gaussian_problem(1)`` and ``(5)``.

| schedule     | min_t E‖∇L_meta‖²    | divided by α²        |
|--------------|----------------------|----------------------|
| ``theorem``  | −1.64 (−2.37, −1.02) | +0.36 (−0.37, +0.98) |
| ``rescaled`` | −2.87 (−2.82, −2.52) | −0.87 (−0.82, −0.52) |
| ``fixed``    | −0.25 (−0.38, −0.09) | −0.25 (−0.38, −0.09) |
| ``frozen``   | −2.17 (−2.35, −2.02) | −0.17 (−0.35, −0.02) |

The theorem's own quantity falls faster than T^−0.5, but so it does with CovNet frozen: α alone makes it fall. With
rescaled steps CovNet does become stationary, at −0.5 or steeper; with few seeds and T ≤ 256 the slope may be flatter.
The training gradient of the long run falls from 0.3 to 3e-4 in 4096 steps, with slope −0.94.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

from semaug.isda.covariance import Covariance, Diagonal
from semaug.isda.loss import isda_loss
from semaug.isda.sources import Source

_Batch = tuple[Tensor, Tensor]  # features (N, D) and class indices (N,)
_Rates = Callable[[int], Tensor]  # α and β of all members at step t, (2, members)
_BATCH = 16  # samples in a minibatch

SCHEDULES = {
    "theorem": "α = k/T, β = c/(σ√T)",
    "rescaled": "α = k/T, β with the run's own σ, L",
    "fixed": "α fixed, β = c/(σ√T)",
    "frozen": "α = k/T, β = 0 (control)",
}


class _SmoothCovNet(Source):
    """``Σ_i = diag(sigmoid(B tanh(A a_i + a_0) + b_0))``: CovNet with tanh instead of ReLU.

    The theorem requires gradients that are Lipschitz continuous in θ_g, which the kinks of ReLU rule out.
    """

    def __init__(self, feature_dim: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(feature_dim, width, dtype=torch.float64)
        self.output = nn.Linear(width, feature_dim, dtype=torch.float64)

    def forward(self, features: Tensor, labels: Tensor) -> Covariance:
        output: Tensor = self.output(self.hidden(features).tanh())
        return Diagonal(output.sigmoid())


@dataclass(frozen=True)
class Problem:
    """The bilevel problem, and one step of Algorithm 1 on it.

    In all methods `head` and `source` are the flat vectors θ_f = (W, b) and θ_g, `alpha` and `beta` the step sizes of
    θ_f and θ_g, and a batch is a pair of features (N, D) and class indices (N,).
    """

    train: _Batch  # the training set
    meta: _Batch  # the meta set
    covnet: Source  # the covariance network; its parameters are not used
    head: Tensor  # θ_f at the start
    source: Tensor  # θ_g at the start
    strength: float  # λ of the ISDA loss

    def head_parameters(self, head: Tensor) -> tuple[Tensor, Tensor]:
        """``W`` (C, D) and ``b`` (C,)."""
        dimension = self.train[0].shape[1]
        classes = head.shape[0] // (dimension + 1)
        return head[: classes * dimension].view(classes, dimension), head[classes * dimension :]

    def source_parameters(self, source: Tensor) -> dict[str, Tensor]:
        """The parameters of CovNet by name."""
        named = dict(self.covnet.named_parameters())
        parts = source.split([parameter.numel() for parameter in named.values()])
        return {name: part.view(named[name].shape) for name, part in zip(named, parts, strict=True)}

    def _train_loss(self, head: Tensor, source: Tensor, batch: _Batch) -> Tensor:
        """``L_train(θ_f; θ_g)``: the ISDA loss with CovNet's Σ."""
        covariance = cast(Covariance, functional_call(self.covnet, self.source_parameters(source), batch))
        return isda_loss(*batch, *self.head_parameters(head), covariance, self.strength, validate=False)

    def meta_loss(self, source: Tensor, head: Tensor, alpha: Tensor, train: _Batch, meta: _Batch) -> Tensor:
        """``L_meta(θ̃(θ_g))`` with ``θ̃ = θ_f − α ∇_{θ_f} L_train(θ_f; θ_g)``, as a function of θ_g.

        Args:
            source: θ_g.
            head: θ_f.
            alpha: Learning rate α.
            train: Batch of the pseudo update.
            meta: Batch of the meta loss.
        """
        pseudo = head - alpha * self._train_gradient(head, source, train)
        return isda_loss(*meta, *self.head_parameters(pseudo), None, validate=False)

    def _train_gradient(self, head: Tensor, source: Tensor, batch: _Batch) -> Tensor:
        """``∇_{θ_f} L_train(θ_f; θ_g)``."""
        return cast(Tensor, grad(self._train_loss)(head, source, batch))

    def meta_gradient(self, head: Tensor, source: Tensor, alpha: Tensor, train: _Batch, meta: _Batch) -> Tensor:
        """``∇_{θ_g} L_meta(θ̃(θ_g))``, differentiated through the pseudo update.

        Args:
            head: θ_f.
            source: θ_g.
            alpha: Learning rate α.
            train: Batch of the pseudo update.
            meta: Batch of the meta loss.
        """
        return cast(Tensor, grad(self.meta_loss)(source, head, alpha, train, meta))

    def step(
        self, head: Tensor, source: Tensor, alpha: Tensor, beta: Tensor, train: _Batch, meta: _Batch
    ) -> tuple[Tensor, Tensor]:
        """One half step of Algorithm 1: meta update of θ_g, then real update of the old θ_f with the new θ_g.

        Args:
            head: θ_f.
            source: θ_g.
            alpha: Learning rate of f.
            beta: Learning rate of g.
            train: Batch that f is trained on.
            meta: Batch of the meta loss.
        """
        source = source - beta * self.meta_gradient(head, source, alpha, train, meta)
        return head - alpha * self._train_gradient(head, source, train), source

    def constants(self, alpha: float, generator: torch.Generator) -> tuple[float, float]:
        """L and σ of θ_g ↦ L_meta(θ̃(θ_g)) at the start: the Hessian's norm, and the noise of minibatches."""
        rate = torch.tensor(alpha, dtype=torch.float64)
        curvature = hessian(self.meta_loss)(self.source, self.head, rate, self.train, self.meta)

        exact = self.meta_gradient(self.head, self.source, rate, self.train, self.meta)
        batches = self._minibatches(500, generator)
        noise = vmap(self.meta_gradient, (None, None, None, 0, 0))(self.head, self.source, rate, *batches) - exact
        return float(torch.linalg.matrix_norm(curvature, 2)), float(noise.square().sum(1).mean().sqrt())

    def trajectory(self, rates: _Rates, steps: int, generator: torch.Generator) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Follow several runs side by side, each with its own minibatches.

        Args:
            rates: Gives α and β of all runs at a step.
            steps: Number of steps.
            generator: Source of the minibatches.

        Yields:
            ``(t, θ_f, θ_g)`` for t = 0 … steps, with a row for each run.
        """
        members = len(rates(0)[0])
        heads, sources = self.head.repeat(members, 1), self.source.repeat(members, 1)
        yield 0, heads, sources
        for time in range(steps):
            batches = self._minibatches(members, generator)
            heads, sources = vmap(self.step)(heads, sources, *rates(time), *batches)
            yield time + 1, heads, sources

    def squared_meta_gradient(self, heads: Tensor, sources: Tensor, alpha: Tensor) -> Tensor:
        """Compute ``‖∇_{θ_g} L_meta(θ̃(θ_g))‖²`` of each run on all samples.

        Args:
            heads: θ_f, a row for each run.
            sources: θ_g, likewise.
            alpha: α of each run, (members,).

        Returns:
            The squared norms, (members,).
        """
        gradient = vmap(self.meta_gradient, (0, 0, 0, None, None))(heads, sources, alpha, self.train, self.meta)
        return gradient.square().sum(1)

    def squared_train_gradient(self, heads: Tensor, sources: Tensor) -> Tensor:
        """``‖∇_{θ_f} L_train(θ_f; θ_g)‖²`` of each run on all samples, (members,)."""
        return vmap(self._train_gradient, (0, 0, None))(heads, sources, self.train).square().sum(1)

    def _minibatches(self, members: int, generator: torch.Generator) -> list[_Batch]:
        """Uniform minibatches with replacement of both sets, features (members, 16, D) and classes (members, 16)."""
        drawn = []
        for features, labels in (self.train, self.meta):
            rows = torch.randint(len(labels), (members, _BATCH), generator=generator)
            drawn.append((features[rows], labels[rows]))
        return drawn


def gaussian_problem(seed: int = 2) -> Problem:
    """Make three overlapping Gaussian classes whose spread differs between dimensions, and a random start.

    L_train has a finite minimiser for the seeds 1, 2 and 5 of the first six.
    """
    generator = torch.Generator().manual_seed(seed)
    classes, dimension = 3, 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    means = 0.8 * normal(classes, dimension)
    spread = torch.linspace(0.5, 1.6, dimension, dtype=torch.float64)

    def sample(count: int) -> _Batch:
        labels = torch.arange(count) % classes
        return means[labels] + spread * normal(count, dimension), labels

    covnet = _SmoothCovNet(dimension, dimension)
    head = torch.cat([0.5 * normal(classes * dimension), torch.zeros(classes, dtype=torch.float64)])
    source = 0.3 * normal(sum(parameter.numel() for parameter in covnet.parameters()))
    return Problem(sample(60), sample(120), covnet, head, source, strength=2.0)


@dataclass(frozen=True)
class Curve:
    """Results of one schedule, one entry for each T."""

    lengths: list[int]
    alpha: list[float]
    beta: list[float]
    meta: list[float]  # min_t E‖∇L_meta‖²
    train: list[float]  # E‖∇L_train‖² at t = T
    moved: list[float]  # E‖θ_g − its start‖ at t = T

    @property
    def relative(self) -> list[float]:
        """``min_t E‖∇L_meta‖²/α²``."""
        return [value / alpha**2 for value, alpha in zip(self.meta, self.alpha, strict=True)]

    @property
    def slope(self) -> float:
        """Slope of ``log min_t E‖∇L_meta‖²`` against log T."""
        return fitted_slope(self.lengths, self.meta)

    @property
    def relative_slope(self) -> float:
        """Slope of ``log min_t E‖∇L_meta‖²/α²`` against log T."""
        return fitted_slope(self.lengths, self.relative)


@dataclass(frozen=True)
class TheoremResult:
    """Part 1 as a curve for each of :data:`SCHEDULES`, part 2 as E‖∇L_train‖² against t."""

    lipschitz: float
    sigma: float
    curves: dict[str, Curve]
    times: list[int]
    train: list[float]
    decay_start: int  # the step sizes of part 2 fall as 1/t from this t on

    @property
    def train_slope(self) -> float:
        """Slope of ``log E‖∇L_train‖²`` against log t, where the step sizes fall as 1/t."""
        late = [(time, value) for time, value in zip(self.times, self.train, strict=True) if time >= self.decay_start]
        return fitted_slope(*map(list, zip(*late, strict=True)))


def fitted_slope(places: Sequence[float], values: Sequence[float]) -> float:
    """The exponent p of the least-squares fit ``value ∝ place^p`` in logarithms, for positive numbers."""
    return float(np.polyfit(np.log(places), np.log(values), 1)[0])


def measure(
    problem: Problem | None = None,
    shortest: int = 32,
    doublings: int = 6,
    long_run: int = 4096,
    seeds: int = 12,
    scale: float = 16.0,
) -> TheoremResult:
    """Measure both parts of the theorem.

    Args:
        problem: The problem; None for :func:`gaussian_problem`.
        shortest: Smallest T.
        doublings: Runs have T = shortest · 2^i steps, i = 0 … doublings.
        long_run: Steps of the run for part 2.
        seeds: Number of runs to average over.
        scale: The theorem's k; c is the largest value with ``c/(σ√T) ≤ 1/L`` for every T.
    """
    problem = problem or gaussian_problem()
    generator = torch.Generator().manual_seed(0)
    largest = min(1.0, scale / shortest)
    lipschitz, sigma = problem.constants(largest, generator)
    constant = sigma * math.sqrt(shortest) / lipschitz

    points: dict[str, list[tuple[float, ...]]] = {name: [] for name in SCHEDULES}
    for length in (shortest * 2**power for power in range(doublings + 1)):
        alpha = min(1.0, scale / length)
        beta = min(1 / lipschitz, constant / (sigma * math.sqrt(length)))
        own_lipschitz, own_sigma = problem.constants(alpha, generator)
        own_beta = min(1 / own_lipschitz, constant / (own_sigma * math.sqrt(length)))
        pairs = [(alpha, beta), (alpha, own_beta), (largest, beta), (alpha, 0.0)]  # in the order of SCHEDULES
        measured = _run(problem, pairs, length, shortest, seeds, generator)
        for own, pair, *values in zip(points.values(), pairs, *measured, strict=True):
            own.append((length, *pair, *values))
    curves = {name: Curve(*cast(Any, map(list, zip(*own, strict=True)))) for name, own in points.items()}

    start = torch.tensor([largest, 1 / lipschitz], dtype=torch.float64)[:, None].expand(2, seeds)

    def decaying(time: int) -> Tensor:
        return start * shortest / (shortest + time)

    wanted = {round(time) for time in np.geomspace(1, long_run, 1 + 4 * round(math.log2(long_run)))}
    times, train = [], []
    for time, heads, sources in problem.trajectory(decaying, long_run, generator):
        if time in wanted:
            times.append(time)
            train.append(float(problem.squared_train_gradient(heads, sources).mean()))
    return TheoremResult(lipschitz, sigma, curves, times, train, shortest)


def _run(
    problem: Problem,
    pairs: Sequence[tuple[float, float]],
    length: int,
    points: int,
    seeds: int,
    generator: torch.Generator,
) -> tuple[list[float], ...]:
    """Part 1 at one T: ``min_t E‖∇L_meta‖²``, and E‖∇L_train‖² and θ_g's distance at the end, for each (α, β)."""
    rates = torch.tensor(pairs, dtype=torch.float64).repeat_interleave(seeds, 0).T

    def mean_over_seeds(values: Tensor) -> Tensor:
        return values.view(len(pairs), seeds).mean(1)

    smallest = torch.full((len(pairs),), torch.inf, dtype=torch.float64)
    for time, heads, sources in problem.trajectory(lambda _: rates, length, generator):
        if time % (length // points) == 0:
            squared = problem.squared_meta_gradient(heads, sources, rates[0])
            smallest = torch.minimum(smallest, mean_over_seeds(squared))
    train = mean_over_seeds(problem.squared_train_gradient(heads, sources))
    moved = mean_over_seeds((sources - problem.source).norm(dim=1))
    return smallest.tolist(), train.tolist(), moved.tolist()


def summary(result: TheoremResult) -> list[str]:
    """Write the slopes, and the values at the smallest and the largest T, one line for each schedule."""
    lines = []
    for name, curve in result.curves.items():
        values = {"‖∇L_meta‖²": curve.meta, "/α²": curve.relative, "θ_g moved": curve.moved}
        ends = ", ".join(f"{label} {ends[0]:.2g} → {ends[-1]:.2g}" for label, ends in values.items())
        slopes = f"∝ T^{curve.slope:.2f}, divided by α² ∝ T^{curve.relative_slope:.2f}"
        lines.append(f"{name}: min_t E‖∇L_meta‖² {slopes} ({ends}).")
    ends, slope = f"{result.train[0]:.2g} → {result.train[-1]:.2g}", f"{result.train_slope:.2f}"
    lines.append(f"One long run, α_t and β_t ~ 1/t: E‖∇L_train‖² {ends}, late slope {slope}.")
    return lines


def plot(result: TheoremResult, path: str | Path) -> None:
    """Draw both parts of the theorem as a PNG file in logarithmic scales, with fitted slopes in the legend."""
    from semaug.report.canvas import to_png
    from semaug.report.charts import LineChart, Series, lines

    series = []
    for slot, (name, curve) in enumerate(result.curves.items()):
        if name in ("theorem", "fixed"):
            label = f"‖∇L_meta‖², {SCHEDULES[name]}: slope {curve.slope:.2f}"
            series.append(Series(label, slot, curve.meta, curve.lengths))
        if name != "fixed":
            label = f"‖∇L_meta‖²/α², {SCHEDULES[name]}: slope {curve.relative_slope:.2f}"
            series.append(Series(label, slot, curve.relative, curve.lengths, hollow=True))
    lengths = result.curves["theorem"].lengths
    level = 1.5 * max(max(curve.relative) for curve in result.curves.values())
    roots = [level * (length / lengths[0]) ** -0.5 for length in lengths]
    series.append(Series("reference T^(−1/2)", 5, roots, lengths))
    late = [time for time in result.times if time >= result.decay_start]
    level = 2 * result.train[len(result.times) - len(late)]
    label = f"‖∇L_train‖², α_t, β_t ~ 1/t: slope {result.train_slope:.2f} for t ≥ {result.decay_start}"
    train = [
        Series(label, 4, result.train, result.times),
        Series("reference t^(−1/2)", 6, [level * (time / late[0]) ** -0.5 for time in late], late),
    ]
    caption = "minimum over t of the mean over seeds; hollow: divided by α²"
    charts = [
        LineChart("1) Meta-gradient", caption, series, "number of steps T", log_x=True, log_y=True),
        LineChart("2) Training gradient in one long run", "mean over seeds", train, "step t", log_x=True, log_y=True),
    ]
    Path(path).write_bytes(to_png(lines(charts)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = measure()
    print("\n".join(summary(measured)))
    file = sys.argv[1] if len(sys.argv) > 1 else "theorem.png"
    plot(measured, file)
    print(f"plotted to {file}")
