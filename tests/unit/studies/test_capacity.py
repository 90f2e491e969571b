"""Capacity of states: planted curves are found, and what was not reached is not claimed."""

import numpy as np
import polars as pl
import pytest

from analysis.studies import capacity
from lab.studies.capacity import build_study
from lab.studies.table import MEASURED

PAIRS = (4, 8, 16, 32)


def plant(d_state: int, half: float, seeds: int = 3, noise: float = 0.0) -> pl.DataFrame:
    rng = np.random.default_rng(d_state)
    return pl.DataFrame(
        [
            {
                "d_state": d_state,
                "pairs": pairs,
                "seed": seed,
                **dict.fromkeys(MEASURED),
                "accuracy": float(
                    capacity.compute_curve(np.array(np.log2(pairs)), np.log2(half), 3.0)
                    + noise * rng.standard_normal()
                ),
            }
            for seed in range(seeds)
            for pairs in PAIRS
        ],
        schema={"d_state": pl.Int64, "pairs": pl.Int64, "seed": pl.Int64, **MEASURED},
    )


def test_a_planted_half_point_is_found_and_its_growth():
    found = capacity.measure(pl.concat([plant(8, 6.0), plant(32, 24.0)]))
    assert [state.half for state in found] == pytest.approx([6.0, 24.0])
    assert [state.sharpness for state in found] == pytest.approx([3.0, 3.0])
    assert "to the power 1.00." in " ".join(capacity.summarize(found, 0))


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    """A bounded fit takes milliseconds."""
    monkeypatch.setattr(capacity, "RESAMPLES", 20)


def test_intervals_cover_the_planted_half_point():
    found = [capacity.measure(plant(size, 10.0, noise=0.03))[0] for size in range(10)]
    intervals = [state.interval for state in found]
    covered = [interval is not None and interval[0] <= 10 <= interval[1] for interval in intervals]
    # Twelve resampled runs cover somewhat less than 95 %.
    assert np.mean(covered) >= 0.7


@pytest.mark.parametrize(
    ("half", "says"),
    [(500.0, "its half point was not reached"), (0.5, "recalls less than half of 4 pairs already")],
)
def test_a_half_point_that_was_not_reached_is_not_named(half, says):
    found = capacity.measure(plant(8, half))
    assert says in capacity.summarize(found, 0)[0]
    assert not found[0].within


def test_few_runs_get_no_curve_and_missing_ones_are_counted():
    table = plant(8, 10.0, seeds=1).head(2)
    found = capacity.measure(table)
    assert found[0].half is None
    assert capacity.summarize(found, 14) == [
        "A state of 8: too few runs for a curve.",
        "14 runs have not ended and are left out.",
    ]
    assert capacity.summarize([], 16)[0] == "No run has ended yet."


def test_the_figure_has_runs_and_curves():
    found = capacity.measure(pl.concat([plant(8, 6.0), plant(32, 24.0).head(2)]))
    fig = capacity.draw(found)
    assert [trace["mode"] for trace in fig.to_dict()["data"]] == ["markers", "lines", "markers"]


def test_every_state_meets_every_number_of_pairs():
    study = build_study(seeds=1)
    factors = {(cell.factors["d_state"], cell.factors["pairs"]) for cell in study.cells}
    assert factors == {(state, pairs) for state in (4, 8, 16, 32) for pairs in PAIRS}
