"""Stacks: how operations are drawn, links, shortcuts and growth."""

import pytest
import torch

from tasks.base import accuracy
from tasks.stack import PUSH, Stack
from tests.statistics import assert_uniform


def replay(task: Stack, rows: int) -> list[list[tuple[bool, int, bool, int]]]:
    """Return of each operation whether it pushes, its stack, whether that was empty, its push."""
    replayed = []
    for row in task.batch(size=rows).inputs.tolist():
        stacks, operations = {}, []
        for place in range(task.seq_len // 3):
            operation, name, _ = row[3 * place : 3 * place + 3]
            on = stacks.setdefault(name, [])
            empty, push = not on, operation == PUSH
            on.append(place) if push else None
            operations.append((push, name, empty, place if push else on.pop()))
        replayed.append(operations)
    return replayed


def test_half_of_the_operations_on_stacks_that_hold_something_are_pops():
    # 10,000 rows of 8 operations, whose last is on the stack of the first.
    replayed = replay(Stack(seq_len=24, n_stacks=3), 10_000)
    free = [operation for row in replayed for operation in row[:-1]]
    assert all(push for push, _, empty, _ in free if empty)
    assert_uniform(torch.tensor([push for push, _, empty, _ in free if not empty]).long(), 0, 2)
    assert_uniform(torch.tensor([name for _, name, _, _ in free]), 3, 6)
    for row in replayed:
        push, name, empty, _ = row[-1]
        assert name == row[0][1]
        assert push == empty


def test_elements_are_uniform_and_independent_of_the_one_before():
    task = Stack(seq_len=30, n_stacks=30, vocab_size=66)
    batch = task.batch(size=5_000)
    pushed = (batch.inputs[:, ::3] == PUSH)[:, :2].all(1)
    element = batch.inputs[:, 2::3][pushed, :2] - 33
    assert_uniform(element, 0, 33)
    assert_uniform(element[:, 0] * 33 + element[:, 1], 0, 33**2)


def test_links_lead_to_the_push():
    task = Stack(seq_len=50, n_stacks=2, vocab_size=16)
    links = task.batch(size=50).links
    for row, operations in enumerate(replay(task, 50)):
        pops = [
            (3 * i + 1, 3 * at + 2) for i, (push, _, _, at) in enumerate(operations) if not push
        ]
        query, value = (links[name][row].tolist() for name in ("query_pos", "value_pos"))
        assert list(zip(query, value, strict=True))[: len(pops)] == pops
        assert set(query[len(pops) :]) <= {-1}


@pytest.mark.parametrize(
    ("options", "latest", "oldest", "one", "last"),
    [
        ({}, 0.749, 0.355, 0.143, 0.110),
        ({"n_stacks": 64}, 0.970, 0.790, 0.048, 0.041),
        ({"n_stacks": 1, "seq_len": 48}, 0.705, 0.300, 1.0, 0.705),
    ],
)
def test_shortcuts_score_what_they_say(options, latest, oldest, one, last):
    task = Stack(**options)
    batch = task.batch(split="test", size=1_000)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    assert scores["most recent match"] == pytest.approx(latest, abs=0.015)
    assert scores["oldest element"] == pytest.approx(oldest, abs=0.015)
    assert scores["one stack"] == pytest.approx(one, abs=0.015)
    assert scores["last element"] == pytest.approx(last, abs=0.015)
    assert scores["position only"] == pytest.approx(task.chance, abs=0.01)


def test_shorter_rows_have_fewer_stacks():
    assert Stack(seq_len=1024, n_stacks=64).resize(32).options["n_stacks"] == 2
    assert Stack(n_stacks=1).resize(64).options["n_stacks"] == 1
