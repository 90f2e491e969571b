"""Induction: its roles, marginals, links, shortcuts and the limits of its options."""

from math import sqrt

import pytest

from tasks.base import accuracy
from tasks.induction import Induction
from tests.statistics import assert_uniform


def test_marginals_are_uniform():
    batch = Induction(seq_len=9, vocab_size=6).batch(size=20_000)
    assert_uniform(batch.links["key_pos"], 0, 7)
    assert_uniform(batch.inputs[batch.inputs > 0], 1, 6)
    key, answer = batch.links["key_pos"][:, 0], batch.targets[:, -1] - 1
    assert_uniform(key * 5 + answer, 0, 35)
    beside = batch.inputs[:, -2] - 1
    assert_uniform((beside * 5 + answer)[key < 6], 0, 25)


def test_shortcuts_score_what_they_say():
    rows = 5_000
    for options, frequent in (({}, 0.096), (Induction.presets["small"].options, 0.130)):
        task = Induction(**options)
        batch = task.batch(split="test", size=rows)
        rules = task.shortcuts()
        scores = {name: accuracy(rule(batch), batch.targets) for name, rule in rules.items()}
        assert scores.pop("most frequent token") == pytest.approx(
            frequent, abs=5 * sqrt(frequent / rows)
        )
        # The token before the query is the answer where nothing lies between, too.
        luck = {"last value": 1 / 15 + 14 / 15 / (task.seq_len - 2)}
        for name, score in scores.items():
            expected = luck.get(name, 1 / 15)
            assert score == pytest.approx(expected, abs=5 * sqrt(expected / rows)), name
