"""What the kinds of figure share."""

import numpy as np
import pytest

from analysis.figures import Axis, Bars, Curves, Line, bars, curves
from analysis.figures.axes import WHOLE, choose_log_ticks, find_ends


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((0.5, 200.0), ["1", "10", "100"]),
        ((1.5, 40.0), ["3", "10", "30"]),
        ((3.0, 9.0), ["3", "6", "9"]),
        ((31.0, 34.0), ["32"]),
    ],
)
def test_logarithmic_axes_have_few_and_even_labels(ends: tuple[float, float], labels: list[str]):
    assert list(choose_log_ticks(*ends).values()) == labels


@pytest.mark.parametrize(
    ("shares", "ends"),
    [
        ([], WHOLE),
        ([0.0, 0.0], WHOLE),
        ([1.0, 1.0], WHOLE),
        ([0.1, 0.9], WHOLE),
        ([0.0, 0.26], WHOLE),
        ([0.02, 0.1], (-0.003, 0.106)),
        ([0.9, 0.98], (0.894, 1.003)),
        ([-0.1, 0.1], WHOLE),
    ],
)
def test_axes_of_shares_end_where_the_data_are(shares: list[float], ends: tuple[float, float]):
    assert find_ends(shares) == pytest.approx(ends)
    found = Axis(unit="share").settings([*shares, float("nan")])
    assert found["range"] == pytest.approx(list(ends))
    assert ("tickvals" in found) == (ends == WHOLE)


def test_bars_begin_at_zero_and_whiskers_are_on_the_axis():
    high = Bars("a", np.array([0.9, 0.95]))
    assert bars(["x", "y"], [high], Axis(unit="share")).layout["xaxis"]["range"][0] < 0
    ends = np.array([[0.7, 1.0], [0.94, 0.96]])
    line = Line("a", np.arange(2), np.array([0.9, 0.95]), ends)
    found = curves([Curves([line], Axis(unit="share"))], Axis())
    assert list(found.layout["yaxis"]["range"]) == list(WHOLE)
