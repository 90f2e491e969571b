"""Windows: the few keys of highest bias in each query's own past."""

import pytest
import torch
from torch import Tensor

from lab.ops.top_keys import ranks_and_floors, top_keys, top_keys_by_counting


def biases(*shape: int, seed: int = 0) -> Tensor:
    """Biases with ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 2).round()


@pytest.mark.parametrize("window", [1, 2, 5, 20])
def test_window_keeps_the_best_of_each_querys_past(window: int):
    bias = biases(2, 2, 14)
    keep = top_keys(bias, window, 14)
    for b, h, t in [(b, h, t) for b in range(2) for h in range(2) for t in range(14)]:
        past = sorted(range(t + 1), key=lambda s: (bias[b, h, s].item(), s))
        assert keep[b, h, t].nonzero().flatten().tolist() == sorted(past[-window:])


@pytest.mark.parametrize("window", [1, 2, 7, 64, 200])
@pytest.mark.parametrize("n_keys", [1, 2, 3, 16, 17, 64, 129])
def test_ranks_tell_what_counting_tells(n_keys: int, window: int):
    bias = biases(2, 3, n_keys, seed=n_keys)
    for n_queries in sorted({1, min(2, n_keys), n_keys // 2 + 1, n_keys}):
        keep = top_keys(bias, window, n_queries)
        assert torch.equal(keep, top_keys_by_counting(bias, window, n_queries))


def test_one_query_among_many_keys_builds_no_matrix():
    """A decoded token among 2^20 keys: a matrix of them would be a terabyte."""
    bias = torch.arange(2.0**20).flip(0)[None, None]
    rank, floor = ranks_and_floors(bias, 5, 1)
    assert torch.equal(rank[0, 0], torch.arange(2**20).flip(0))
    assert floor.tolist() == [[[2**20 - 5]]]
    assert top_keys(bias, 5, 1)[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_a_window_holds_a_key():
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        top_keys(torch.ones(1, 1, 4), 0, 4)
