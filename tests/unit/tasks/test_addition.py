"""Addition: numbers, carries, links and shortcuts."""

from typing import get_args

import pytest
import torch

from tasks.addition import Addition, Order
from tasks.base import IGNORE, accuracy
from tests.statistics import assert_uniform


def read_numbers(task: Addition, row: list[int]) -> tuple[list[int], list[int]]:
    """Return the digits of both numbers of a row, lowest first."""
    n = row.index(task.base)
    first, second = row[:n], row[n + 1 : row.index(task.base + 1)]
    return (first, second) if task.order == "reversed" else (first[::-1], second[::-1])


@pytest.mark.parametrize("order", get_args(Order))
def test_the_answer_is_the_sum_in_the_order_that_is_asked(order: Order):
    task = Addition(seq_len=20, base=7, order=order)
    batch = task.batch(size=200)
    for row, target in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        numbers = read_numbers(task, row)
        digits = [digit for digit in target if digit != IGNORE]
        total = sum(int("".join(map(str, digits[::-1])), 7) for digits in numbers)
        written = "".join(map(str, digits if order == "plain" else digits[::-1]))
        assert int(written, 7) == total
        equals = row.index(8)
        assert row[equals + 1 : equals + len(digits)] == digits[:-1]
        assert target[equals : equals + len(digits)] == digits


def test_lengths_and_digits_are_drawn_as_said():
    task = Addition(seq_len=62, p_chain=0.1)
    batch = task.batch(size=10_000)
    plus = (batch.inputs == 10).int().argmax(1)
    assert_uniform(plus, 4, 21)
    # With one in ten places summing to nine, digits are uniform and independent.
    full = batch.inputs[plus == 20]
    first, second = full[:, :20], full[:, 21:41]
    assert_uniform(first * 10 + second, 0, 100)
    task = Addition(seq_len=62, shortest=20, p_chain=0.7)
    row = task.batch(size=2_000).inputs
    total = row[:, :20] + row[:, 21:41]
    assert (total == 9).double().mean().item() == pytest.approx(0.7, abs=0.012)
    assert (total > 9).double().mean().item() == pytest.approx(0.15, abs=0.01)


@pytest.mark.parametrize("order", get_args(Order))
def test_links_name_the_digits_of_the_place_and_the_chain_below_it(order: Order):
    task = Addition(seq_len=32, order=order)
    batch = task.batch(size=100)
    for row, links in enumerate(zip(*(batch.links[n].tolist() for n in batch.links), strict=True)):
        link = dict(zip(batch.links, links, strict=True))
        tokens = batch.inputs[row].tolist()
        first, second = read_numbers(task, tokens)
        n = len(first)
        for nth, query in enumerate(link["query_pos"][: n + 1]):
            place = n - nth if order == "plain" else nth
            assert query == 2 * n + 1 + nth
            chain = 0
            while chain < place and first[place - chain - 1] + second[place - chain - 1] == 9:
                chain += 1
            assert link["chain"][nth] == chain
            if place == n:
                assert link["first_pos"][nth] == link["second_pos"][nth] == -1
            else:
                assert tokens[link["first_pos"][nth]] == first[place]
                assert tokens[link["second_pos"][nth]] == second[place]
                assert link["second_pos"][nth] - link["first_pos"][nth] == n + 1


def test_shortcuts_score_what_they_say():
    task = Addition()
    for p_chain, scores in ((0.5, (0.58, 0.81, 0.915)), (0.1, (0.54, 0.96, 0.996))):
        rows = task.replace(p_chain=p_chain).batch(split="test", size=1_000)
        names = ("no carry", "one place back", "two places back")
        for name, score in zip(names, scores, strict=True):
            right = accuracy(task.shortcuts()[name](rows), rows.targets)
            assert right == pytest.approx(score, abs=0.015), name
    batch = task.batch(split="test", size=1_000)
    for name, score in (("bigram", 0.41), ("position only", 0.31)):
        assert accuracy(task.shortcuts()[name](batch), batch.targets) == pytest.approx(
            score, abs=0.02
        )


def test_looking_back_over_the_longest_chain_is_adding():
    task = Addition(seq_len=23, p_chain=0.9)
    batch = task.batch(size=100)
    answers = task._add_nearby(batch, 7)
    assert torch.equal(answers, batch.targets)
