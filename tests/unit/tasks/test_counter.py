"""Random words, permutations and weighted orders against slow references and exact odds."""

from itertools import permutations
from math import prod, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.counter import (
    Race,
    count_rounds,
    derive_key,
    draw_below,
    draw_words,
    permute,
)

ROWS = 200_000
MASK = (1 << 64) - 1


def splitmix64(seed: int, count: int, skip: int = 0) -> list[int]:
    """Return outputs of Vigna's splitmix64.c in plain integers."""
    outputs = []
    for i in range(skip + 1, skip + count + 1):
        z = (seed + i * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def draw(count: int, rows: int = ROWS, key: int = 7) -> torch.Tensor:
    return draw_words(key, 0, torch.arange(rows), count)


def assert_odds(outcome: torch.Tensor, odds: torch.Tensor) -> None:
    """Chi-square of outcomes against their odds: within 5 standard deviations of its mean.

    The statistic of m cells has mean m − 1 and variance 2(m − 1); a right generator fails
    less than once in 10⁵ (the tail of chi-square is heavier than the normal one's).
    """
    expected = odds.double() * len(outcome)
    counts = torch.bincount(outcome, minlength=len(odds)).double()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 5 * sqrt(2 * freedom) + 10


def uniform(n: int) -> torch.Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def distinct_pairs(n: int) -> torch.Tensor:
    return ((1 - torch.eye(n, dtype=torch.float64)) / (n * (n - 1))).flatten()


def test_reference_outputs():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(1234567, 3) == published
    assert [w & MASK for w in draw_words(1234567, 0, torch.tensor([0]), 3)[0].tolist()] == published


@given(
    key=st.integers(0, MASK),
    split=st.integers(0, 15),
    row=st.integers(0, 2**36 - 1),
)
def test_words_are_splitmix64_at_the_counter(key: int, split: int, row: int):
    ours = draw_words(key, split, torch.tensor([row]), 4)[0].tolist()
    assert [w & MASK for w in ours] == splitmix64(key, 4, skip=(split << 60) + (row << 24))


def test_streams_differ_by_name_and_seed():
    keys = {derive_key(name, seed) for name in ("mqar", "copy") for seed in range(-50, 50)}
    assert len(keys) == 200


@pytest.mark.parametrize("n", [2, 3, 10, 97])
def test_below_is_uniform(n: int):
    drawn = draw_below(draw(2), n)
    assert_odds(drawn[:, 0], uniform(n))
    assert_odds(drawn[:, 0] * n + drawn[:, 1], uniform(n * n))


def test_below_reaches_both_ends():
    extremes = torch.tensor([[0, 0xFFFFFFFF, -1]])
    assert draw_below(extremes, 8192).tolist() == [[0, 8191, 8191]]


def test_below_takes_a_bound_for_each_row_or_word():
    word, bound = draw(3, rows=4), torch.tensor([[1], [2], [10], [2**31]])
    expected = torch.cat([draw_below(word[i : i + 1], int(bound[i])) for i in range(4)])
    assert draw_below(word, bound).equal(expected)
    assert draw_below(word, bound.expand(-1, 3)).equal(expected)


@given(
    n=st.integers(1, 3000),
    lanes=st.sampled_from([1, 2, 4]),
    keep_zero=st.booleans(),
    row=st.integers(0, 1000),
)
def test_permutation_is_a_bijection_that_keeps_lanes(n, lanes, keep_zero, row):
    points = torch.arange(n * lanes)[None]
    image = permute(
        draw_words(1, 0, torch.tensor([row]), count_rounds(n)),
        points,
        n,
        lanes=lanes,
        keep_zero=keep_zero,
    ).long()
    assert image.sort().values.equal(points)
    assert (image % lanes).equal(points % lanes)
    assert not keep_zero or image[0, 0] == 0


@pytest.mark.parametrize("n", [3, 4, 6, 8, 16, 31, 64])
def test_permutation_pairs_are_uniform(n: int):
    points = torch.arange(3).expand(ROWS, -1)
    image = permute(draw(count_rounds(n)), points, n).long()
    assert_odds(image[:, 0], uniform(n))
    assert_odds(image[:, 0] * n + image[:, 1], distinct_pairs(n))
    assert_odds(image[:, 1] * n + image[:, 2], distinct_pairs(n))


@pytest.mark.parametrize("n", [256, 1000, 4096])
def test_permutation_differences_are_uniform(n: int):
    """Second and fourth differences too: consecutive points keep no arithmetic structure."""
    points = torch.arange(1, 7).expand(ROWS, -1)
    image = permute(draw(count_rounds(n)), points, n).long()
    step = (image[:, 1] - image[:, 0]) % n
    assert_odds(step - 1, uniform(n - 1))
    bend = (image[:, 2] - 2 * image[:, 1] + image[:, 0]) % n
    far = (image[:, 5] - image[:, 4] - image[:, 1] + image[:, 0]) % n
    # Distinct images shift these odds by a few parts in n: far below what ROWS resolve.
    assert_odds(bend, uniform(n))
    assert_odds(far, uniform(n))


@pytest.mark.parametrize("n", [4, 8, 64])
def test_lanes_are_independent(n: int):
    points = torch.arange(2, 6).expand(ROWS, -1)
    image = permute(draw(count_rounds(n)), points, n, lanes=2, keep_zero=True).long() // 2
    kept = torch.full((n, n), 1 / (n * (n - 1)), dtype=torch.float64)
    kept[0] = 0
    assert_odds(image[:, 0] * n + image[:, 1], kept.flatten())
    assert_odds(image[:, 0] * n + image[:, 3], kept.flatten())


def test_race_is_successive_sampling():
    """Every one of the 24 orders of four items, against its exact odds."""
    weights = [8.0, 4.0, 1.0, 0.5]
    race = Race.from_log_weights(
        torch.tensor(weights, dtype=torch.float64).log2(), torch.device("cpu")
    )
    order = race.order(draw(4))
    outcome = (order * torch.tensor([64, 16, 4, 1])).sum(1)
    odds = torch.zeros(256, dtype=torch.float64)
    for chosen in permutations(range(4)):
        left = [sum(weights[j] for j in chosen[i:]) for i in range(4)]
        odds[sum(4 ** (3 - i) * j for i, j in enumerate(chosen))] = prod(
            weights[j] / total for j, total in zip(chosen, left, strict=True)
        )
    assert odds.sum().item() == pytest.approx(1)
    assert_odds(outcome, odds)


def test_race_of_many_gives_the_first_place_by_weight():
    log_weights = -0.99 * torch.arange(1, 513, dtype=torch.float64).log2()
    order = Race.from_log_weights(log_weights, torch.device("cpu")).order(draw(512, rows=5_000))
    assert order.sort(1).values.equal(torch.arange(512).expand(5_000, -1))
    assert_odds(order[:, 0], 2**log_weights / (2**log_weights).sum())
