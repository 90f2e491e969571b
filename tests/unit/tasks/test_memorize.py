"""Memorising: its map, marginals, keys, shortcuts and the limits of its options."""

from math import sqrt

import pytest
import torch

from tasks.base import IGNORE, accuracy
from tasks.memorize import Memorize
from tests.statistics import assert_uniform


def learnt(task: Memorize, split: str, seed: int, size: int = 2_000) -> dict[int, int]:
    """Return the value of each fact that a split asks for, which must be one alone."""
    batch = task.batch(split=split, size=size, seed=seed)
    value = batch.targets.gather(1, batch.links["query_pos"])
    pairs = set(zip(batch.links["fact"].flatten().tolist(), value.flatten().tolist(), strict=True))
    facts = dict(pairs)
    assert len(facts) == len(pairs)
    return facts


def test_splits_share_the_facts_and_seeds_do_not():
    task = Memorize(seq_len=64, n_facts=300, vocab_size=64)
    facts = learnt(task, "train", 3)
    assert sorted(facts) == list(range(300))
    assert learnt(task, "test", 3) == facts
    same = sum(facts[f] == value for f, value in learnt(task, "train", 4).items())
    assert same / 300 == pytest.approx(1 / 32, abs=5 * sqrt(1 / 32 / 300))


def test_a_key_is_its_facts_number():
    task = Memorize(seq_len=100, n_facts=5_000, vocab_size=20)
    batch = task.batch(size=200)
    first, fact = batch.links["key_pos"], batch.links["fact"]
    number = torch.zeros_like(fact)
    for place in range(task.key_len):
        number = number * 9 + batch.inputs.gather(1, first + place) - 1
    assert number.equal(fact)
    assert batch.links["query_pos"].equal(first + task.key_len)
    assert (batch.inputs.gather(1, batch.links["query_pos"]) == 0).all()


def test_facts_and_values_are_uniform():
    task = Memorize(seq_len=64, n_facts=200, vocab_size=64)
    assert_uniform(task.batch(size=3_000).links["fact"], 0, 200)
    large = Memorize(seq_len=64, n_facts=2**20, vocab_size=64).batch(size=3_000)
    assert_uniform(large.targets[large.targets != IGNORE], 32, 64)


def test_shortcuts_score_what_they_say():
    """Against counts over the whole map, from the rows that ask for it."""
    task = Memorize(seq_len=256, n_facts=500, vocab_size=64)
    facts = learnt(task, "train", 7)
    value = torch.tensor([facts[f] for f in range(500)])
    common = torch.bincount(value).max().item() / 500
    digit = torch.arange(500) % 31
    table = torch.zeros(31, 64).index_put_((digit, value), torch.ones(500), accumulate=True)
    by_digit = table.amax(1).sum().item() / 500
    batch = task.batch(split="test", size=1_000, seed=7)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    spread = 5 * sqrt(1 / 4 / (1_000 * 85))
    assert scores["most frequent value"] == pytest.approx(common, abs=spread)
    assert scores["last digit"] == pytest.approx(by_digit, abs=spread)
