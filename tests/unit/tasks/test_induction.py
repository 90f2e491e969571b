"""Induction: its roles, marginals, links, shortcuts and the limits of its options."""

from collections import Counter
from math import sqrt

import pytest
import torch

from tasks import TASKS
from tasks.base import IGNORE, accuracy
from tasks.induction import AFTER, BEFORE, FILLER, QUERY, Induction
from tests.statistics import assert_uniform


def test_known_by_name_with_defaults():
    task = TASKS["induction"]()
    assert task == Induction(seq_len=256, vocab_size=16)
    assert task.chance == 1 / 15


def test_roles_and_what_stands_there():
    batch = Induction(seq_len=20).batch(size=50)
    for role, count in ((BEFORE, 1), (AFTER, 1), (QUERY, 1), (FILLER, 17)):
        assert ((batch.roles == role).sum(1) == count).all()
    trigger = (batch.roles == BEFORE) | (batch.roles == QUERY)
    assert trigger.equal(batch.inputs == 0)
    assert (batch.roles[:, -1] == QUERY).all()
    assert ((batch.targets == IGNORE) == (batch.roles != QUERY)).all()


def test_marginals_are_uniform():
    batch = Induction(seq_len=9, vocab_size=6).batch(size=20_000)
    assert_uniform(batch.links["key_pos"], 0, 7)
    assert_uniform(batch.inputs[batch.inputs > 0], 1, 6)
    key, answer = batch.links["key_pos"][:, 0], batch.targets[:, -1] - 1
    assert_uniform(key * 5 + answer, 0, 35)
    beside = batch.inputs[:, -2] - 1
    assert_uniform((beside * 5 + answer)[key < 6], 0, 25)


def test_links_are_what_a_loop_finds():
    batch = Induction(seq_len=12, vocab_size=5).batch(split="test", size=100)
    for i, row in enumerate(batch.inputs.tolist()):
        key = row.index(0)
        link = {name: tensor[i].tolist() for name, tensor in batch.links.items()}
        assert link == {
            "query_pos": [11],
            "key_pos": [key],
            "value_pos": [key + 1],
            "distance": [10 - key],
        }
        assert int(batch.targets[i, 11]) == row[key + 1]


def test_shortcuts_score_what_they_say():
    rows = 5_000
    for options, frequent in (({}, 0.096), (Induction.presets["small"].options, 0.130)):
        task = Induction(**options)
        batch = task.batch(split="test", size=rows)
        rules = task.shortcuts()
        scores = {name: accuracy(rule(batch), batch.targets) for name, rule in rules.items()}
        assert scores.pop("most frequent token") == pytest.approx(
            frequent, abs=5 * sqrt(frequent / rows)
        )
        # The token before the query is the answer where nothing lies between, too.
        luck = {"last value": 1 / 15 + 14 / 15 / (task.seq_len - 2)}
        for name, score in scores.items():
            expected = luck.get(name, 1 / 15)
            assert score == pytest.approx(expected, abs=5 * sqrt(expected / rows)), name


def test_the_most_frequent_token_is_not_the_trigger():
    task = Induction(seq_len=5, vocab_size=100)
    batch = task.batch(size=50)
    answers = task.shortcuts()["most frequent token"](batch)
    for row, answer in zip(batch.inputs.tolist(), answers[:, -1].tolist(), strict=True):
        assert answer == Counter(token for token in row if token).most_common(1)[0][0]


def test_the_most_recent_match_solves_it():
    batch = Induction(seq_len=30).batch(size=20)
    key = batch.inputs.eq(0).long().argmax(1)
    assert batch.inputs[torch.arange(20), key + 1].equal(batch.targets[:, -1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 2}, "seq_len=2: must be in 3 … 1048576"),
        ({"seq_len": 2**21}, "seq_len=2097152: must be in 3 …"),
        ({"vocab_size": 2}, "vocab_size=2: must be in 3 … 1073741824"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648: must be in 3 …"),
    ],
)
def test_bad_options_are_named(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Induction(**options)
