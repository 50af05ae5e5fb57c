"""Theorem 1 in numbers, see `semaug.studies.theorem`: how fast the meta-gradient and the training gradient vanish.

**Settings of the paper.** None: the paper proves the theorem and measures nothing.

**The paper's figure.** min_t E‖∇L_meta‖² = O(1/√T), that is a slope of −0.5 or less; the training gradient vanishes.

**Expected time at full scale.** One minute on one core. Small scale has shorter runs and fewer seeds.
"""

from typing import Any

from semaug.studies.cells import Experiment, ScaleName

EXPERIMENT = Experiment(
    name="theorem",
    title="Theorem 1 in numbers",
    line="how fast the meta-gradient and the training gradient vanish on a small problem",
    shows="The squared norm of the meta-gradient is bounded by O(1/√T), and the training gradient vanishes.",
    caption="Slopes are exponents of T, fitted in logarithms; the bound asks for −0.5 or less. Divided by α² they tell "
    "whether CovNet itself becomes stationary.",
    kind="theorem",
)
OPTIONS: dict[ScaleName, dict[str, Any]] = {"full": {}, "small": {"doublings": 3, "long_run": 512, "seeds": 4}}
