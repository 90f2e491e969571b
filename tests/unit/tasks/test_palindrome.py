"""Palindromes: their marginals and the scores of shortcuts."""

import pytest

from tasks.base import accuracy
from tasks.palindrome import Palindrome
from tests.statistics import assert_uniform


def test_strings_are_uniform_and_independent_of_their_neighbour():
    string = Palindrome(seq_len=20, vocab_size=8).batch(size=10_000).inputs[:, :10] - 1
    assert_uniform(string, 0, 7)
    assert_uniform(string[:, 0] * 7 + string[:, 1], 0, 49)


@pytest.mark.parametrize(
    ("options", "one", "two"),
    [({}, 0.445, 0.986), ({"seq_len": 32, "vocab_size": 16}, 0.689, 0.978)],
)
def test_shortcuts_score_what_they_say(options, one, two):
    task = Palindrome(**options)
    batch = task.batch(split="test", size=1_000)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    # Right at the marker, where no token before it is the same, and else by luck.
    n, symbols = task.seq_len // 2, task.vocab_size - 1
    right = (1 + sum((1 - 1 / symbols) ** earlier for earlier in range(n - 1))) / n
    right += (1 - right) / symbols
    assert scores["before the token"] == pytest.approx(right, abs=0.01)
    assert scores["before the token"] == pytest.approx(one, abs=0.01)
    assert scores["before two tokens"] == pytest.approx(two, abs=0.005)
    for name in ("forwards", "last token", "position only"):
        assert scores[name] == pytest.approx(1 / symbols, abs=0.01), name
    assert scores["most recent match"] < 1 / symbols + 0.01


def test_two_tokens_are_looked_up_turned_round():
    task = Palindrome(seq_len=8, vocab_size=9)
    batch = task.batch(size=1)
    batch.inputs[0] = batch.inputs.new_tensor([5, 8, 3, 3, 0, 3, 3, 8])
    one, two = (task.shortcuts()[f"before {n}"](batch)[0, 4:] for n in ("the token", "two tokens"))
    # The first 3 stands after 8; the first 3 before the marker after 3.
    assert one.tolist() == [3, 8, 8, 5]
    assert two.tolist() == [3, 3, 8, 5]
