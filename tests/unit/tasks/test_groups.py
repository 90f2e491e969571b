"""Groups: their axioms, orders and numbering."""

from itertools import permutations

import pytest
import torch

from tasks.word_problem import list_elements, tabulate_products

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


def test_elements_are_in_lexicographic_order():
    assert list(list_elements("S5")) == sorted(permutations(range(5)))
    assert list(list_elements("A5")) == sorted(list_elements("A5"))
    assert set(list_elements("A5")) < set(list_elements("S5"))
    assert list_elements("Z60")[59] == (59,)


@pytest.mark.parametrize(("group", "commutes"), [("Z60", True), ("S5", False), ("A5", False)])
def test_residues_alone_commute(group: str, commutes: bool):
    order = ORDERS[group]
    product = tabulate_products(group, CPU).view(order, order)
    assert product.equal(product.T) == commutes


def test_products_of_even_permutations_are_theirs_in_s5():
    number = {p: i for i, p in enumerate(list_elements("S5"))}
    even = torch.tensor([number[p] for p in list_elements("A5")])
    within = tabulate_products("S5", CPU).view(120, 120)[even][:, even]
    assert within.equal(even[tabulate_products("A5", CPU).view(60, 60)])
