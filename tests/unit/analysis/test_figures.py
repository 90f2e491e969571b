"""What the kinds of figure share."""

import pytest

from analysis.figures.axes import choose_log_ticks


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
