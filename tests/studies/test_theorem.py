"""Theorem 1 in numbers: the slopes, the vanishing training gradient, and the library's step on the same problem."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import hessian
from torch.nn import functional as F
from torch.optim import LBFGS, SGD

import semaug
from semaug.studies.theorem import Problem, TheoremResult, fitted_slope, gaussian_problem, measure, plot, summary


@pytest.fixture(scope="module")
def result() -> TheoremResult:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        return measure(shortest=32, doublings=2, long_run=160, seeds=4)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return gaussian_problem()


@pytest.mark.parametrize("schedule", ["theorem", "rescaled"])
def test_the_smallest_squared_meta_gradient_falls_at_least_as_one_over_the_root_of_the_steps(
    result: TheoremResult, schedule: str
) -> None:
    assert result.curves[schedule].slope <= -0.5


def test_divided_by_alpha_it_falls_too_with_rescaled_steps(result: TheoremResult) -> None:
    assert result.curves["rescaled"].relative_slope < 0  # −0.9 over the range of the full measurement


def test_alpha_alone_makes_it_fall_even_if_nothing_is_learned(result: TheoremResult) -> None:
    frozen = result.curves["frozen"]
    assert frozen.moved == [0.0] * len(frozen.lengths)
    assert frozen.slope <= -1.5
    assert frozen.relative[-1] > 10 * result.curves["rescaled"].relative[-1]


def test_the_covariance_network_moves_less_and_less_under_the_theorems_steps(result: TheoremResult) -> None:
    moved = result.curves["theorem"].moved
    assert moved[0] > 1
    assert moved[-1] < moved[0]
    assert result.curves["rescaled"].moved[-1] > moved[-1]


def test_step_sizes_are_the_theorems(result: TheoremResult) -> None:
    curve = result.curves["theorem"]
    for length, alpha, beta in zip(curve.lengths, curve.alpha, curve.beta, strict=True):
        assert alpha == pytest.approx(16 / length)
        assert beta == pytest.approx(curve.beta[0] * (length / curve.lengths[0]) ** -0.5)
        assert beta <= 1 / result.lipschitz * (1 + 1e-12)


def test_the_training_gradient_vanishes(result: TheoremResult) -> None:
    assert result.train[-1] <= result.train[0] / 10
    assert result.train_slope <= -0.5


def test_a_step_of_the_library_equals_a_step_of_this_module(problem: Problem) -> None:
    alpha, beta = 0.3, 2.0
    count = len(problem.train[1])
    halves = problem.train, (problem.meta[0][:count], problem.meta[1][:count])
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 3, dtype=torch.float64))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), problem.head_parameters(problem.head), strict=True):
            parameter.copy_(value)
    problem.covnet.load_state_dict(problem.source_parameters(problem.source))
    learner = semaug.LearnableAugmentation(
        model,
        SGD(model.parameters(), lr=alpha),
        problem.covnet,
        SGD(problem.covnet.parameters(), lr=beta),
        strength=problem.strength,
        detach_real=True,
    )
    learner.step(torch.cat([half[0] for half in halves]), torch.cat([half[1] for half in halves]))

    rates = torch.tensor(alpha, dtype=torch.float64), torch.tensor(beta, dtype=torch.float64)
    head, source = problem.step(problem.head, problem.source, *rates, *halves)
    head, source = problem.step(head, source, *rates, *reversed(halves))
    assert not torch.allclose(source, problem.source, atol=1e-3)
    for ours, theirs in ((head, model), (source, problem.covnet)):
        library = torch.cat([parameter.detach().flatten() for parameter in theirs.parameters()])
        torch.testing.assert_close(library, ours, rtol=0, atol=1e-10)


def test_the_training_loss_has_a_finite_minimiser(problem: Problem) -> None:
    head = torch.zeros_like(problem.head, requires_grad=True)
    features, labels = problem.train
    optimizer = LBFGS([head], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        weight, bias = problem.head_parameters(head)
        return F.cross_entropy(features @ weight.T + bias, labels)

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    optimizer.step(closure)
    assert head.grad is not None
    assert head.grad.norm() < 1e-5
    assert head.detach().norm() < 10


def test_at_the_start_the_meta_loss_is_curved_and_its_gradient_is_not_zero(problem: Problem) -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    halves = problem.train, problem.meta
    assert problem.meta_gradient(problem.head, problem.source, rate, *halves).norm() > 1e-2
    nothing = problem.meta_gradient(torch.zeros_like(problem.head), problem.source, rate, *halves)
    assert nothing.norm() < 1e-12  # at W = 0 the covariance has no effect on the loss
    curvature = hessian(problem.meta_loss)(problem.source, problem.head, rate, *halves)
    torch.testing.assert_close(curvature, curvature.T)


def test_the_slope_of_a_power_law() -> None:
    assert fitted_slope([1, 2, 4, 8], [3 * place**-0.5 for place in (1, 2, 4, 8)]) == pytest.approx(-0.5)


def test_summary_and_plot(result: TheoremResult, tmp_path: Path) -> None:
    *lines, last = summary(result)
    assert [line.partition(":")[0] for line in lines] == list(result.curves)
    assert last.startswith("One long run")
    plot(result, tmp_path / "theorem.png")
    assert (tmp_path / "theorem.png").stat().st_size > 10_000
