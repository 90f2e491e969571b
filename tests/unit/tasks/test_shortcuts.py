"""Rules that several tasks share, against plain loops."""

from collections import Counter

import pytest
import torch

from tasks.base import IGNORE, Batch
from tasks.shortcuts import (
    copy_first_match,
    copy_latest_match,
    copy_two_token_match,
    draw_numbers,
    look_back,
    look_up,
    pick_stored_value,
    predict_most_frequent,
    tabulate_most_frequent,
)
from tests.statistics import assert_uniform


def of(inputs: torch.Tensor) -> Batch:
    blank = torch.zeros_like(inputs)
    return Batch(inputs, blank, blank, {})


def test_looking_back_never_looks_ahead():
    batch = of(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    assert look_back(1)(batch).tolist() == [[IGNORE, 1, 2, 3], [IGNORE, 5, 6, 7]]
    assert look_back(3)(batch).tolist() == [[IGNORE] * 3 + [1], [IGNORE] * 3 + [5]]


def test_matches_copy_what_followed():
    batch = of(torch.tensor([[1, 2, 1, 3, 2, 1, 3, 1]]))
    none = IGNORE
    assert copy_latest_match(batch).tolist() == [[none, none, 2, none, 1, 3, 2, 3]]
    assert copy_first_match(batch).tolist() == [[none, none, 2, none, 1, 2, 2, 2]]
    # 2 1 stood before, and 1 3; 1, 2 alone and 3 1 are matched by their last token.
    assert copy_two_token_match(batch).tolist() == [[none, none, 2, none, 1, 3, 2, 2]]


@pytest.mark.parametrize("size", [1, 2])
def test_two_tokens_are_what_a_loop_finds(size: int):
    rows = torch.arange(size * 60).view(size, 60) * 7919 % 1009 % 4
    for row, found in zip(rows.tolist(), copy_two_token_match(of(rows)).tolist(), strict=True):
        for t in range(60):
            pair = [p for p in range(1, t) if t and row[p - 1 : p + 1] == row[t - 1 : t + 1]]
            alone = [p for p in range(t) if row[p] == row[t]]
            match = (pair or alone or [None])[0]
            assert found[t] == (IGNORE if match is None else row[match + 1])


def test_a_match_looks_at_earlier_tokens_alone():
    rows = torch.arange(200).view(5, 40) * 7919 % 1009 % 6
    for rule in (copy_latest_match, copy_first_match, copy_two_token_match):
        whole = rule(of(rows))
        for end in (2, 17, 39):
            assert rule(of(rows[:, :end])).equal(whole[:, :end])


def test_the_most_frequent_token_is_the_first_of_equals():
    batch = of(torch.tensor([[0, 0, 0, 3, 2, 2, 3], [0, 1, 5, 4, 5, 1, 0]]))
    assert predict_most_frequent(2)(batch)[:, 0].tolist() == [3, 5]
    assert (predict_most_frequent(6)(batch) == IGNORE).all()


def test_draws_are_uniform_and_a_name_apart():
    inputs = torch.zeros(2_000, 20, dtype=torch.int64)
    one, other = (draw_numbers(name, inputs, 5) for name in ("one", "other"))
    assert_uniform(one, 0, 5)
    assert_uniform(one * 5 + other, 0, 25)


@pytest.mark.parametrize("width", [2, 3])
def test_a_context_value_is_any_of_the_stored(width: int):
    row = torch.arange(30)
    answers = pick_stored_value(4, width)(of(row.expand(1_000, -1)))
    assert (answers % width == width - 1).all()
    assert_uniform(answers // width, 0, 4)


def test_the_most_frequent_is_what_a_count_finds():
    word = torch.arange(600) * 7919 % 1009
    features, targets = (word % 13 * 2**40).view(20, 30), (word // 13 % 4).view(20, 30)
    seen: dict[int, Counter[int]] = {}
    for feature, target in zip(
        features.flatten().tolist(), targets.flatten().tolist(), strict=True
    ):
        seen.setdefault(feature, Counter())[target] += 1
    table = tabulate_most_frequent(features, targets)
    assert table[0].tolist() == sorted(seen)
    for feature, answer in zip(*(column.tolist() for column in table), strict=True):
        assert answer == min(seen[feature], key=lambda t: (-seen[feature][t], t))


def test_of_equals_the_lowest_is_answered_and_nothing_for_the_unseen():
    table = tabulate_most_frequent(torch.tensor([3, 3, 3, 3, 8]), torch.tensor([5, 1, 5, 1, 0]))
    wanted = torch.tensor([[3, 8, 4], [0, 9, 3]])
    assert look_up(table, wanted).tolist() == [[1, 0, IGNORE], [IGNORE, IGNORE, 1]]
