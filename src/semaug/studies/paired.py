"""The paired comparison: two methods met the same seeds, so it is their differences that count."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CHANCE = 0.05  # a p above it may well be chance


def over_seeds(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation, as far as there are values enough for them."""
    return statistics.fmean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """The mean of own − baseline over the seeds that both have."""

    mean: float
    error: float | None  # standard error of the mean; none for a single seed
    p: float | None  # two-sided, of a paired t test; none for fewer than three seeds, or if all differences are alike
    count: int

    @property
    def separates(self) -> bool:
        """Whether the mean is larger than twice its standard error."""
        return self.error is not None and abs(self.mean) > 2 * self.error


def paired(own: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Compare values by seed; None if no seed has both."""
    values = [round(own[seed] - base[seed], 9) for seed in own if seed in base]  # equal ones shall be equal
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Difference(mean, None, None, count)
    error = statistics.stdev(values) / math.sqrt(count)
    return Difference(mean, error, p_value(mean / error, count - 1) if count >= 3 and error > 0 else None, count)


def p_value(t: float, degrees: int) -> float:
    """Two-sided p of Student's t, by the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3-4)."""
    angle = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    first = 1 + degrees % 2
    term, total = (cosine, 0.0) if degrees % 2 else (1.0, 0.0)
    for k in range(first, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if degrees % 2 else sine * total
    return max(0.0, 1 - inside)
