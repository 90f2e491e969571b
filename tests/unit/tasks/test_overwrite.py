"""Overwriting: the order of writes, links, marginals, shortcuts and the limits of its options."""

from math import comb, sqrt

import pytest
import torch

from tasks.base import accuracy
from tasks.overwrite import Overwrite
from tests.statistics import assert_uniform


def test_every_key_gets_as_many_values_all_distinct_and_is_asked_once():
    batch = Overwrite(n_pairs=8, vocab_size=70).batch(size=50)
    first = batch.links["first_value_pos"].tolist()
    for row, first_written in zip(batch.inputs.tolist(), first, strict=True):
        keys, values = row[:64:2], row[1:64:2]
        assert len(set(keys)) == 8
        assert all(keys.count(key) == 4 for key in keys)
        assert len(set(values)) == 32
        assert sorted(row[64:80:2]) == sorted(set(keys))
        assert first_written == [2 * keys.index(key) + 1 for key in row[64:80:2]]


@pytest.mark.parametrize("spacing", [1, 2, 5, 7])
def test_groups_of_keys_are_written_in_rounds(spacing):
    task = Overwrite(n_pairs=7, rewrites=2, spacing=spacing)
    gaps: set[int] = set()
    for row in task.batch(size=200).inputs.tolist():
        keys = row[:42:2]
        while keys:
            size = min(spacing, len(keys) // 3)
            group, keys = keys[: 3 * size], keys[3 * size :]
            rounds = [set(group[i : i + size]) for i in range(0, 3 * size, size)]
            assert rounds[0] == rounds[1] == rounds[2]
            assert len(rounds[0]) == size
            gaps |= {group[i + 1 :].index(group[i]) + 1 for i in range(2 * size)}
    assert gaps == set(range(1, 2 * spacing))


def test_marginals_are_uniform():
    task = Overwrite(seq_len=32, n_pairs=4, rewrites=1, spacing=4, vocab_size=23)
    batch = task.batch(size=20_000)
    for i in (0, 3, 7):
        assert_uniform(batch.inputs[:, 2 * i], 1, 11)
        assert_uniform(batch.inputs[:, 2 * i + 1], 11, 23)
    both = (batch.inputs[:, 0] - 1) * 12 + batch.inputs[:, 1] - 11
    assert_uniform(both, 0, 120)
    for q in (0, 3):
        assert_uniform((batch.links["value_pos"][:, q] - 9) // 2, 0, 4)
        assert_uniform((batch.links["first_value_pos"][:, q] - 1) // 2, 0, 4)


@pytest.mark.parametrize("spacing", [8, None])
def test_shortcuts_score_what_they_say(spacing):
    task = Overwrite(n_pairs=8, spacing=spacing)
    batch = task.batch(size=1_000)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    # A write m from the end, m < 8, is the latest of its key if the other three are before it.
    latest = sum(comb(31 - m, 3) / comb(31, 3) for m in range(8)) / 8
    assert scores["first written"] == 0
    assert scores["last value"] == pytest.approx(1 / 8, abs=1e-9)
    for name, expected in (
        ("written value", 1 / 4),
        ("context value", 1 / 32),
        ("position only", 1 / 8 * (1 if spacing else latest)),
    ):
        spread = 5 * sqrt(expected * (1 - expected) / 8_000)
        assert scores[name] == pytest.approx(expected, abs=spread), name


def test_a_written_value_is_any_of_the_key_asked():
    task = Overwrite(n_pairs=6, vocab_size=64)
    batch = task.batch(size=500)
    answers = task.shortcuts()["written value"](batch)
    which: list[int] = []
    for row, answer in zip(batch.inputs.tolist(), answers.tolist(), strict=True):
        for query in range(48, 60, 2):
            written = [row[p + 1] for p in range(0, 48, 2) if row[p] == row[query]]
            which.append(written.index(answer[query]))
    assert_uniform(torch.tensor(which), 0, 4)
