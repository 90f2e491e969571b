"""Planted changes are found where they were planted, and noise is none."""

import math

import numpy as np
import pytest

from analysis.statistics.change_points import (
    Change,
    find_change_point,
    moves,
    weigh_steps,
)
from tests.planted_runs import PLACE, STEPS, bound, walks


def change(values, steps=STEPS, resampled=None) -> Change | None:
    return find_change_point(steps, np.asarray(values, dtype=np.float64), bound(steps), resampled)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("at", [64, 181, 512])
def test_a_planted_step_is_found_between_its_neighbours(at, sign):
    found = change(np.where(at > STEPS, 0.1, 0.1 + 0.8 * sign))
    assert found
    before = STEPS[np.flatnonzero(at == STEPS)[0] - 1]
    assert (found.low, found.high) == (found.begins, found.ends) == (before, at)
    assert found.before == pytest.approx(0.1)
    assert found.after == pytest.approx(0.1 + 0.8 * sign)
    assert found.size == pytest.approx(0.8)
    assert math.log2(1 + found.step) == pytest.approx(np.log2([1 + before, 1.0 + at]).mean())


def test_the_split_is_the_least_squared_distance_by_trying_all():
    values = np.random.default_rng(1).normal(size=len(STEPS)) + 5 * (STEPS > 50) + 0.3 * PLACE
    weights = weigh_steps(STEPS)
    best = {}
    for i in range(len(STEPS) - 1):
        best[i] = 0.0
        for side in (range(i + 1), range(i + 1, len(STEPS))):
            total = sum(weights[j] for j in side)
            level = sum(weights[j] * values[j] for j in side) / total
            best[i] += sum(weights[j] * (values[j] - level) ** 2 for j in side)
    at = min(best, key=best.__getitem__)
    found = change(values)
    assert found
    assert (found.low, found.high) == (STEPS[at], STEPS[at + 1])


@pytest.mark.parametrize("middle", [4.0, 6.0, 8.0])
def test_a_ramp_changes_in_its_middle(middle):
    # From 0 to 1 within one unit of log2 to either side; the kept steps are half a unit apart.
    found = change(np.clip((PLACE - middle + 1) / 2, 0, 1))
    assert found
    assert math.log2(1 + found.step) == pytest.approx(middle, abs=0.5)
    assert found.begins < found.low
    assert found.ends
    assert found.ends > found.high


def test_more_steps_around_a_jump_do_not_move_it():
    def ramp(steps):
        return np.clip(np.log2(1.0 + steps) - 8, 0, 1)

    denser = np.union1d(STEPS, np.arange(260, 300))
    thin, dense = change(ramp(STEPS)), change(ramp(denser), denser)
    assert thin
    assert dense
    assert abs(math.log2((1 + thin.step) / (1 + dense.step))) < 0.5


@pytest.mark.parametrize("n", [4, 6, 10, 21])
def test_noise_and_walks_have_no_change(n):
    steps = STEPS[-n:]
    rng, level = np.random.default_rng(2), bound(steps)
    for null in (rng.normal(size=(1000, n)), walks(rng, 1000, steps)):
        alarms = sum(find_change_point(steps, 0.5 + one, level) is not None for one in null)
        # 1 % of 1,000 is 10 ± 3, and the bound itself is a quantile of 2,000; as much again.
        assert alarms <= 25


@pytest.mark.parametrize("n", [6, 11, 21])
def test_an_even_ramp_moves_at_no_one_time(n):
    steps = STEPS[-n:]
    ramp = np.linspace(0, 1, n)
    assert change(ramp, steps) is None
    assert moves(ramp)
    assert not moves(0.09 * ramp)


@pytest.mark.parametrize("values", [np.zeros(21), np.where(STEPS < 64, 0.5, 0.59)])
def test_a_constant_or_a_tiny_step_is_no_change(values):
    assert change(values) is None


def test_a_jump_at_the_last_step_is_one():
    found = change(np.where(STEPS == 1024, 1.0, 0.0))
    assert found
    assert (found.low, found.high) == (724, 1024)


def test_a_bracket_holds_the_splits_of_other_rows():
    values = np.where(STEPS < 64, 0.0, 1.0)
    other = np.where(STEPS < 256, 0.0, 1.0)
    found = change(values, resampled=np.stack([values] * 60 + [other] * 40))
    assert found
    assert (found.low, found.high) == (45, 256)
    rare = change(values, resampled=np.stack([values] * 99 + [other]))
    assert rare
    assert (rare.low, rare.high) == (45, 64)


def test_fewer_than_four_steps_are_refused():
    with pytest.raises(ValueError, match=r"steps=3: must be ≥ 4"):
        change([0.0, 0.0, 1.0], STEPS[:3])
