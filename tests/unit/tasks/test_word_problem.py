"""The word problem: its marginals, products, shortcuts and the limits of its options."""

from math import sqrt

import pytest
import torch

from tasks.base import accuracy
from tasks.word_problem import WordProblem, list_elements, tabulate_products
from tests.statistics import assert_uniform

ORDERS = {"Z2": 2, "Z7": 7, "Z60": 60, "S3": 6, "S4": 24, "S5": 120, "A5": 60}


@pytest.mark.parametrize(("group", "order"), ORDERS.items())
def test_the_vocabulary_is_the_group(group: str, order: int):
    task = WordProblem(group=group, seq_len=9)
    assert task.vocab_size == order
    assert task.chance == 1 / order
    assert "vocab_size" not in task.options


@pytest.mark.parametrize("group", ["Z60", "S5"])
def test_elements_and_products_are_uniform(group: str):
    task = WordProblem(group=group, seq_len=6)
    batch = task.batch(size=10_000)
    for position in (0, 3, 5):
        assert_uniform(batch.inputs[:, position], 0, task.vocab_size)
        assert_uniform(batch.targets[:, position], 0, task.vocab_size)
    pair = batch.inputs[:, 2] * task.vocab_size + batch.targets[:, 4]
    assert_uniform(pair[pair < 600], 0, 600)


def test_a_word_moves_five_things():
    """What stands at 0 goes where each permutation in turn sends it."""
    batch = WordProblem(group="S5", seq_len=40).batch(size=20)
    permutation = torch.tensor(list_elements("S5"))
    for start in range(5):
        place = torch.full((20,), start)
        for step in range(40):
            place = permutation[batch.inputs[:, step], place]
            assert place.equal(permutation[batch.targets[:, step], start])


def test_shortcuts_score_what_they_say():
    t, order, rows = 32, 60, 4_000
    task = WordProblem(group="A5", seq_len=t)
    batch = task.batch(split="test", size=rows)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    for name, sure in (("last element", 1), ("last two", 2), ("position only", 0)):
        spread = 5 * sqrt(1 / order / (rows * t))
        assert scores[name] == pytest.approx((sure + (t - sure) / order) / t, abs=spread), name


def test_few_small_rows_of_one_split_are_another_s():
    preset = WordProblem.presets["small"]
    assert preset.stack == "SM*2"
    task = WordProblem(**preset.options)
    seen, asked = (
        {tuple(row) for row in task.batch(split=split, size=size).inputs.tolist()}
        for split, size in (("train", 1_000), ("test", 1_000))
    )
    # 2¹⁴ rows, 1,000 of them drawn: about one in sixteen of the others is among them.
    assert 0.02 < len(seen & asked) / len(asked) < 0.12


CPU = torch.device("cpu")
ORDERS = {"Z2": 2, "Z60": 60, "S5": 120, "A5": 60}
every_group = pytest.mark.parametrize("group", list(ORDERS))


@every_group
def test_the_table_is_a_group(group: str):
    order = ORDERS[group]
    product = tabulate_products(group, CPU).view(order, order)
    number = torch.arange(order)
    assert product[0].equal(number)
    assert product[:, 0].equal(number)
    assert product.sort(0).values.equal(number[:, None].expand(-1, order))
    assert product.sort(1).values.equal(number.expand(order, -1))
    # (a·b)·c = a·(b·c) for all a, b, c.
    assert product[product].equal(product[number[:, None, None], product])
    assert len(list_elements(group)) == order


def test_the_left_factor_comes_first():
    number = {p: i for i, p in enumerate(list_elements("S5"))}
    swap, turn = (1, 0, 2, 3, 4), (1, 2, 3, 4, 0)
    product = int(tabulate_products("S5", CPU)[number[swap] * 120 + number[turn]])
    # 0 goes to 1 by the swap, and from there to 2.
    assert list_elements("S5")[product] == (2, 1, 3, 4, 0)
