"""Options that vary over the rows: mixtures, schedules, and both."""

import json
import pickle

import pytest
import torch

from tasks import TASKS, restore
from tasks.base import IGNORE, accuracy
from tasks.mixture import Mixture
from tasks.schedule import Schedule

MQAR = TASKS["mqar"]


def test_several_values_make_a_mixture():
    task = MQAR(seq_len=32, n_pairs=(2, 4, 8), vocab_size=64)
    assert isinstance(task, Mixture)
    assert task.kind is MQAR
    assert (task.name, task.splits) == (MQAR.name, MQAR.splits)
    assert task.options["n_pairs"] == (2, 4, 8)
    assert MQAR(**task.options) == task
    assert pickle.loads(pickle.dumps(task)) == task
    assert hash(task) == hash(MQAR(**task.options))
    assert task != MQAR(seq_len=32, n_pairs=8, vocab_size=64)


def test_what_describes_a_mixture_makes_it_again():
    kind = TASKS["hops"]
    task = kind(hops=(1, 2, 3), n_pairs=(5, 8), seq_len=64)
    again = restore(json.loads(json.dumps(task.describe())))
    assert again == task == task.replace()
    assert again.batch(size=8).links["setting"].equal(task.batch(size=8).links["setting"])
    scheduled = kind(hops=Schedule(1, 3, rows=10), n_pairs=(5, 8), seq_len=64)
    assert restore(json.loads(json.dumps(scheduled.describe()))) == scheduled


def test_several_options_vary_apart():
    task = MQAR(seq_len=(16, 32), n_pairs=(2, 4), vocab_size=64)
    assert task.seq_len == 32
    batch = task.batch(size=2_000)
    count = torch.bincount(batch.links["setting"][:, 0], minlength=4)
    # Four settings as likely: 500 each, standard deviation √(2000 · 3/16) = 19.
    assert ((count - 500).abs() < 100).all()
    for setting, part in enumerate(task.parts):
        row = int((batch.links["setting"][:, 0] == setting).nonzero()[0])
        assert int((batch.targets[row] != IGNORE).sum()) == part.options["n_pairs"]
        assert (batch.roles[row, part.seq_len :] == len(task.role_names) - 1).all()


def test_a_schedule_goes_in_stages_of_as_many_rows():
    schedule = Schedule(2, 8, rows=400)
    assert schedule.values == (2, 4, 6, 8)
    task = MQAR(seq_len=32, n_pairs=schedule, vocab_size=64)
    batch = task.batch(size=500)
    pairs = (batch.targets != IGNORE).sum(1)
    assert pairs.tolist() == [2] * 100 + [4] * 100 + [6] * 100 + [8] * 200
    assert (task.batch(split="test", size=20).targets != IGNORE).sum(1).eq(8).all()
    assert accuracy(task.oracle(batch), batch.targets) == 1


@pytest.mark.parametrize(
    ("first", "last", "values"),
    [
        (1, 5, (1, 2, 3, 4, 5)),
        (5, 1, (5, 4, 3, 2, 1)),
        (0, 3, (0, 1, 2, 3)),
        (2, 0, (2, 1, 0)),
        (64, 256, (64, 128, 192, 256)),
        (7, 7, (7,)),
        (0.5, 1.0, (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)),
    ],
)
def test_stages(first, last, values):
    assert Schedule(first, last, rows=10).values == values


def test_a_row_of_a_schedule_does_not_depend_on_its_batch():
    task = MQAR(seq_len=32, n_pairs=Schedule(1, 8, rows=64), vocab_size=64)
    whole = task.batch(size=64)
    for row in (0, 9, 63):
        assert task.batch(start=row, size=1).inputs.equal(whole.inputs[row : row + 1])


def test_a_batch_is_trimmed_behind_its_last_target():
    task = MQAR(seq_len=Schedule(16, 64, rows=1000), vocab_size=128)
    batch = task.batch(size=8)
    assert batch.inputs.shape == (8, 64)
    trimmed = batch.trim()
    assert trimmed.inputs.shape == (8, 15)
    assert (trimmed.targets != IGNORE).sum() == (batch.targets != IGNORE).sum()


def test_chance_is_of_the_scored_positions():
    task = TASKS["induction"](vocab_size=(3, 11), seq_len=8)
    # Half of the rows guess among 2 tokens, half among 10; of 256 rows, standard deviation .0125.
    assert task.chance == pytest.approx((1 / 2 + 1 / 10) / 2, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1, 2, 0), "rows=0: must be ≥ 1"), ((float("nan"), 2, 1), "first=nan: must be in")],
)
def test_bad_schedules_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule(*arguments)


def test_a_token_is_shown_as_its_rows_part_has_it():
    task = TASKS["word_problem"](group=("A5", "Z2"), seq_len=4)
    batch = task.batch(size=8)
    for part, row in zip(task.list_tasks(batch), batch.inputs.tolist(), strict=True):
        assert all(part.format_token(token) for token in row)
    assert {part.group for part in task.list_tasks(batch)} == {"A5", "Z2"}


def test_the_setting_is_known_without_making_links(unchecked):
    batch = MQAR(seq_len=(16, 32), vocab_size=64).batch(size=6)
    setting = batch.links["setting"]
    assert batch[2:4].links["setting"].equal(setting[2:4])
    assert "_made" not in vars(batch.links)
    assert batch[2:4].links["query_pos"].equal(batch.links["query_pos"][2:4])
