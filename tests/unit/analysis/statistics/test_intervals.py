"""Intervals against published numbers, and by how often they hold the truth."""

import numpy as np
import pytest
import torch

from analysis.base import thin
from lab.intervals import bootstrap, bootstrap_ratio, bound_mean, estimate_ratio, wilson


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
        (0.5, 100, 0.4038, 0.5962),
        # Newcombe, Statist. Med. 17 (1998), 857, table I, method 3.
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson(share, count, low, high):
    assert wilson(share, count) == pytest.approx((low, high), abs=6e-5)


def held(groups: bool, grouped: int, trials: int = 200) -> float:
    """Return how often the interval holds the mean, 0, of values that agree within a group."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(trials):
        shared = np.repeat(rng.normal(size=40), grouped)
        labels = np.repeat(np.arange(40), grouped) if groups else None
        low, high = bootstrap(shared, rng, rounds=200, groups=labels)
        hits += low <= 0 <= high
    return hits / trials


# 200 trials at 95 % have a standard error of 1.5 points; 40 values make the percentile interval
# a point or two short.
@pytest.mark.parametrize(("groups", "grouped"), [(False, 1), (True, 1), (True, 5)])
def test_the_bootstrap_holds_the_mean_nineteen_times_in_twenty(groups, grouped):
    assert 0.89 <= held(groups, grouped) <= 0.99


def test_groups_need_no_order_and_no_equal_size():
    values, labels = np.arange(12.0), np.array([3, 3, 3, 3, 3, 9, 9, 1, 1, 1, 1, 1])
    order = np.random.default_rng(2).permutation(12)
    found = [
        bootstrap(values[index], np.random.default_rng(0), groups=labels[index])
        for index in (np.arange(12), order)
    ]
    assert found[0] == pytest.approx(found[1])
    means = [np.mean(values[labels == label]) for label in (1, 3, 9)]
    assert found[0] == pytest.approx((min(means), max(means)))


def resample(values: np.ndarray, statistic, rounds: int = 200) -> list[float]:
    """The slow form: one resample after another."""
    rng = np.random.default_rng(1)
    found = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(rounds)]
    return list(np.quantile(found, [0.025, 0.975]))


@pytest.mark.parametrize("most", [1, 250, 2**18])
def test_resamples_at_once_are_those_one_by_one(most, monkeypatch):
    monkeypatch.setattr("lab.intervals.MOST_DRAWN", most)
    pairs = np.random.default_rng(0).normal([2.0, 4.0], 0.1, size=(100, 2))
    low, high = bootstrap_ratio(pairs, np.random.default_rng(1), 200)
    assert 0.48 < low < 0.5 < high < 0.52
    assert (low, high) == pytest.approx(
        resample(pairs, lambda v: v[:, 0].mean() / v[:, 1].mean()), rel=1e-12
    )
    assert bootstrap(pairs, np.random.default_rng(1), 200) == pytest.approx(
        resample(pairs, np.mean), rel=1e-12
    )


def test_resamples_without_a_quotient_are_left_out():
    sums = np.array([[1.0, 2.0], [0.0, 0.0]])
    assert bootstrap_ratio(sums, np.random.default_rng(0)) == (0.5, 0.5)
    assert np.isnan(bootstrap_ratio(0 * sums, np.random.default_rng(0))).all()


def test_rows_without_a_number_are_left_out():
    over = torch.tensor([0.7, 0.8, float("nan"), 0.75], dtype=torch.float64)
    rng = np.random.default_rng(0)
    found = estimate_ratio(over, torch.ones(4), 0.5, rng)
    assert found.value == pytest.approx(0.75)
    assert 0.7 - 1e-9 <= found.low < found.value < found.high <= 0.8 + 1e-9
    assert np.isnan(estimate_ratio(torch.full((3,), float("nan")), torch.ones(3), 0.5, rng).value)


def test_an_interval_of_the_mean_holds_it_and_that_of_rows_is_its_least_width():
    rng = np.random.default_rng(0)
    draws = rng.normal(0.7, 0.05, (300, 3))
    held = [low <= 0.7 <= high for low, high in map(bound_mean, draws.tolist())]
    assert 0.9 < np.mean(held) < 0.99
    assert bound_mean([1.0, 1.0], [(0.98, 1.0), (0.97, 1.0)]) == pytest.approx((0.975, 1.0))
    assert bound_mean([0.5], [(0.4, 0.6)]) == (0.4, 0.6)
    assert np.isnan(bound_mean([0.5])).all()


def test_items_are_thinned_from_the_first_to_the_last():
    assert thin([0, 1, 2], 24) == [0, 1, 2]
    kept = thin([str(i) for i in range(100)], 24)
    assert (kept[0], kept[-1], len(kept)) == ("0", "99", 24)
    assert thin([], 3) == []
    with pytest.raises(ValueError, match="most=0"):
        thin([1], 0)
