"""Copying: its lengths, marginals, answers, links, shortcuts and the limits of its options."""

import pytest
import torch

from tasks.base import IGNORE, accuracy
from tasks.copying import MARK, STRING, Copy
from tests.statistics import assert_uniform

every_mode = pytest.mark.parametrize("mode", ["copy", "prefix", "suffix"])


@every_mode
def test_lengths_and_symbols_are_uniform(mode):
    task = Copy(mode=mode, seq_len=24, shortest=8, vocab_size=11)
    batch = task.batch(size=10_000)
    length = (batch.roles == STRING).sum(1)
    assert_uniform(length, 8, task.longest + 1)
    assert_uniform(batch.inputs[batch.roles == STRING], 1, 11)
    # A key begins anywhere where what follows it has room.
    if mode != "copy":
        begins = batch.links["value_pos"][:, 0] - 2 - (3 if mode == "prefix" else 0)
        assert begins.min() == 0
        assert (begins <= length - 4).all()
        assert (begins == length - 4).any()


def test_a_copy_is_its_string():
    batch = Copy(seq_len=21, vocab_size=5).batch(size=100)
    for row, target in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        n = row.index(0)
        assert row[n + 1 : 2 * n] == row[: n - 1]
        assert target == [IGNORE] * n + row[:n] + [IGNORE] * (21 - 2 * n)


@every_mode
def test_without_repeats_no_token_comes_twice(mode):
    task = Copy(mode=mode, seq_len=20, vocab_size=20, repeats=False)
    batch = task.batch(size=300)
    for row, role in zip(batch.inputs.tolist(), batch.roles.tolist(), strict=True):
        string = [token for token, r in zip(row, role, strict=True) if r == STRING]
        assert len(set(string)) == len(string)
    assert_uniform(batch.inputs[:, 5 if mode == "prefix" else 0], 1, 20)


@pytest.mark.parametrize(
    ("options", "least"),
    [({"seq_len": 9}, 1), ({"mode": "suffix", "seq_len": 30}, 5), ({"shortest": 3}, 3)]
    + [({"mode": mode, "seq_len": 17, "query_len": 3}, 6) for mode in ("prefix", "suffix")],
)
def test_the_shortest_string_has_room_for_a_key(options: dict, least: int):
    task = Copy(**options)
    assert task.least == least
    assert (task.batch(size=2_000).roles == STRING).sum(1).min() == least


def test_shortcuts_score_what_they_say():
    task = Copy()
    batch = task.batch(split="test", size=400)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    # A string of n tokens: n − 1 questions, each right where its token comes once, or by luck.
    n = torch.arange(20, 101, dtype=torch.float64)
    once = (62 / 63) ** (n - 1)
    expected = ((n - 1) * (once + (1 - once) / 63)).sum() / n.sum()
    assert scores["most recent match"] == pytest.approx(expected.item(), abs=0.02)
    for name in ("last token", "bigram", "position only"):
        assert scores[name] == pytest.approx(1 / 63, abs=0.01), name


@pytest.mark.parametrize(
    ("options", "first", "two"),
    [
        ({}, 0.615, 0.975),
        (Copy.presets["small"].options, 0.83, 0.90),
        ({"mode": "suffix"}, 0.49, 0.993),
        ({"mode": "prefix"}, 0.24, 0.24),
    ],
)
def test_two_tokens_nearly_solve_random_strings(options: dict, first: float, two: float):
    task = Copy(**options)
    batch = task.batch(split="test", size=500)
    rules = task.shortcuts()
    assert accuracy(rules["first match"](batch), batch.targets) == pytest.approx(first, abs=0.06)
    found = accuracy(rules["two tokens"](batch), batch.targets)
    assert found == pytest.approx(two, abs=0.06 if task.mode == "prefix" else 0.01)


@pytest.mark.parametrize("rule", ["most recent match", "first match", "two tokens"])
def test_a_match_suffices_without_repeats(rule: str):
    task = Copy(seq_len=60, repeats=False)
    batch = task.batch(size=50)
    answers = task.shortcuts()[rule](batch)
    wrong = (answers != batch.targets) & (batch.targets != IGNORE)
    assert wrong.equal(batch.roles == MARK)
    suffix = task.replace(mode="suffix")
    batch = suffix.batch(size=50)
    assert accuracy(suffix.shortcuts()[rule](batch), batch.targets) == 1
