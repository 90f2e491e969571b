"""Mano: expressions and their values, against another way to compute them."""

from collections import Counter

import pytest
import torch

from tasks.base import accuracy
from tasks.mano import EQUALS, FIRST_NUMBER, Mano
from tests.statistics import assert_uniform


def compute(words: list[str], modulus: int) -> tuple[int, list[str]]:
    """Return the value of the first expression, and the words after it, by recursion."""
    word, *rest = words
    if word not in "+-*/":
        return int(word), rest
    left, rest = compute(rest, modulus)
    right, rest = compute(rest, modulus)
    if word == "/":
        return next(x for x in range(modulus) if x * right % modulus == left), rest
    return {"+": left + right, "-": left - right, "*": left * right}[word] % modulus, rest


@pytest.mark.parametrize(("operators", "modulus"), [("+-*", 23), ("+-*/", 7), ("+-", 6), ("+", 2)])
def test_targets_are_the_values(operators, modulus):
    task = Mano(seq_len=24, length=9, modulus=modulus, operators=operators)
    batch, signs = task.batch(size=300), Counter()
    for r, row in enumerate(batch.inputs.tolist()):
        shown = task.to_str_tokens(batch.inputs[r])
        end = shown.index("=")
        value, rest = compute(shown[1:end], modulus)
        assert not rest
        assert int(batch.targets[r, end]) == FIRST_NUMBER + value
        count = sum(word in operators for word in shown[1:end])
        assert (row[0], batch.links["operations"][r].item()) == (count, count)
        assert end == 2 * count + 2 == batch.links["query_pos"][r].item()
        assert set(shown[end + 1 :]) <= {"_"}
        signs.update(word for word in shown[1:end] if word in operators)
    assert signs.keys() == set(operators)


def test_shapes_lengths_and_numbers_are_uniform():
    batch = Mano(seq_len=32, modulus=11).batch(size=20_000)
    length = batch.inputs[:, 0]
    assert_uniform(length, 1, 14)
    # Of four operations the first sign has 0 … 3 on its left: where the left is a number, 0.
    left = []
    for row in batch.inputs[length == 4].tolist():
        need, at = 1, 2
        while need:
            need += 1 if row[at] < EQUALS else -1
            at += 1
        left.append((at - 3) // 2)
    assert_uniform(torch.tensor(left), 0, 4)
    assert_uniform(batch.inputs[batch.inputs >= FIRST_NUMBER], FIRST_NUMBER, FIRST_NUMBER + 11)
    fixed = Mano(seq_len=32, exact_length=6).batch(size=50)
    assert (fixed.inputs[:, 0] == 6).all()


def test_nothing_is_divided_by_zero_and_products_take_its_place():
    task = Mano(seq_len=5, length=1, modulus=5, operators="+-*/")
    batch = task.batch(size=20_000)
    by_zero = batch.inputs[:, 3] == FIRST_NUMBER
    share = [(batch.inputs[:, 1] == 33 + sign)[by_zero].double().mean().item() for sign in range(4)]
    assert share == pytest.approx([1 / 4, 1 / 4, 1 / 2, 0], abs=0.04)
    assert_uniform(batch.inputs[:, 1][~by_zero], 33, 37)


def test_shortcuts_score_what_they_say():
    for options, expected in (
        ({}, (0.15, 0.07, 0.05)),
        (Mano.presets["small"].options, (0.75, 0.25, 0.24)),
    ):
        task = Mano(**options)
        batch = task.batch(split="test", size=3_000)
        names = "left to right", "most frequent value", "last value"
        found = [accuracy(task.shortcuts()[name](batch), batch.targets) for name in names]
        assert found == pytest.approx(expected, abs=0.03)
    plain = Mano(operators="+").batch(size=50)
    left_to_right = Mano(operators="+").shortcuts()["left to right"]
    assert accuracy(left_to_right(plain), plain.targets) == 1
