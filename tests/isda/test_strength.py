"""The schedule of λ."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semaug import strength


@given(total=st.floats(1e-3, 1e6), share=st.floats(0, 1), maximum=st.floats(0, 100), power=st.floats(0, 5))
def test_strength_is_the_share_of_training_to_the_power_times_the_maximum(total, share, maximum, power):
    step = min(share * total, total)
    expected = maximum * float(np.power(step / total, power))
    assert strength(step, total, maximum, power) == pytest.approx(expected, rel=1e-12)
    assert 0 <= strength(step, total, maximum, power) <= maximum


@given(steps=st.tuples(st.integers(0, 1000), st.integers(0, 1000)), power=st.floats(0, 5))
def test_strength_never_falls_during_training(steps, power):
    early, late = sorted(steps)
    assert strength(early, 1000, power=power) <= strength(late, 1000, power=power)


def test_strength_starts_at_zero_and_ends_at_the_maximum():
    for power in (0.5, 1.0, 3.0):
        assert strength(0, 90, 7.5, power) == 0.0
        assert strength(90, 90, 7.5, power) == 7.5
    assert strength(45, 90) == 5.0
    assert strength(45, 90, 8.0, 2.0) == 2.0
    assert isinstance(strength(1, 2, 3), float)


def test_strength_of_power_zero_is_constant():
    assert {strength(step, 10, 2.5, 0) for step in range(11)} == {2.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 10), "0 ≤ step ≤ total"),
        ((11, 10), "0 ≤ step ≤ total"),
        ((0, 0), "total > 0"),
        ((0, -5), "total > 0"),
        ((math.nan, 10), "0 ≤ step ≤ total"),
        ((1, 10, -1.0), "finite number ≥ 0"),
        ((1, 10, math.nan), "finite number ≥ 0"),
        ((1, 10, math.inf), "finite number ≥ 0"),
        ((1, 10, 1.0, -0.5), "power ≥ 0"),
        ((1, 10, 1.0, math.nan), "finite power"),
    ],
)
def test_wrong_arguments_raise_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        strength(*arguments)
