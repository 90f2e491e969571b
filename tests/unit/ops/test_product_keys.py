from math import prod

import pytest
import torch

from lab.ops.product_keys import (
    factor,
    naive_product_topk,
    product_topk,
)


def test_factor_loses_no_expert():
    for n_experts in range(1, 500):
        try:
            rows, columns = factor(n_experts)
        except ValueError:
            assert n_experts > 3
            assert all(n_experts % n for n in range(2, n_experts))
        else:
            assert rows * columns == n_experts
            assert not any(n_experts % n == 0 for n in range(rows + 1, int(n_experts**0.5) + 1))


@pytest.mark.parametrize(
    ("n_experts", "words"),
    [
        (0, "n_experts=0: must be in 1 …"),
        (5, "n_experts=5: .* prime; near numbers that factor: 4 = 2 × 2 and 6 = 2 × 3"),
        (1021, "n_experts=1021: .* 1020 = 30 × 34 and 1023 = 31 × 33"),
    ],
)
def test_factor_names_near_numbers(n_experts, words):
    with pytest.raises(ValueError, match=words):
        factor(n_experts)


@pytest.mark.parametrize("k", [0, 7])
def test_k_out_of_range(k):
    for form in (product_topk, naive_product_topk):
        with pytest.raises(ValueError, match=f"k={k}: must be in 1 … 6, for 2 × 3 experts"):
            form(torch.zeros(2), torch.zeros(3), k)


@pytest.mark.parametrize("n_experts", [6, 1024, 3072, 8192])
def test_every_expert_can_be_first(n_experts):
    shape = factor(n_experts)
    one_hot_rows, one_hot_columns = (torch.eye(n) for n in shape)
    _, indices = product_topk(
        one_hot_rows[:, None].expand(*shape, -1), one_hot_columns.expand(*shape, -1), 1
    )
    assert indices.flatten().tolist() == list(range(n_experts))


def test_the_printed_square_leaves_experts_unreachable():
    # Erratum C4: isqrt(N) keys a half address fewer than N experts.
    unreachable = {n: n - int(n**0.5) ** 2 for n in (3072, 8192)}
    assert unreachable == {3072: 47, 8192: 92}
    assert all(prod(factor(n)) == n for n in unreachable)
