"""Theorem 1 in numbers: how fast the meta-gradient and the training gradient vanish; see `semaug.studies.theorem`.

**Settings of the paper.** None: the paper proves the theorem and measures nothing.

**The paper's results.** min_t E‖∇L_meta‖² = O(1/√T), that is a slope of −0.5 or less; the training gradient vanishes.

**Time at full scale.** One minute on one core. Small scale has shorter runs and fewer seeds.
"""

from typing import Any

from semaug.studies.cells import Experiment, Extra
from semaug.studies.scales import Setup

_SMALL: dict[str, Any] = {"doublings": 3, "long_run": 512, "seeds": 4}


def _measure(experiment: Experiment, setup: Setup) -> Extra:
    import warnings

    from semaug.studies.theorem import measure, summary

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from torch, about torch
        result = measure(**(_SMALL if setup.scale == "small" else {}))
    names = ("lengths", "meta", "relative", "slope", "relative_slope")
    curves = {key: {name: getattr(curve, name) for name in names} for key, curve in result.curves.items()}
    return {"curves": curves, "times_t": result.times, "train": result.train, "lines": summary(result)}


EXPERIMENT = Experiment(
    name="theorem",
    order=150,
    title="Theorem 1 in numbers",
    line="how fast the meta-gradient and the training gradient vanish on a small problem",
    shows="The squared norm of the meta-gradient is bounded by O(1/√T), and the training gradient vanishes.",
    caption="Slopes are exponents of T, fitted in logarithms; the bound requires −0.5 or less. Divided by α² they show "
    "whether CovNet itself becomes stationary.",
    kind="theorem",
    measure=_measure,
)
