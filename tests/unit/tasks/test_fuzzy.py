"""Fuzzy recall: motifs and where they stand, links, marginals, shortcuts, limits of its options."""

from itertools import groupby

import pytest
import torch

from tasks.base import IGNORE, Batch, accuracy
from tasks.fuzzy import ANSWER, Fuzzy
from tests.statistics import assert_uniform

Pairs = list[tuple[tuple[int, ...], tuple[int, ...]]]


def motifs(row: list[int], half: int) -> Pairs:
    """Return the pairs of a row, split where values begin and end."""
    kinds = [(token >= half, token) for token in row if token]
    runs = [tuple(token for _, token in run) for _, run in groupby(kinds, lambda kind: kind[0])]
    return list(zip(runs[::2], runs[1::2], strict=True))


def test_every_pair_stands_twice_and_keys_are_distinct():
    # As many keys as tokens for them: one of each would do, were all keys drawn that short.
    task = Fuzzy(**Fuzzy.presets["published"].options)
    for row in task.batch(size=200).inputs.tolist():
        pairs = motifs(row, 8)
        assert len(pairs) == 14
        assert sorted(pairs[:7]) == sorted(pairs[7:])
        assert len({key for key, _ in pairs}) == 7
        assert all(1 <= len(motif) <= 3 for pair in pairs for motif in pair)


def test_scored_positions_lead_to_the_next_token():
    """The row is teacher-forced: a target is the token that comes next, and is part of a value."""
    batch = Fuzzy().batch(size=20)
    scored = batch.targets[:, :-1] != IGNORE
    assert batch.targets[:, :-1][scored].equal(batch.inputs[:, 1:][scored])
    assert (batch.roles[:, 1:][scored] == ANSWER).all()


def test_links_are_what_a_loop_finds():
    task = Fuzzy(seq_len=60, n_pairs=4, max_value_len=4, vocab_size=12)
    batch = task.batch(split="test", size=50)
    links = {name: tensor.tolist() for name, tensor in batch.links.items()}
    for i, row in enumerate(batch.inputs.tolist()):
        pairs, expected, position = motifs(row, 6), [], 0
        starts: list[int] = []
        for n, (key, value) in enumerate(pairs):
            starts.append(position)
            if n >= 4:
                which = pairs.index((key, value))
                for j in range(len(value)):
                    query = position + len(key) - 1 + j
                    stored = starts[which] + len(key) + j
                    expected.append((query, stored - 1, stored, which, query - stored))
                    assert int(batch.targets[i, query]) == row[stored]
                    assert row[query] == row[stored - 1]
            position += len(key) + len(value)
        expected += [(-1,) * 5] * (16 - len(expected))
        names = ("query_pos", "key_pos", "value_pos", "motif", "distance")
        assert list(zip(*(links[name][i] for name in names), strict=True)) == expected


def test_marginals_are_uniform():
    task = Fuzzy(seq_len=30, n_pairs=3, max_key_len=2, vocab_size=14)
    batch = task.batch(size=20_000)
    assert_uniform(batch.inputs[:, 0], 1, 7)
    position = batch.links["value_pos"]
    assert_uniform(batch.inputs.gather(1, position[:, :1]), 7, 14)
    assert_uniform(batch.links["motif"][:, 0], 0, 3)
    key_len = (batch.inputs[:, :3] < 7).long().cumprod(1).sum(1)
    assert_uniform(key_len - 1, 0, 2)
    longer = batch.inputs[key_len == 2]
    assert_uniform((longer[:, 0] - 1) * 6 + longer[:, 1] - 1, 0, 36)
    value_len = (batch.inputs >= 7)[
        torch.arange(20_000)[:, None], key_len[:, None] + torch.arange(4)
    ]
    assert_uniform(value_len.long().cumprod(1).sum(1) - 1, 0, 3)


def test_the_oracle_looks_at_earlier_tokens_alone():
    task = Fuzzy(seq_len=128, n_pairs=7, vocab_size=16)
    batch = task.batch(size=20)
    whole = task.oracle(batch)
    for end in (40, 70):
        cut = batch.inputs.clone()
        cut[:, end:] = 0
        part = task.oracle(Batch(cut, batch.targets, batch.roles, batch.links))
        assert part[:, :end].equal(whole[:, :end])


def test_shortcuts_score_what_they_say():
    def scores(task: Fuzzy) -> dict[str, float]:
        batch = task.batch(split="test", size=400)
        rules = task.shortcuts()
        return {name: accuracy(rule(batch), batch.targets) for name, rule in rules.items()}

    found = scores(Fuzzy())
    assert found["most recent match"] == pytest.approx(1 / 2, abs=0.04)
    assert found["first match"] == pytest.approx(0.65, abs=0.03)
    assert found["two tokens"] == pytest.approx(0.946, abs=0.01)
    assert found["last value"] == pytest.approx(1 / 32, abs=0.02)
    assert found["position only"] == pytest.approx(1 / 32, abs=0.02)
    assert scores(Fuzzy(vocab_size=512))["most recent match"] > 0.9
