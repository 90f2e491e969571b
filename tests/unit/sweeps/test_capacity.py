"""Capacity of states: planted curves are found, and what was not reached is not claimed."""

import numpy as np
import polars as pl
import pytest

from analysis.base import NotApplicableError
from analysis.sweeps import capacity
from lab.studies.capacity import build_study
from lab.sweeps.table import MEASURED

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
    (found,) = capacity.measure(pl.concat([plant(32, 24.0), plant(8, 6.0)]))
    assert [curve.half for curve in found.curves] == pytest.approx([6.0, 24.0])
    assert [curve.sharpness for curve in found.curves] == pytest.approx([3.0, 3.0])
    assert "it changes as d_state to the power 1.00." in found.says


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    """A bounded fit takes milliseconds."""
    monkeypatch.setattr(capacity, "RESAMPLES", 20)


def test_intervals_cover_the_planted_half_point():
    found = [capacity.measure(plant(size, 10.0, noise=0.03))[0] for size in range(10)]
    intervals = [curves.curves[0].interval for curves in found]
    covered = [low <= 10 <= high for low, high in intervals]
    # Twelve resampled runs cover somewhat less than 95 %.
    assert np.mean(covered) >= 0.7


@pytest.mark.parametrize(("half", "said"), [(500.0, "above 32"), (0.5, "below 4")])
def test_a_half_point_that_was_not_reached_is_not_named(half, said):
    (found,) = capacity.measure(plant(8, half))
    assert found.numbers().rows[0][5] == said
    assert "tried: 0 of 1; no change of it is certain." in found.says
    assert not found.curves[0].within


def test_runs_that_did_not_learn_are_told_from_states_that_cannot():
    fewer = pl.when(pl.col("seed") == 0).then(pl.col("accuracy") - 0.51)
    table = plant(8, 500.0).with_columns(fewer.otherwise("accuracy").alias("accuracy"))
    (found,) = capacity.measure(table)
    assert found.numbers().rows[0][-1] == "0.51"


def test_few_runs_get_no_curve():
    (found,) = capacity.measure(plant(8, 10.0, seeds=1).head(2))
    assert np.isnan(found.curves[0].half)
    assert found.numbers().rows[0][0::3] == ("all runs", "too few runs")
    with pytest.raises(NotApplicableError, match="one number of pairs"):
        capacity.measure(plant(8, 10.0, seeds=1).head(1))


def test_every_state_meets_every_number_of_pairs():
    study = build_study(seeds=1)
    factors = {(cell.factors["d_state"], cell.factors["pairs"]) for cell in study.cells}
    assert factors == {(state, pairs) for state in (4, 8, 16, 32) for pairs in PAIRS}
