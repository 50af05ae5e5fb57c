"""Theorem 1 in numbers: how fast the meta-gradient and the training gradient vanish on a small, smooth problem.

**The claim.** Run Algorithm 1 for T steps with ``α = min(1, k/T)`` and ``β = min(1/L, c/(σ√T))``, where L is the
Lipschitz constant of the gradients and σ² the variance that minibatches give to the meta-gradient. Then

1. ``min_{t≤T} E‖∇_{θ_g} L_meta(θ̃(θ_g))‖² ≤ O(1/√T)``, where ``θ̃(θ_g) = θ_f − α ∇_{θ_f} L_train(θ_f; θ_g)``;
2. ``E‖∇_{θ_f} L_train(θ_f; θ_g)‖² → 0``.

**The problem** is the method itself, but small and smooth: features of three overlapping Gaussian classes, drawn once;
θ_f is the linear head, θ_g a covariance network with tanh (:class:`SmoothCovNet`), L_train the ISDA loss on minibatches
of a training set, L_meta the cross-entropy on minibatches of another set. No class can be cut off by a plane, so that
L_train has a finite minimiser even where Σ → 0 (true of data seeds 1, 2 and 5 of the first six; 2 is the default). The
head must not start at W = 0, where Σ does not touch the loss and the meta-gradient is exactly zero. The meta-gradient
is found by plainly differentiating through the update, which makes it a check of the library's engines too. Norms are
those of full-batch gradients, E is the mean over seeds of the minibatches (same start), and the minimum is taken over
evenly spaced t, as many for each T. L and σ are measured at the start.

**The caveat.** θ̃ depends on θ_g through ``α∇L_train`` only, so the meta-gradient carries the factor α = k/T and its
square falls as 1/T² even if nothing is learned. ‖∇L_meta‖²/α² is what tells whether CovNet becomes stationary. So there
are four schedules, which agree at the smallest T (except for the control):

- ``theorem``: as stated, L and σ the same for every T. θ_g moves at most ``T·β·O(α) = O(1/√T)``;
- ``rescaled``: as stated, but with the L and σ of the run's own α. They carry a factor α too, so β can grow as √T, and
  ``αβ ~ 1/√T`` is a proper step size for the objective divided by α. Then the usual argument (θ_f moves by O(k) in all,
  so this objective drifts by O(1)) gives ``min_t E‖∇L_meta‖²/α² ≤ O(1/√T)``, the theorem that one would want;
- ``fixed``: α = k/T_min for every T, β = c/(σ√T). The proof says nothing here: its first term ``2αρ²/β`` grows as √T;
- ``frozen``: the control, α = k/T and β = 0.

Nor can part 2 hold with part 1's α = k/T, whose sum over a run is k: for T → ∞ the head follows the gradient flow for
a time k and no longer (which on this problem leaves a squared training gradient of 2e-6, for whatever T). The proof
uses ``Σα_t = ∞, Σα_t² < ∞, Σβ_t² < ∞``, so part 2 is measured on a single long run with α_t and β_t ~ 1/t. (It also
uses Σβ_t < ∞, which 1/t breaks; the meta-gradient's own factor α_t makes up for that, ``Σα_tβ_t < ∞``.)

**What to expect** of ``python -m semaug.studies.theorem theorem.png`` (T = 32 … 2048, 12 seeds; 60 s on one core),
fitted slopes against T, and the same on two other problems, ``gaussian_problem(1)`` and ``(5)``:

| schedule     | min_t E‖∇L_meta‖² | divided by α² | other problems | divided by α² |
|--------------|-------------------|---------------|----------------|---------------|
| ``theorem``  | −1.64             | +0.36         | −2.37, −1.02   | −0.37, +0.98  |
| ``rescaled`` | −2.87             | −0.87         | −2.82, −2.52   | −0.82, −0.52  |
| ``fixed``    | −0.25             | −0.25         | −0.38, −0.09   | −0.38, −0.09  |
| ``frozen``   | −2.17             | −0.17         | −2.35, −2.02   | −0.35, −0.02  |

The theorem's own quantity falls faster than T^−0.5, but so it does with CovNet frozen: it is α that falls. Divided by
α, it tends to the level of the control from wherever it begins, because under the theorem's steps CovNet moves less and
less (by 4.3 at T = 32, by 1.7 at T = 2048). With the steps rescaled, CovNet does become stationary, at −0.5 or steeper;
this slope is that of the whole range, and with few seeds and T ≤ 256 it may come out flatter. With α fixed it does not
at that rate: slopes from −0.4 to −0.1. (The control's own slope is that of the minibatch noise in θ_f, which falls with
α: with full training batches it is −0.05 to −0.03.) The training gradient of the long run falls from 0.3 to 3e-4 in
4096 steps, with a slope of −0.94.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

from semaug.isda.covariance import Covariance, Diagonal
from semaug.isda.loss import isda_loss
from semaug.isda.sources import Source

Batch = tuple[Tensor, Tensor]
"""Features (N, D) and class indices (N,)."""

SCHEDULES = {
    "theorem": "α = k/T, β = c/(σ√T)",
    "rescaled": "α = k/T, β with the run's own σ, L",
    "fixed": "α fixed, β = c/(σ√T)",
    "frozen": "α = k/T, β = 0 (control)",
}


class SmoothCovNet(Source):
    """``Σ_i = diag(sigmoid(B tanh(A a_i + a_0) + b_0))``: CovNet with tanh for ReLU.

    The theorem wants gradients that are Lipschitz continuous in θ_g, which ReLU's kinks rule out. (They are so on
    bounded sets only, as for any network of two layers, and so is ISDA's term, quadratic in W.)
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
    """The bilevel problem; θ_f = (W, b) and θ_g are flat vectors, ``head`` and ``source`` those at the start."""

    train: Batch
    meta: Batch
    covnet: Source
    head: Tensor
    source: Tensor
    strength: float

    def head_parameters(self, head: Tensor) -> tuple[Tensor, Tensor]:
        """``W`` (C, D) and ``b`` (C,) of a flat θ_f."""
        dimension = self.train[0].shape[1]
        classes = head.shape[0] // (dimension + 1)
        return head[: classes * dimension].view(classes, dimension), head[classes * dimension :]

    def source_parameters(self, source: Tensor) -> dict[str, Tensor]:
        """The named parameters of CovNet in a flat θ_g."""
        named = dict(self.covnet.named_parameters())
        parts = source.split([parameter.numel() for parameter in named.values()])
        return {name: part.view(named[name].shape) for name, part in zip(named, parts, strict=True)}

    def train_loss(self, head: Tensor, source: Tensor, batch: Batch) -> Tensor:
        """``L_train(θ_f; θ_g)``: the ISDA loss with CovNet's Σ."""
        covariance = cast(Covariance, functional_call(self.covnet, self.source_parameters(source), batch))
        return isda_loss(*batch, *self.head_parameters(head), covariance, self.strength, validate=False)

    def meta_loss(self, source: Tensor, head: Tensor, alpha: Tensor, train: Batch, meta: Batch) -> Tensor:
        """``L_meta(θ̃(θ_g))`` with ``θ̃ = θ_f − α ∇_{θ_f} L_train(θ_f; θ_g)``, as a function of θ_g."""
        pseudo = head - alpha * self.train_gradient(head, source, train)
        return isda_loss(*meta, *self.head_parameters(pseudo), None, validate=False)

    def train_gradient(self, head: Tensor, source: Tensor, batch: Batch) -> Tensor:
        """``∇_{θ_f} L_train(θ_f; θ_g)``"""
        return cast(Tensor, grad(self.train_loss)(head, source, batch))

    def meta_gradient(self, head: Tensor, source: Tensor, alpha: Tensor, train: Batch, meta: Batch) -> Tensor:
        """``∇_{θ_g} L_meta(θ̃(θ_g))``, differentiated through the pseudo update."""
        return cast(Tensor, grad(self.meta_loss)(source, head, alpha, train, meta))

    def step(
        self, head: Tensor, source: Tensor, alpha: Tensor, beta: Tensor, train: Batch, meta: Batch
    ) -> tuple[Tensor, Tensor]:
        """One half step of Algorithm 1: meta update of θ_g, then real update of the old θ_f with the new θ_g."""
        source = source - beta * self.meta_gradient(head, source, alpha, train, meta)
        return head - alpha * self.train_gradient(head, source, train), source

    def constants(self, alpha: float, batch: int, generator: torch.Generator) -> tuple[float, float]:
        """L and σ of θ_g ↦ L_meta(θ̃(θ_g)) at the start: the Hessian's norm, and the noise of `batch` samples."""
        rate = torch.tensor(alpha, dtype=torch.float64)
        curvature = hessian(self.meta_loss)(self.source, self.head, rate, self.train, self.meta)

        def deviation(train_index: Tensor, meta_index: Tensor) -> Tensor:
            halves = _rows(self.train, train_index), _rows(self.meta, meta_index)
            return self.meta_gradient(self.head, self.source, rate, *halves) - exact

        exact = self.meta_gradient(self.head, self.source, rate, self.train, self.meta)
        noise = vmap(deviation)(*self.draw(500, batch, generator))
        return float(torch.linalg.matrix_norm(curvature, 2)), float(noise.square().sum(1).mean().sqrt())

    def draw(self, members: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Indices of uniform minibatches, with replacement, of the training and of the meta set, (members, batch)."""
        sizes = len(self.train[1]), len(self.meta[1])
        first, second = (torch.randint(size, (members, batch), generator=generator) for size in sizes)
        return first, second


def _rows(batch: Batch, index: Tensor) -> Batch:
    return batch[0][index], batch[1][index]


def gaussian_problem(
    seed: int = 2,
    classes: int = 3,
    dimension: int = 4,
    width: int = 4,
    train_size: int = 60,
    meta_size: int = 120,
    strength: float = 2.0,
) -> Problem:
    """Three overlapping Gaussian classes whose spread differs from dimension to dimension, and a random start."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    means = 0.8 * normal(classes, dimension)
    spread = torch.linspace(0.5, 1.6, dimension, dtype=torch.float64)

    def sample(count: int) -> Batch:
        labels = torch.arange(count) % classes
        return means[labels] + spread * normal(count, dimension), labels

    covnet = SmoothCovNet(dimension, width)
    head = torch.cat([0.5 * normal(classes * dimension), torch.zeros(classes, dtype=torch.float64)])
    source = 0.3 * normal(sum(parameter.numel() for parameter in covnet.parameters()))
    return Problem(sample(train_size), sample(meta_size), covnet, head, source, strength)


Rate = Callable[[int], Tensor]
"""The step sizes of all members at step t = 0, 1, …, shape (members,)."""


def trajectory(
    problem: Problem, alpha: Rate, beta: Rate, steps: int, batch: int, generator: torch.Generator
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Runs of Algorithm 1 side by side, each with minibatches of its own: ``(t, θ_f, θ_g)`` for t = 0 … steps."""

    def half_step(
        head: Tensor, source: Tensor, alpha: Tensor, beta: Tensor, train: Tensor, meta: Tensor
    ) -> tuple[Tensor, Tensor]:
        return problem.step(head, source, alpha, beta, _rows(problem.train, train), _rows(problem.meta, meta))

    members = len(alpha(0))
    heads, sources = problem.head.repeat(members, 1), problem.source.repeat(members, 1)
    yield 0, heads, sources
    for time in range(steps):
        indices = problem.draw(members, batch, generator)
        heads, sources = vmap(half_step)(heads, sources, alpha(time), beta(time), *indices)
        yield time + 1, heads, sources


def squared_meta_gradient(problem: Problem, heads: Tensor, sources: Tensor, alpha: Tensor) -> Tensor:
    """``‖∇_{θ_g} L_meta(θ̃(θ_g))‖²`` of each run, on all training and meta samples, (members,)."""
    gradient = vmap(problem.meta_gradient, (0, 0, 0, None, None))(heads, sources, alpha, problem.train, problem.meta)
    return gradient.square().sum(1)


def squared_train_gradient(problem: Problem, heads: Tensor, sources: Tensor) -> Tensor:
    """``‖∇_{θ_f} L_train(θ_f; θ_g)‖²`` of each run, on all training samples, (members,)."""
    gradient = vmap(problem.train_gradient, (0, 0, None))(heads, sources, problem.train)
    return gradient.square().sum(1)


@dataclass(frozen=True)
class Curve:
    """One schedule, one entry per T."""

    lengths: list[int]
    alpha: list[float]
    beta: list[float]
    meta: list[float]  # min_t E‖∇L_meta‖²
    train: list[float]  # E‖∇L_train‖² at t = T
    moved: list[float]  # E‖θ_g − its start‖ at t = T

    @property
    def relative(self) -> list[float]:
        """``min_t E‖∇L_meta‖²/α²``"""
        return [value / alpha**2 for value, alpha in zip(self.meta, self.alpha, strict=True)]

    @property
    def slope(self) -> float:
        """Of ``log min_t E‖∇L_meta‖²`` against log T."""
        return fitted_slope(self.lengths, self.meta)

    @property
    def relative_slope(self) -> float:
        """Of ``log min_t E‖∇L_meta‖²/α²`` against log T."""
        return fitted_slope(self.lengths, self.relative)


@dataclass(frozen=True)
class Result:
    """What :func:`measure` found: part 1 as a curve for each of ``SCHEDULES``, part 2 as E‖∇L_train‖² against t."""

    lipschitz: float
    sigma: float
    curves: dict[str, Curve]
    times: list[int]
    train: list[float]
    decay_start: int  # from this t on, the step sizes of part 2 fall as 1/t

    @property
    def train_slope(self) -> float:
        """Of ``log E‖∇L_train‖²`` against log t, where the step sizes fall as 1/t."""
        late = [index for index, time in enumerate(self.times) if time >= self.decay_start]
        return fitted_slope([self.times[index] for index in late], [self.train[index] for index in late])


def fitted_slope(places: Sequence[float], values: Sequence[float]) -> float:
    """The exponent p of the least-squares fit ``value ∝ place^p`` in logarithms."""
    return float(np.polyfit(np.log(places), np.log(values), 1)[0])


def measure(
    problem: Problem | None = None,
    shortest: int = 32,
    doublings: int = 6,
    long_run: int = 4096,
    seeds: int = 12,
    batch: int = 16,
    scale: float = 16.0,
    seed: int = 0,
) -> Result:
    """Both parts of the theorem: runs of T = shortest · 2^i steps, i = 0 … doublings, and one long run.

    ``scale`` is the theorem's k; c is the largest that keeps ``c/(σ√T) ≤ 1/L`` for every T.
    """
    problem = problem or gaussian_problem()
    generator = torch.Generator().manual_seed(seed)
    largest = min(1.0, scale / shortest)
    lipschitz, sigma = problem.constants(largest, batch, generator)
    constant = sigma * math.sqrt(shortest) / lipschitz

    curves = {name: Curve([], [], [], [], [], []) for name in SCHEDULES}
    for length in (shortest * 2**power for power in range(doublings + 1)):
        alpha = min(1.0, scale / length)
        beta = min(1 / lipschitz, constant / (sigma * math.sqrt(length)))
        own_lipschitz, own_sigma = problem.constants(alpha, batch, generator)
        own_beta = min(1 / own_lipschitz, constant / (own_sigma * math.sqrt(length)))
        rates = {
            "theorem": (alpha, beta),
            "rescaled": (alpha, own_beta),
            "fixed": (largest, beta),
            "frozen": (alpha, 0.0),
        }
        pairs = [rates[name] for name in curves]
        for name, *values in zip(curves, *_run(problem, pairs, length, shortest, seeds, batch, generator), strict=True):
            curve = curves[name]
            fields = (curve.lengths, curve.alpha, curve.beta, curve.meta, curve.train, curve.moved)
            for field, value in zip(fields, (length, *rates[name], *values), strict=True):
                cast(list[float], field).append(value)

    times, train = _long_run(problem, (largest, 1 / lipschitz), shortest, long_run, seeds, batch, generator)
    return Result(lipschitz, sigma, curves, times, train, shortest)


def _run(
    problem: Problem,
    rates: Sequence[tuple[float, float]],
    length: int,
    points: int,
    seeds: int,
    batch: int,
    generator: torch.Generator,
) -> tuple[list[float], list[float], list[float]]:
    """Part 1 at one T: ``min_t E‖∇L_meta‖²``, then E‖∇L_train‖² and θ_g's way at the end, for each pair of rates."""
    alpha, beta = torch.tensor(rates, dtype=torch.float64).repeat_interleave(seeds, 0).T

    def mean_over_seeds(values: Tensor) -> Tensor:
        return values.view(len(rates), seeds).mean(1)

    smallest = torch.full((len(rates),), torch.inf, dtype=torch.float64)
    for time, heads, sources in trajectory(problem, lambda _: alpha, lambda _: beta, length, batch, generator):
        if time % (length // points) == 0:
            squared = squared_meta_gradient(problem, heads, sources, alpha)
            smallest = torch.minimum(smallest, mean_over_seeds(squared))
    train = mean_over_seeds(squared_train_gradient(problem, heads, sources))
    moved = mean_over_seeds((sources - problem.source).norm(dim=1))
    return smallest.tolist(), train.tolist(), moved.tolist()


def _long_run(
    problem: Problem,
    rates: tuple[float, float],
    delay: int,
    length: int,
    seeds: int,
    batch: int,
    generator: torch.Generator,
) -> tuple[list[int], list[float]]:
    """Part 2: t and E‖∇L_train‖² at geometric t, with ``α_t, β_t = rates · delay/(delay + t)``."""

    def decaying(rate: float) -> Rate:
        return lambda time: torch.full((seeds,), rate * delay / (delay + time), dtype=torch.float64)

    wanted = {round(time) for time in np.geomspace(1, length, 1 + 4 * round(math.log2(length)))}
    alpha, beta = decaying(rates[0]), decaying(rates[1])
    times, train = [], []
    for time, heads, sources in trajectory(problem, alpha, beta, length, batch, generator):
        if time in wanted:
            times.append(time)
            train.append(float(squared_train_gradient(problem, heads, sources).mean()))
    return times, train


def table(result: Result) -> str:
    """The slopes, and what the ends of the range of T look like."""
    lines = [f"at the start: L = {result.lipschitz:.3g}, σ = {result.sigma:.3g}"]
    lines.append(f"{'schedule':10}{'slope':>8}{'slope/α²':>10}   from the smallest to the largest T:")
    for name, curve in result.curves.items():
        ends = ", ".join(
            f"{label} {values[0]:.2g} → {values[-1]:.2g}"
            for label, values in (
                ("min‖∇L_meta‖²", curve.meta),
                ("/α²", curve.relative),
                ("train", curve.train),
                ("θ_g moved", curve.moved),
            )
        )
        lines.append(f"{name:10}{curve.slope:8.2f}{curve.relative_slope:10.2f}   {ends}")
    ends = f"{result.train[0]:.2g} at t = {result.times[0]} → {result.train[-1]:.2g} at t = {result.times[-1]}"
    lines.append(f"long run, α_t and β_t ~ 1/t: E‖∇L_train‖² {ends}, late slope {result.train_slope:.2f}")
    return "\n".join(lines)


def plot(result: Result, path: str | Path) -> None:
    """Draw both parts of the theorem, log-log, with fitted slopes in the legend.

    Args:
        result: What was measured.
        path: The PNG file to write.
    """
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


def main(arguments: Sequence[str]) -> None:
    """Measure, print the table, and plot to the path given as the only argument."""
    torch.set_num_threads(1)
    result = measure()
    print(table(result))
    path = arguments[0] if arguments else "theorem.png"
    plot(result, path)
    print(f"plotted to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
