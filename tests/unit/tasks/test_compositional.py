"""Compositional recall: the grid, links, marginals, shortcuts and the limits of its options."""

from itertools import product
from math import sqrt

import pytest

from tasks.base import accuracy
from tasks.compositional import Compositional
from tests.statistics import assert_uniform


def test_the_grid_is_full_and_every_pair_of_keys_asked_once():
    batch = Compositional(seq_len=100, n_pairs=16, vocab_size=64).batch(size=50)
    assert batch.links["first_key_pos"].equal(batch.links["key_pos"] - 1)
    for row in batch.inputs.tolist():
        stored = list(zip(row[:48:3], row[1:48:3], strict=True))
        first, second = {a for a, _ in stored}, {b for _, b in stored}
        assert len(first) == len(second) == 4
        assert max(first) < 16 <= min(second)
        assert max(second) < 32
        assert set(stored) == set(product(first, second))
        assert len(set(row[2:48:3])) == 16
        assert min(row[2:48:3]) >= 32
        assert sorted(zip(row[48:96:3], row[49:96:3], strict=True)) == sorted(stored)


def test_marginals_are_uniform():
    task = Compositional(seq_len=24, n_pairs=4, vocab_size=22)
    batch = task.batch(size=20_000)
    for p in (0, 3, 9):
        assert_uniform(batch.inputs[:, p], 1, 5)
        assert_uniform(batch.inputs[:, p + 1], 5, 11)
        assert_uniform(batch.inputs[:, p + 2], 11, 22)
    triple = (batch.inputs[:, 0] - 1) * 66 + (batch.inputs[:, 1] - 5) * 11 + batch.inputs[:, 2] - 11
    assert_uniform(triple, 0, 4 * 6 * 11)
    for q in (0, 3):
        assert_uniform((batch.links["value_pos"][:, q] - 2) // 3, 0, 4)


def test_shortcuts_score_what_they_say():
    task = Compositional(seq_len=100, n_pairs=16)
    batch = task.batch(size=500)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    for name, expected in (("second key", 1 / 4), ("first key", 1 / 4), ("last value", 1 / 16)):
        assert scores[name] == pytest.approx(expected, abs=1e-9), name
    for name in ("context value", "position only"):
        spread = 5 * sqrt(15 / 16**2 / 8_000)
        assert scores[name] == pytest.approx(1 / 16, abs=spread), name
    batch, rules = Compositional().batch(split="test", size=1_000), Compositional().shortcuts()
    agree = accuracy(rules["both keys agree"](batch), batch.targets)
    assert agree == pytest.approx(0.257, abs=0.02)
