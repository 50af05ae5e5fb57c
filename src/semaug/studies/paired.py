"""Paired statistics: two methods were trained with the same seeds, so their differences count."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CHANCE = 0.05  # a larger p may well be chance
_ROUNDING = 3e-4  # points: two differences of accuracies that were stored with six digits are equal up to this


def mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation over seeds; None where there are too few values."""
    return statistics.fmean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """The mean difference between a method and the baseline over the seeds that both have."""

    mean: float
    error: float | None  # standard error of the mean; None for one seed
    p: float | None  # of a two-sided paired t test; None for fewer than three seeds, or if all differences are equal
    count: int  # of seeds

    @property
    def separates(self) -> bool:
        """Whether the mean is larger than twice its standard error."""
        return self.error is not None and abs(self.mean) > 2 * self.error


def paired(own: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Compare accuracies in % of a method with those of the baseline, both by seed; None if no seed has both.

    >>> paired({0: 80.0, 1: 82.0}, {0: 79.0, 1: 80.0})
    Difference(mean=1.5, error=0.5, p=None, count=2)
    """
    values = [own[seed] - base[seed] for seed in own if seed in base]
    if not values:
        return None
    if max(values) - min(values) < _ROUNDING:  # else the t test takes rounding errors for the spread
        values = [round(statistics.fmean(values), 9)] * len(values)
    mean, deviation = mean_and_deviation(values)
    assert mean is not None
    error = None if deviation is None else deviation / math.sqrt(len(values))
    p = None
    if len(values) >= 3 and error:
        from scipy import stats

        p = float(stats.ttest_1samp(values, 0.0).pvalue)
    return Difference(mean, error, p, len(values))
