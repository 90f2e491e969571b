"""Numbers that stand together have the same decimals."""

import pytest

from analysis.words import count_interval_decimals, percents


def test_shares_that_stand_together_have_the_same_decimals():
    assert percents(0.5, 0.25) == ["50.0 %", "25.0 %"]
    assert percents(0.994, 0.99902) == ["99.400 %", "99.902 %"]
    assert percents(0.0, 0.00094) == ["0.000 %", "0.094 %"]


@pytest.mark.parametrize(
    ("low", "high", "decimals"),
    [(0.9919, 0.9923, 2), (0.992, 0.9922, 2), (0.97, 0.98, 1), (0.0, 0.0, 1), (0.9999, 1.0, 3)],
)
def test_the_ends_of_an_interval_differ(low, high, decimals):
    assert count_interval_decimals(low, high) == decimals
