"""What large sizes will cost is said before anything is tried, and nothing of usual ones."""

import os

from lab.cli import costs
from lab.cli.costs import describe_costs, describe_reading
from lab.config import ModelConfig, TrainConfig
from tasks import TASKS

LONG = TASKS["flip_flop"](seq_len=10**6)


def test_a_usual_run_costs_nothing_that_must_be_said():
    assert describe_costs(TASKS["mqar"](), ModelConfig(), TrainConfig()) == []


def test_a_long_row_costs_by_the_mixers_that_compare_all_pairs():
    train = TrainConfig(batch_size=1, test_rows=1)
    for stack, words in (("AM*2", "1 h 3 min"), ("AM SM", "31 min 56 s"), ("SM*2", "16 s")):
        (step, *test) = describe_costs(LONG, ModelConfig(stack=stack), train)
        assert step == f"a step reads 1 row of 1,000,000 tokens: roughly {words} on one core"
        assert bool(test) == (stack != "SM*2")


def test_many_test_rows_cost_more_than_training():
    task, train = TASKS["mqar"](seq_len=64, vocab_size=256), TrainConfig(test_rows=10**9)
    (line,) = describe_costs(task, ModelConfig(), train)
    words = "a test reads 1,000,000,000 rows of 64 tokens: roughly 4 d on one core; --test-rows"
    assert line.startswith(words)


def test_a_folder_costs_up_to_all_files_of_its_disk(tmp_path, monkeypatch):
    assert describe_reading(None) == ""
    assert describe_reading(str(tmp_path / "missing")) == ""
    found = os.statvfs(tmp_path)
    if found.f_files:
        assert describe_reading(str(tmp_path)).endswith(" or more")
    nothing = os.statvfs_result((0,) * 10)
    monkeypatch.setattr(costs.os, "statvfs", lambda path: nothing)
    assert describe_reading(str(tmp_path)) == f"reading both ends of each file below {tmp_path}"
