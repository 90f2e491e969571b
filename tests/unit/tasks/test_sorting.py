"""Sorting: its marginals, ties, links and the scores of shortcuts."""

import pytest

from tasks.base import accuracy
from tasks.sorting import Sort
from tests.statistics import assert_uniform


def test_numbers_are_uniform_and_independent_of_their_neighbour():
    number = Sort(seq_len=20, vocab_size=8).batch(size=10_000).inputs[:, :10] - 1
    assert_uniform(number, 0, 7)
    assert_uniform(number[:, 0] * 7 + number[:, 1], 0, 49)


def test_equal_numbers_are_linked_from_left_to_right():
    batch = Sort(seq_len=30, vocab_size=5).batch(size=50)
    for row, value in zip(batch.inputs.tolist(), batch.links["value_pos"].tolist(), strict=True):
        assert value == sorted(range(15), key=lambda place: (row[place], place))


@pytest.mark.parametrize(
    ("options", "bigram", "position"),
    [({}, 0.412, 0.152), ({"seq_len": 80, "vocab_size": 6}, 0.9, 0.776)],
)
def test_shortcuts_score_what_they_say(options, bigram, position):
    task = Sort(**options)
    batch = task.batch(split="test", size=1_000)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    n, symbols = task.seq_len // 2, task.vocab_size - 1
    different = symbols * (1 - (1 - 1 / symbols) ** n) / n
    assert scores["next greater"] == pytest.approx(different, abs=0.01)
    assert scores["last token"] == pytest.approx(1 - different, abs=0.01)
    assert scores["bigram"] == pytest.approx(bigram, abs=0.01)
    assert scores["position only"] == pytest.approx(position, abs=0.02)
    # The i-th of the numbers as they came is that of rank i by luck, or equal to it.
    assert scores["unsorted"] == pytest.approx(1 / symbols + 1 / n * (1 - 1 / symbols), abs=0.02)
