"""Nothing is seen in nulls more often than stated, however many there are; what is real is seen."""

from itertools import product

import numpy as np
import pytest
import torch

from analysis.statistics.estimates import SURE, estimate_ratio, thin, westfall_young


def test_p_is_the_share_of_all_signs(monkeypatch):
    monkeypatch.setattr("analysis.statistics.estimates.FLIPS", 20_000)
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


def test_rows_without_a_number_are_left_out():
    over = torch.tensor([0.7, 0.8, float("nan"), 0.75], dtype=torch.float64)
    rng = np.random.default_rng(0)
    found = estimate_ratio(over, torch.ones(4), 0.5, rng)
    assert found.value == pytest.approx(0.75)
    assert 0.7 - 1e-9 <= found.low < found.value < found.high <= 0.8 + 1e-9
    assert np.isnan(estimate_ratio(torch.full((3,), float("nan")), torch.ones(3), 0.5, rng).value)


def test_items_are_thinned_from_the_first_to_the_last():
    assert thin([0, 1, 2], 24) == [0, 1, 2]
    kept = thin([str(i) for i in range(100)], 24)
    assert (kept[0], kept[-1], len(kept)) == ("0", "99", 24)
    assert thin([], 3) == []
    with pytest.raises(ValueError, match="most=0"):
        thin([1], 0)
