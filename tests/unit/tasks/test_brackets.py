"""Brackets: how strings are drawn, which gaps there are, links and the scores of shortcuts."""

from math import sqrt

import pytest
import torch

from tasks.base import accuracy
from tasks.brackets import OPEN, QUERY, Brackets
from tests.statistics import assert_uniform


def compute_depths(seq_len: int, max_depth: int) -> torch.Tensor:
    """Return how likely each depth is at each position, [t m], by the rule of CogScale's strings.

    Where none is open a bracket opens; where as many are open as brackets are left, or `max_depth`,
    it closes; else each is as likely.
    """
    p = torch.zeros(seq_len + 1, max_depth + 1, dtype=torch.float64)
    p[0, 0] = 1
    for i in range(seq_len):
        for depth in range(max_depth + 1):
            full = depth in (max_depth, seq_len - i)
            opens = 1.0 if depth == 0 else 0.0 if full else 0.5
            if opens:
                p[i + 1, depth + 1] += opens * p[i, depth]
            if depth:
                p[i + 1, depth - 1] += (1 - opens) * p[i, depth]
    return p[1:]


@pytest.mark.parametrize(("seq_len", "max_depth"), [(50, 5), (100, 10), (12, 6), (8, 2)])
def test_depths_are_distributed_as_published(seq_len, max_depth):
    rows = 10_000
    batch = Brackets(seq_len=seq_len, n_kinds=2, max_depth=max_depth).batch(size=rows)
    depth = torch.where(batch.roles == OPEN, 1, -1).cumsum(1)
    assert depth.min() == 0
    assert depth.max() == max_depth
    for position, p in enumerate(compute_depths(seq_len, max_depth)):
        counts = torch.bincount(depth[:, position], minlength=max_depth + 1).double()
        assert not counts[p == 0].any()
        often = p * rows >= 5
        freedom = int(often.sum()) - 1
        statistic = ((counts - p * rows) ** 2 / (p * rows))[often].sum().item()
        assert statistic <= freedom + 6 * sqrt(2 * max(freedom, 1)), position


def test_kinds_are_uniform_and_closing_brackets_gaps_as_often_as_said():
    batch = Brackets(seq_len=20, n_kinds=5, max_depth=4, p_gap=0.25).batch(size=10_000)
    opened = batch.inputs[batch.roles == OPEN]
    assert_uniform((opened - 1) // 2, 0, 5)
    # The last bracket is always a gap.
    gaps = (batch.roles[:, :-1] == QUERY).sum().item()
    closed = 10_000 * 9
    assert gaps / closed == pytest.approx(0.25, abs=5 * sqrt(0.25 * 0.75 / closed))
    assert (batch.roles[:, -1] == QUERY).all()


def test_kinds_and_depths_are_asked_of_the_same_rows():
    kind, depth = (Brackets(ask=ask).batch(size=50) for ask in ("kind", "depth"))
    assert kind.inputs.equal(depth.inputs)
    assert kind.roles.equal(depth.roles)
    left = torch.where(depth.roles == OPEN, 1, -1).cumsum(1)
    gap = depth.roles == QUERY
    assert depth.targets[gap].equal(17 + left[gap])


def test_links_lead_to_the_bracket_that_is_closed():
    batch = Brackets(n_kinds=3).batch(size=50)
    for row in range(50):
        query, opened = (batch.links[name][row] for name in ("query_pos", "open_pos"))
        asked = query >= 0
        closes = batch.targets[row, query[asked]]
        assert batch.inputs[row, opened[asked]].equal(closes - 1)
        steps = torch.where(batch.roles[row] == OPEN, 1, -1)
        for end, begin in zip(query[asked].tolist(), opened[asked].tolist(), strict=True):
            assert steps[begin : end + 1].sum() == 0
            assert (steps[begin:end].cumsum(0) > 0).all()


@pytest.mark.parametrize(
    ("options", "last", "outermost", "skipped", "position"),
    [
        ({}, 0.604, 0.283, 0.727, 0.128),
        ({"ask": "depth"}, 0.549, 0.179, 0.048, 0.352),
        ({"p_gap": 1.0}, 0.612, 0.270, 0.612, 0.125),
    ],
)
def test_shortcuts_score_what_they_say(options, last, outermost, skipped, position):
    task = Brackets(**options)
    batch = task.batch(split="test", size=1_000)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    assert scores["last opened"] == pytest.approx(last, abs=0.015)
    assert scores["outermost bracket"] == pytest.approx(outermost, abs=0.015)
    assert scores["gaps skipped"] == pytest.approx(skipped, abs=0.015)
    assert scores["position only"] == pytest.approx(position, abs=0.015)
