"""Brevo: graphs, orders, several right answers, and the scores of its shortcuts."""

from collections import Counter
from itertools import permutations
from math import sqrt

import pytest
import torch

from tasks.base import IGNORE, accuracy
from tasks.brevo import ASK, EQUALS, Brevo
from tests.statistics import assert_uniform

Parents = dict[int, set[int]]


def read(row: list[int]) -> tuple[Parents, int, list[int]]:
    """Return the parents of each node, the node asked for and the answer, by hand."""
    row = row[: row.index(0)] if 0 in row else row
    at = row.index(ASK)
    parents: Parents = {node: set() for node in row[:at]}
    for parent, child in zip(row[:at:2], row[1:at:2], strict=True):
        assert parent not in parents[child]
        parents[child].add(parent)
    assert row[at + 2] == EQUALS
    return parents, row[at + 1], row[at + 3 :]


def list_orders(parents: Parents, query: int) -> list[tuple[int, ...]]:
    """Return all right answers: every order of the ancestors in which parents come first."""
    wanted = {query}
    for _ in parents:
        wanted |= {parent for node in wanted for parent in parents[node]}
    return [
        order
        for order in permutations(wanted)
        if all(parents[node] <= set(order[:i]) for i, node in enumerate(order))
    ]


@pytest.mark.parametrize("options", [{"n_nodes": 6, "max_degree": 2}, {"n_nodes": 7}])
def test_legal_are_the_next_nodes_of_all_right_orders_that_begin_so(options):
    batch = Brevo(seq_len=64, vocab_size=12, **options).batch(size=60)
    legal = batch.links["legal"]
    for r, row in enumerate(batch.inputs.tolist()):
        parents, query, answer = read(row)
        orders = list_orders(parents, query)
        assert tuple(answer) in orders
        first = row.index(EQUALS)
        for step in range(len(answer)):
            right = {order[step] for order in orders if [*order[:step]] == answer[:step]}
            assert set(legal[r, first + step].tolist()) - {-1} == right
            assert batch.targets[r, first + step] == answer[step]
        scored = batch.targets[r] != IGNORE
        assert scored.nonzero()[:, 0].tolist() == [*range(first, first + len(answer))]
        assert (legal[r][~scored] == -1).all()


def test_every_right_answer_counts_and_no_other():
    batch = Brevo(seq_len=64, n_nodes=7, vocab_size=12).batch(size=100)
    scored, legal = batch.targets != IGNORE, batch.links["legal"]
    highest = legal.amax(2)
    assert (highest != batch.targets)[scored].any()
    assert batch.find_nearest(highest)[scored].equal(highest[scored])
    for token in range(12):
        given = torch.full_like(batch.targets, token)
        right = (legal == token).any(2)
        assert (batch.find_nearest(given) == given).equal(right)
        assert batch.find_nearest(given)[~right].equal(batch.targets[~right])
    part = batch[10:20]
    assert part.find_nearest(highest[10:20]).equal(batch.find_nearest(highest)[10:20])


def test_degrees_are_limited_and_reached():
    parents_of, children_of, sources = Counter(), Counter(), Counter()
    for row in Brevo(seq_len=150, n_nodes=13, max_degree=3).batch(size=500).inputs.tolist():
        parents, query, _ = read(row)
        children = Counter(parent for found in parents.values() for parent in found)
        parents_of.update(map(len, parents.values()))
        children_of.update(children.values())
        assert query not in children
        sources[sum(not found for found in parents.values())] += 1
    assert max(parents_of) == max(children_of) == 3
    # Up to 4 nodes have no parents; of these some have no children either, and are not shown.
    assert max(sources) == 4


def test_orders_are_drawn_from_their_end():
    # Nodes 1 and 2 have no parents, 3 or 4 of them; where 3 and 4 are both asked for.
    task = Brevo(seq_len=24, n_nodes=5, max_degree=2, vocab_size=8)
    last: Counter[int] = Counter()
    total, expected = 0, 0.0
    for row in task.batch(size=20_000).inputs.tolist():
        parents, _, answer = read(row)
        free = [n for n in answer[:-1] if all(n not in parents[c] for c in answer[:-1])]
        if len(free) == 2:
            last[answer[-2] == min(free)] += 1
            total, expected = total + 1, expected + 1 / 2
    assert total > 1_000
    assert last[True] == pytest.approx(expected, abs=5 * sqrt(total / 4))


def test_marginals_are_uniform():
    batch = Brevo(seq_len=24, n_nodes=5, max_degree=2, vocab_size=9).batch(size=20_000)
    assert_uniform(batch.inputs[:, 0], 3, 9)
    at = (batch.inputs == ASK).long().argmax(1, keepdim=True)
    assert_uniform(batch.inputs.gather(1, at + 1), 3, 9)


def test_shortcuts_score_what_they_say():
    task = Brevo()
    batch = task.batch(split="test", size=500)
    expected = {"whole graph": 0.69, "parents only": 0.42, "most recent match": 0.20}
    for name, value in expected.items():
        answers = task.shortcuts()[name](batch)
        found = accuracy(answers, batch.find_nearest(answers))
        assert found == pytest.approx(value, abs=0.03), name
    assert task.chance == pytest.approx(0.037, abs=0.002)
