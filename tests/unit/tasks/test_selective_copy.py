"""Selective copying: its marginals, places, links, shortcuts and the limits of its options."""

from itertools import combinations
from math import comb, sqrt

import pytest
import torch

from tasks.base import accuracy
from tasks.selective_copy import SelectiveCopy
from tests.statistics import assert_uniform


def test_every_choice_of_places_is_as_likely():
    batch = SelectiveCopy(seq_len=11, n_tokens=3).batch(size=20_000)
    number = torch.zeros(8, 8, 8, dtype=torch.int64)
    for i, (first, second, third) in enumerate(combinations(range(8), 3)):
        number[first, second, third] = i
    place = batch.links["value_pos"]
    assert_uniform(number[place[:, 0], place[:, 1], place[:, 2]], 0, 56)


def test_content_is_uniform_and_independent_of_its_neighbour():
    batch = SelectiveCopy(seq_len=40, n_tokens=5, vocab_size=9).batch(size=10_000)
    content = batch.targets[:, -5:] - 2
    assert_uniform(content, 0, 7)
    assert_uniform(content[:, 0] * 7 + content[:, 1], 0, 49)


def test_the_answer_is_the_content_in_order():
    batch = SelectiveCopy(seq_len=30, n_tokens=6).batch(size=100)
    place, query = batch.links["value_pos"], batch.links["query_pos"]
    assert (place.diff(dim=1) > 0).all()
    assert query.equal(torch.arange(24, 30).expand(100, -1))
    assert batch.inputs.gather(1, place).equal(batch.targets.gather(1, query))
    assert batch.links["distance"].equal(query - place)
    for row, target in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert target[24:] == [token for token in row if token >= 2]


def test_shortcuts_score_what_they_say():
    rows = 2_000
    task = SelectiveCopy()
    batch = task.batch(split="test", size=rows)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    by_luck = 1 / 16 + 15 / 16 / 16
    spread = 5 * sqrt(by_luck / (rows * 16))
    assert scores["last content"] == pytest.approx(by_luck, abs=spread)
    assert scores["any content"] == pytest.approx(by_luck, abs=spread)
    assert scores["by place"] == pytest.approx(0.385, abs=0.02)
    assert scores["most frequent content"] == pytest.approx(0.192, abs=0.02)
    assert scores["position only"] == pytest.approx(1 / 16, abs=spread)


@pytest.mark.parametrize(("seq_len", "n_tokens"), [(40, 1), (40, 2), (60, 9), (21, 10)])
def test_by_place_is_the_content_likeliest_to_be_asked_for(seq_len: int, n_tokens: int):
    task = SelectiveCopy(seq_len=seq_len, n_tokens=n_tokens, vocab_size=1000)
    batch = task.batch(size=50)
    answers, room = task.shortcuts()["by place"](batch), seq_len - n_tokens
    for row, answer in zip(batch.inputs.tolist(), answers.tolist(), strict=True):
        content = [position for position in range(room) if row[position] >= 2]
        for i in range(n_tokens):
            ways = {p: comb(p, i) * comb(room - 1 - p, n_tokens - 1 - i) for p in content}
            assert answer[room + i] in {row[p] for p in content if ways[p] == max(ways.values())}
