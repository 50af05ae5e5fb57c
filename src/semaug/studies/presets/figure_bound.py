"""Equations 1 and 2: the loss of M explicit draws, and the ISDA loss that bounds its expectation from above.

**Settings of the paper.** None: the paper derives the bound and measures nothing. Here: the classes and the head of
`semaug.studies.theorem.gaussian_problem`, Σ = 0.5·I, at which CovNet starts, and three strengths.

**The paper's results.** The ISDA loss (eq. 2) is an upper bound of eq. 1 with infinitely many draws.

**Time at full scale.** Seconds on one core. Small scale has fewer repetitions.
"""

from typing import Any

import torch

from semaug.isda.covariance import Diagonal
from semaug.isda.loss import isda_loss, sampled_loss
from semaug.studies.cells import Experiment, Extra
from semaug.studies.scales import Setup

_DRAWS = [4**power for power in range(7)]
_STRENGTHS = (0.5, 2.0, 8.0)


def measure_gap(experiment: Experiment, setup: Setup) -> Extra:
    """Measure how far the loss of M draws lies below the bound: mean and standard deviation over repetitions."""
    from semaug.studies.theorem import gaussian_problem

    problem, repetitions = gaussian_problem(), 50 if setup.scale == "full" else 10
    features, labels = problem.train
    inputs = features, labels, *problem.head_parameters(problem.head), Diagonal(torch.full_like(features, 0.5))
    generator = torch.Generator().manual_seed(0)
    curves: dict[str, dict[str, Any]] = {}
    lines = []
    for strength in _STRENGTHS:
        bound = isda_loss(*inputs, strength)
        means, spreads = [], []
        for draws in _DRAWS:
            losses = [sampled_loss(*inputs, strength, draws, generator=generator) for _ in range(repetitions)]
            gaps = bound - torch.stack(losses)
            means.append(float(gaps.mean()))
            spreads.append(float(gaps.std()))
        curves[f"λ = {strength:g}"] = {"draws": _DRAWS, "mean": means, "spread": spreads}
        lines.append(
            f"λ = {strength:g}: bound {bound:.3f}, the loss of {_DRAWS[-1]} draws {bound - means[-1]:.3f} ± "
            f"{spreads[-1]:.4f}, of one draw ± {spreads[0]:.3f}"
        )
    return {"gap": curves, "lines": lines}


EXPERIMENT = Experiment(
    name="figure-bound",
    order=145,
    title="The bound of the ISDA loss",
    line="how far the loss of M explicit draws (eq. 1) lies below the ISDA loss (eq. 2)",
    shows="The ISDA loss is an upper bound of the expected loss of augmented features.",
    caption="More draws do not close the gap, since the bound is one of the expectation: they only remove noise, as "
    "1/√M. The gap grows with λ.",
    measure=measure_gap,
)
