"""Compositional recall: the grid, links, marginals, shortcuts and the limits of its options."""

from itertools import product
from math import sqrt

import pytest
import torch

from tasks import TASKS
from tasks.base import IGNORE, accuracy
from tasks.compositional import FILLER, FIRST, QUERY, SECOND, VALUE, Compositional
from tests.statistics import assert_uniform


def test_known_by_name_with_defaults():
    task = TASKS["compositional"]()
    assert task == Compositional(seq_len=256, n_pairs=36, vocab_size=8192)
    assert task.side == 6
    assert task.chance == 1 / 4096


def test_roles_and_what_stands_there():
    batch = Compositional().batch(size=4)
    roles = (FIRST, SECOND, VALUE, QUERY, FILLER)
    counts = [(batch.roles == role).sum(1).tolist() for role in roles]
    assert counts == [[72] * 4, [36] * 4, [36] * 4, [36] * 4, [76] * 4]
    assert (batch.inputs[batch.roles == FILLER] == 0).all()
    assert ((batch.targets == IGNORE) == (batch.roles != QUERY)).all()


def test_the_grid_is_full_and_every_pair_of_keys_asked_once():
    for row in Compositional(seq_len=100, n_pairs=16, vocab_size=64).batch(size=50).inputs.tolist():
        stored = list(zip(row[:48:3], row[1:48:3], strict=True))
        first, second = {a for a, _ in stored}, {b for _, b in stored}
        assert len(first) == len(second) == 4
        assert max(first) < 16 <= min(second)
        assert max(second) < 32
        assert set(stored) == set(product(first, second))
        assert len(set(row[2:48:3])) == 16
        assert min(row[2:48:3]) >= 32
        assert sorted(zip(row[48:96:3], row[49:96:3], strict=True)) == sorted(stored)


def test_links_are_what_a_loop_finds():
    batch = Compositional(seq_len=60, n_pairs=9, vocab_size=64).batch(split="test", size=20)
    for i, row in enumerate(batch.inputs.tolist()):
        stored = [tuple(row[p : p + 2]) for p in range(0, 27, 3)]
        for q in range(9):
            link = {name: int(tensor[i, q]) for name, tensor in batch.links.items()}
            query = 28 + 3 * q
            place = stored.index((row[query - 1], row[query]))
            assert link == {
                "query_pos": query,
                "key_pos": 3 * place + 1,
                "first_key_pos": 3 * place,
                "value_pos": 3 * place + 2,
                "distance": query - (3 * place + 2),
            }
            assert int(batch.targets[i, query]) == row[link["value_pos"]]


def test_marginals_are_uniform():
    task = Compositional(seq_len=24, n_pairs=4, vocab_size=22)
    batch = task.batch(size=20_000)
    for p in (0, 3, 9):
        assert_uniform(batch.inputs[:, p], 1, 5)
        assert_uniform(batch.inputs[:, p + 1], 5, 11)
        assert_uniform(batch.inputs[:, p + 2], 11, 22)
    triple = (batch.inputs[:, 0] - 1) * 66 + (batch.inputs[:, 1] - 5) * 11 + batch.inputs[:, 2] - 11
    assert_uniform(triple, 0, 4 * 6 * 11)
    for q in (0, 3):
        assert_uniform((batch.links["value_pos"][:, q] - 2) // 3, 0, 4)


def test_shortcuts_score_what_they_say():
    task = Compositional(seq_len=100, n_pairs=16)
    batch = task.batch(size=500)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    for name, expected in (("second key", 1 / 4), ("first key", 1 / 4), ("last value", 1 / 16)):
        assert scores[name] == pytest.approx(expected, abs=1e-9), name
    for name in ("context value", "position only"):
        spread = 5 * sqrt(15 / 16**2 / 8_000)
        assert scores[name] == pytest.approx(1 / 16, abs=spread), name


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0.257), ({"seq_len": 24, "n_pairs": 4, "vocab_size": 32}, 0.833)],
)
def test_both_keys_agree(options: dict, expected: float):
    task = Compositional(**options)
    batch = task.batch(split="test", size=1_000)
    answers, first = task.shortcuts()["both keys agree"](batch), 3 * task.n_pairs
    assert accuracy(answers, batch.targets) == pytest.approx(expected, abs=0.02)
    # What the latest triples of both keys agree on is theirs; the other answers are guesses.
    second, latest = (task.shortcuts()[name](batch) for name in ("second key", "first key"))
    agreed = (second == latest) & (batch.targets != IGNORE)
    assert answers[agreed].equal(batch.targets[agreed])
    row = batch.inputs[0].tolist()
    for p in range(first, 2 * first, 3):
        if not agreed[0, p + 1]:
            assert answers[0, p + 1] == row[row.index(row[p]) + 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 23}, r"seq_len=23: must be in 24 … .*a grid of 2 × 2"),
        ({"n_pairs": 1}, r"n_pairs=1: must be in 4 … 42 \(seq_len / 6\)"),
        ({"n_pairs": 49}, r"n_pairs=49: must be in 4 … 42"),
        ({"n_pairs": 10}, r"n_pairs=10: must be a square, 9 and 16 are near"),
        ({"n_pairs": (4, 35)}, r"n_pairs=35: must be a square, 25 and 36 are near"),
        ({"vocab_size": 71}, r"vocab_size=71: must be in 72 … .*half of them values"),
        ({"n_pairs": 4, "vocab_size": 11}, r"vocab_size=11: must be in 12 … "),
        ({"vocab_size": 2**31}, r"vocab_size=2147483648: must be in 72 … 1073741824"),
    ],
)
def test_bad_options_are_named(unchecked, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Compositional(**options)


def test_the_smallest_vocabulary_serves():
    batch = Compositional(seq_len=24, n_pairs=4, vocab_size=12).batch(size=20)
    assert torch.unique(batch.inputs[:, :12:3]).tolist() == [1, 2]
    assert torch.unique(batch.inputs[:, 1:12:3]).tolist() == [3, 4, 5]
