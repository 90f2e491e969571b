"""The rules that attribute errors: masks and windows by loops, precedence, random answers."""

import numpy as np
import pytest
import torch

from analysis.dynamic_mask.masking import LIGHT, onset
from analysis.errors import out_of_reach as reach
from analysis.errors.causes import CAUSES, UNKNOWN, Asked, first_of, redrawn


@pytest.mark.parametrize("window", [None, 1, 5])
def test_out_of_sight_is_a_loop_over_heads_and_keys(window):
    rng = np.random.default_rng(0)
    # Few distinct biases, so that ties occur.
    bias = rng.integers(-2, 1, (3, 2, 12)) * 5.0
    rows = rng.integers(0, 3, 200)
    positions = rng.integers(0, 12, 200)
    sources = rng.integers(0, positions + 1)
    sources[:5] = -1
    none = np.full(200, -1)
    first = onset(torch.from_numpy(bias), window).numpy()
    found = reach.out_of_sight(first, Asked(rows, positions, none, none, none, none), sources)
    for i, (b, t, s) in enumerate(zip(rows, positions, sources, strict=True)):
        hidden = []
        for h in range(2):
            row = bias[b, h, : t + 1]
            out = row[s] < row.max() + np.log(LIGHT)
            ranked = sorted(range(t + 1), key=lambda j: (-row[j], -j))
            hidden.append(out or (window is not None and s not in ranked[:window]))
        assert found[i] == (s >= 0 and all(hidden))
    assert found.any()
    assert not found.all()


def test_the_first_cause_that_holds_is_taken():
    flags = dict.fromkeys(CAUSES, np.zeros((1, 7), bool))
    for i, name in enumerate(CAUSES):
        flags[name] = np.arange(7)[None] >= i
        if i:
            flags[name] = flags[name] & (np.arange(7)[None] <= i)
    assert first_of({**flags, UNKNOWN: np.ones((1, 7), bool)}).tolist() == [[0] * 7]
    flags[CAUSES[0]] = np.zeros((1, 7), bool)
    assert first_of({**flags, UNKNOWN: np.ones((1, 7), bool)}).tolist() == [[6, 1, 2, 3, 4, 5, 6]]


def test_random_answers_are_wrong_and_as_frequent_as_targets():
    none = np.full(4000, -1)
    some = Asked(none, none, np.full(4000, 7), none, none, none)
    fig = redrawn(some, np.array([7, 8, 8, 8, 9]), 2, np.random.default_rng(0))
    assert set(np.unique(fig)) == {8, 9}
    # 8,000 draws: a standard deviation of 0.005.
    assert (fig == 8).mean() == pytest.approx(0.75, abs=0.025)
    assert (redrawn(some, np.array([7]), 2, np.random.default_rng(0)) == -1).all()
