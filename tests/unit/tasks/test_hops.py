"""Hops: the cycle, chains of links, marginals, shortcuts and the limits of its options."""

from math import sqrt

import pytest

from tasks.base import accuracy
from tasks.hops import COUNT, Hops
from tests.statistics import assert_uniform


def test_links_are_one_cycle_and_every_entity_is_asked_once():
    for row in Hops(seq_len=64, n_pairs=9, vocab_size=16).batch(size=50).inputs.tolist():
        link = dict(zip(row[:18:2], row[1:18:2], strict=True))
        entity, seen = row[0], set()
        while entity not in seen:
            seen.add(entity)
            entity = link[entity]
        assert len(seen) == 9
        assert sorted(row[19:37:2]) == sorted(seen)


@pytest.mark.parametrize("hops", [1, 2, 5])
def test_chains_lead_from_the_query_to_the_answer(hops: int):
    batch = Hops(seq_len=50, n_pairs=8, hops=hops, vocab_size=20).batch(split="test", size=20)
    links = {name: tensor.tolist() for name, tensor in batch.links.items()}
    assert batch.links["chain_key_pos"].shape == (20, 8, hops)
    for i, row in enumerate(batch.inputs.tolist()):
        for q in range(8):
            entity = row[17 + 2 * q]
            assert links["query_pos"][i][q] == 17 + 2 * q
            for j in range(hops):
                key, value = links["chain_key_pos"][i][q][j], links["chain_value_pos"][i][q][j]
                assert row[:16:2].index(entity) * 2 == key == value - 1
                entity = row[value]
            answer = links["answer_pos"][i][q]
            assert answer == links["chain_value_pos"][i][q][-1]
            assert links["distance"][i][q] == 17 + 2 * q - answer
            assert int(batch.targets[i, 17 + 2 * q]) == entity == row[answer]


def test_a_mixture_is_told_by_its_token():
    task = Hops(seq_len=40, n_pairs=7, vocab_size=20).replace(hops=(1, 3, 5))
    batch = task.batch(size=900)
    told = batch.inputs[batch.roles == COUNT]
    assert_uniform(told // 2, 0, 3)
    assert told.tolist() == [[1, 3, 5][s] for s in batch.links["setting"][:, 0].tolist()]
    chain = (batch.links["chain_key_pos"] >= 0).sum(2)
    assert (chain == told[:, None]).all()


def test_marginals_are_uniform():
    task = Hops(seq_len=17, n_pairs=4, vocab_size=13)
    batch = task.batch(size=20_000)
    for p in (0, 1, 6, 9, 15):
        assert_uniform(batch.inputs[:, p], 6, 13)
    assert_uniform((batch.links["answer_pos"][:, 0] - 1) // 2, 0, 4)
    # Where the first pair's target is a source: in any other pair.
    target, sources = batch.inputs[:, 1, None], batch.inputs[:, 2:8:2]
    assert_uniform((target == sources).long().argmax(1), 0, 3)


def test_shortcuts_score_what_they_say():
    task = Hops(seq_len=100, n_pairs=8)
    batch = task.batch(size=1_000)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    for name in ("one hop", "a hop too few", "a hop too many", "one hop back"):
        assert scores[name] == 0, name
    assert scores["last value"] == pytest.approx(1 / 8, abs=1e-9)
    for name, expected in (
        ("context value", 1 / 8),
        ("position only", 1 / 8),
        ("no neighbour", 1 / 5),
        ("most recent match", 1 / 16),
    ):
        # Matches of one row go together, up to twice the spread of independent ones.
        spread = 10 * sqrt(expected * (1 - expected) / 8_000)
        assert scores[name] == pytest.approx(expected, abs=spread), name


def test_what_stands_beside_an_entity_is_what_a_loop_finds():
    task = Hops(seq_len=29, n_pairs=7, hops=5, vocab_size=24)
    batch, rules = task.batch(size=20), task.shortcuts()
    back, apart = (rules[name](batch) for name in ("one hop back", "no neighbour"))
    for i, row in enumerate(batch.inputs.tolist()):
        pairs = list(zip(row[:14:2], row[1:14:2], strict=True))
        for p in range(15, 29, 2):
            near = [pair for pair in pairs if row[p] in pair]
            assert back[i, p] == next(a for a, b in near if b == row[p])
            tied = {entity for pair in near for entity in pair}
            assert apart[i, p] == next(a for a, _ in pairs if a not in tied)
