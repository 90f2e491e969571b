"""Flip-flop: its marginals, memory, links, shortcuts and the limits of its options."""

from math import sqrt

import pytest

from tasks.base import IGNORE, accuracy
from tasks.flip_flop import BIT, INSTRUCTION, QUERY, READ, SKIP, WRITE, FlipFlop
from tests.statistics import assert_uniform


def test_instructions_and_bits_alternate():
    batch = FlipFlop(seq_len=40).batch(size=100)
    instruction, bit = batch.inputs[:, ::2], batch.inputs[:, 1::2]
    assert (instruction >= WRITE).all()
    assert (bit < WRITE).all()
    assert (instruction[:, 0] == WRITE).all()
    assert (instruction[:, -1] == READ).all()
    assert ((batch.roles[:, ::2] == QUERY) == (instruction == READ)).all()
    assert ((batch.roles[:, ::2] == INSTRUCTION) == (instruction != READ)).all()
    assert (batch.roles[:, 1::2] == BIT).all()
    assert ((batch.targets != IGNORE) == (batch.roles == QUERY)).all()


@pytest.mark.parametrize("p_ignore", [0.1, 0.8, 0.98])
def test_instructions_are_as_likely_as_said(p_ignore: float):
    task = FlipFlop(seq_len=64, p_ignore=p_ignore)
    between = task.batch(size=2_000).inputs[:, 2:-2:2]
    n, p_write = between.numel(), (1 - p_ignore) / 2
    for token, p in ((SKIP, p_ignore), (WRITE, p_write), (READ, p_write)):
        spread = 5 * sqrt(p * (1 - p) / n)
        assert (between == token).double().mean().item() == pytest.approx(p, abs=spread)


def test_bits_are_fair_whatever_the_instruction():
    batch = FlipFlop(seq_len=64, p_ignore=0.5).batch(size=2_000)
    instruction, bit = batch.inputs[:, ::2], batch.inputs[:, 1::2]
    for token in (WRITE, SKIP):
        assert_uniform(bit[instruction == token], 0, 2)
    assert_uniform(bit[:, -1], 0, 2)


def test_links_lead_to_the_latest_write():
    task = FlipFlop(seq_len=50, p_ignore=0.6)
    batch = task.batch(size=100)
    names = ("query_pos", "key_pos", "value_pos", "distance")
    assert all(batch.links[name].shape == (100, 25) for name in names)
    for r, row in enumerate(batch.inputs.tolist()):
        expected = []
        for query in range(0, 50, 2):
            if row[query] == READ:
                key = max(i for i in range(0, query, 2) if row[i] == WRITE)
                expected.append((query, key, key + 1, query - key - 1))
        found = list(zip(*(batch.links[name][r].tolist() for name in names), strict=True))
        assert found == expected + [(-1,) * 4] * (25 - len(expected))


def test_shortcuts_score_what_they_say():
    task = FlipFlop()
    batch = task.batch(split="test", size=1_000)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    # Reads between two writes are right or wrong together: as many draws as writes, 26 a row.
    spread = 5 * sqrt(1 / 4 / (1_000 * 26))
    assert scores["most recent bit"] == pytest.approx(0.6, abs=spread)
    assert scores["first write"] == pytest.approx(0.52, abs=spread)
    assert scores["majority"] == pytest.approx(0.58, abs=spread)
    # The first read of a row, one of 26, has none before it.
    assert scores["most recent match"] == pytest.approx(0.75 * (1 - 1 / 27), abs=spread)
