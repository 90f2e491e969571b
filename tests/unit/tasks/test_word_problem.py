"""The word problem: its marginals, products, shortcuts and the limits of its options."""

from math import sqrt

import pytest
import torch

from tasks.base import accuracy
from tasks.word_problem import Group, WordProblem, list_elements
from tests.statistics import assert_uniform


@pytest.mark.parametrize(("group", "order"), [("Z2", 2), ("Z60", 60), ("S5", 120), ("A5", 60)])
def test_the_vocabulary_is_the_group(group: Group, order: int):
    task = WordProblem(group=group, seq_len=9)
    assert task.vocab_size == order
    assert task.chance == 1 / order
    assert "vocab_size" not in task.options


@pytest.mark.parametrize("group", ["Z60", "S5"])
def test_elements_and_products_are_uniform(group: Group):
    task = WordProblem(group=group, seq_len=6)
    batch = task.batch(size=10_000)
    for position in (0, 3, 5):
        assert_uniform(batch.inputs[:, position], 0, task.vocab_size)
        assert_uniform(batch.targets[:, position], 0, task.vocab_size)
    pair = batch.inputs[:, 2] * task.vocab_size + batch.targets[:, 4]
    assert_uniform(pair[pair < 600], 0, 600)


def test_parity():
    batch = WordProblem(group="Z2", seq_len=100).batch(size=50)
    assert batch.targets.equal(batch.inputs.cumsum(1) % 2)


def test_a_word_moves_five_things():
    """What stands at 0 goes where each permutation in turn sends it."""
    batch = WordProblem(group="S5", seq_len=40).batch(size=20)
    permutation = torch.tensor(list_elements("S5"))
    for start in range(5):
        place = torch.full((20,), start)
        for step in range(40):
            place = permutation[batch.inputs[:, step], place]
            assert place.equal(permutation[batch.targets[:, step], start])


@pytest.mark.parametrize("seq_len", [2, 3, 31, 32, 33])
def test_every_length_is_multiplied_to_its_end(seq_len: int):
    task = WordProblem(seq_len=seq_len)
    batch = task.batch(size=20)
    assert accuracy(task.oracle(batch), batch.targets) == 1
    assert (batch.targets >= 0).all()
    assert batch.links["query_pos"].equal(torch.arange(seq_len).expand(20, -1))


def test_shortcuts_score_what_they_say():
    t, order, rows = 32, 60, 4_000
    task = WordProblem(group="A5", seq_len=t)
    batch = task.batch(split="test", size=rows)
    scores = {name: accuracy(rule(batch), batch.targets) for name, rule in task.shortcuts().items()}
    for name, sure in (("last element", 1), ("last two", 2), ("position only", 0)):
        spread = 5 * sqrt(1 / order / (rows * t))
        assert scores[name] == pytest.approx((sure + (t - sure) / order) / t, abs=spread), name


def test_a_mixture_of_groups_has_the_larger_vocabulary():
    task = WordProblem(seq_len=8).replace(group=("Z2", "S5"))
    assert task.vocab_size == 120
    batch = task.batch(size=200)
    small = batch.links["setting"][:, 0] == 0
    assert batch.inputs[small].max() == 1
    assert batch.inputs[~small].max() > 100
    assert accuracy(task.oracle(batch), batch.targets) == 1


def test_few_small_rows_of_one_split_are_another_s():
    preset = WordProblem.presets["small"]
    assert preset.stack == "SM*2"
    task = WordProblem(**preset.options)
    seen, asked = (
        {tuple(row) for row in task.batch(split=split, size=size).inputs.tolist()}
        for split, size in (("train", 1_000), ("test", 1_000))
    )
    # 2¹⁴ rows, 1,000 of them drawn: about one in sixteen of the others is among them.
    assert 0.02 < len(seen & asked) / len(asked) < 0.12


def test_elements_are_shown():
    assert WordProblem(group="Z60").format_token(59) == "59"
    assert WordProblem(group="A5").format_token(0) == "01234"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "A4"}, "group='A4': must be one of Z2, Z60, S5, A5"),
        ({"seq_len": 1}, "seq_len=1: must be in 2 … 1048576"),
        ({"seq_len": 2**21}, "seq_len=2097152: must be in 2 … 1048576"),
    ],
)
def test_bad_options_are_named(unchecked, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        WordProblem(**options)
