"""Nothing is seen in nulls more often than stated, however many there are; what is real is seen."""

import math
from itertools import product

import numpy as np
import pytest

from analysis.statistics.comparisons import (
    SURE,
    compute_least_p,
    estimate_curve,
    estimate_median,
    holm,
    log_rank_p,
    sign_flip_p,
    westfall_young,
)


def test_p_is_the_share_of_all_signs(monkeypatch):
    monkeypatch.setattr("analysis.statistics.comparisons.FLIPS", 20_000)
    changes = np.random.default_rng(0).integers(-2, 2, (7, 3)).astype(float)
    found = westfall_young(changes, np.random.default_rng(1))
    size = [sum(c**2 for c in changes[:, j]) ** 0.5 for j in range(3)]
    own = [changes[:, j].sum() / size[j] for j in range(3)]
    lowest = [
        min(
            sum(s * c for s, c in zip(signs, changes[:, j], strict=True)) / size[j]
            for j in range(3)
        )
        for signs in product((-1, 1), repeat=7)
    ]
    expected = [np.mean([low <= z + 1e-9 for low in lowest]) for z in own]
    # 20,000 draws: a standard deviation of 0.0035 at most.
    np.testing.assert_allclose(found, expected, atol=0.015)


@pytest.mark.parametrize("shared", [0.0, 0.9], ids=["independent", "alike"])
def test_of_forty_nulls_the_worst_is_seen_at_the_stated_rate(shared):
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(100):
        changes = (1 - shared) * rng.normal(size=(40, 40)) + shared * rng.normal(size=(40, 1))
        seen += (westfall_young(changes, rng) < SURE).any()
    # 5 of 100 are expected; more than 11 in less than a hundredth of such tests.
    assert seen <= 11


def test_a_real_cost_among_nulls_is_seen_and_nothing_else():
    rng = np.random.default_rng(0)
    changes = rng.normal(size=(64, 40))
    changes[:, 7] -= 1.0
    changes[:, 8] = 0.0
    assert np.flatnonzero(westfall_young(changes, rng) < SURE).tolist() == [7]


def test_four_rows_decide_nothing():
    assert (westfall_young(-np.ones((4, 3)), np.random.default_rng(0)) > SURE).all()


def test_holm_is_as_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_flips_of_signs_give_the_p_they_give_by_hand():
    assert sign_flip_p(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert sign_flip_p(np.array([1.0, -1.0])) == 1
    assert sign_flip_p(np.array([1.0])) == 1
    assert sign_flip_p(np.full(20, 0.1)) < 1e-3


def test_the_log_rank_test_is_exact_and_near_the_usual_one_for_many_runs():
    from scipy.stats import CensoredData, logrank

    few = [300, 310, 320], [True] * 3
    assert log_rank_p([100, 110, 120], [True] * 3, *few) == pytest.approx(0.1)
    assert log_rank_p(*few, *few) == 1
    assert compute_least_p(3, 3) == pytest.approx(0.1)
    rng = np.random.default_rng(1)
    samples = [rng.exponential(90, 50).round(), rng.exponential(160, 60).round()]
    seen = [np.minimum(times, 250) for times in samples]
    ours, theirs = (CensoredData.right_censored(times, times == 250) for times in seen)
    usual = logrank(ours, theirs).pvalue
    assert 0.001 < usual < 0.2
    one, other = ((times.tolist(), (times < 250).tolist()) for times in seen)
    assert log_rank_p(*one, *other) == pytest.approx(usual, rel=0.3)


def test_censored_runs_are_left_out_of_the_risk_and_not_of_the_runs():
    # At 100 one of three that still ran is solved, at 300 one of two: 2/3 and 1/3 are left.
    times, solved = [100, 300, 500, 50], [True, True, True, False]
    steps, unsolved = estimate_curve(times, solved)
    assert steps.tolist() == [0, 50, 100, 300, 500]
    assert unsolved == pytest.approx([1, 1, 2 / 3, 1 / 3, 0])
    assert estimate_median(times, solved)[0] == 300
    assert estimate_median([100, 900], [False, False]) == (math.inf, (math.inf, math.inf))


def test_the_median_has_the_published_interval():
    """Weeks in remission, treated: Freireich 1963; intervals by R's `survfit`, log-log."""
    weeks = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
    ended = [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert estimate_median(weeks, [bool(end) for end in ended]) == (23, (13, math.inf))
    # Where the curve ends at 0, so does its band.
    assert estimate_median([2, 5, 6, 10], [True] * 4) == (5, (2, 10))
