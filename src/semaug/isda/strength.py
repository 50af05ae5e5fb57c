"""The schedule of the augmentation strength λ."""

import math

from semaug.isda.precision import LARGEST_STRENGTH


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
    if not (math.isfinite(maximum) and maximum >= 0 and math.isfinite(power) and power >= 0):
        raise ValueError(f"strength needs a finite maximum ≥ 0 and a finite power ≥ 0, not {maximum} and {power}")
    check_size(maximum)
    return float((step / total) ** power * maximum)


def check_size(value: float) -> None:
    """Check that a strength is small enough for fp32.

    Args:
        value: λ.

    Raises:
        ValueError: If λ is above 1e12.
    """
    if value > LARGEST_STRENGTH:
        raise ValueError(f"strength must be at most {LARGEST_STRENGTH:g}, not {value:g}")
