"""The page is written for every state a run can be in, and says which it is."""

import json
import re

import pytest

from analysis import QUICK
from analysis.base import Subject
from analysis.examination import examine, find_commit, hash_data
from analysis.pages.report import render
from lab.config import ModelConfig, TrainConfig
from lab.intervals import wilson
from lab.training.run import Run
from tasks import TASKS
from tests.planted_runs import make_result, make_row, write_rows


def claimed(path, **options) -> Run:
    task = TASKS["mqar"](**{"seq_len": 16, "vocab_size": 32, **options})
    train = TrainConfig(max_steps=4, batch_size=4, test_rows=8, eval_every=2)
    run = Run(path, task, ModelConfig(stack="AM SM", d_model=8), train)
    run.claim()
    return run


def page_of(run: Run) -> str:
    """Return the quick report on a run's initial weights."""
    return render(run, examine(Subject.of(run, step=0), QUICK, lenient=True))


def test_a_run_that_has_not_begun(tmp_path):
    page = page_of(claimed(tmp_path / "run"))
    assert "This run has not ended: 0 steps on record" in page
    assert "the model with its initial weights" in page
    assert "Training batches" not in page
    assert "no training step on record" in page


def test_a_diverged_run_has_no_accuracy(tmp_path):
    run = claimed(tmp_path / "run")
    write_rows(run, map(make_row, range(1, 4)))
    run.write_result(make_result(accuracy=None, loss=None, steps=3, stopped="diverged"))
    assert "Training diverged after 3 steps" in page_of(run)


@pytest.mark.parametrize("interval", [None, [0.4, 0.7]])
def test_the_interval_is_that_of_the_result_or_takes_each_row_for_one_answer(tmp_path, interval):
    run = claimed(tmp_path / "run")
    write_rows(run, map(make_row, range(1, 5)))
    run.write_result(make_result(interval=interval, stopped="budget"))
    page = page_of(run)
    record = re.search(r'id="record">(.*?)</script>', page)
    assert record
    assert "The test accuracy is measured on 8 test rows, that of rules" in page
    expected = interval or pytest.approx(wilson(0.5, 8))
    assert json.loads(record[1])["interval"] == expected


def test_the_data_hash_follows_the_rows(tmp_path):
    one, other = claimed(tmp_path / "one"), claimed(tmp_path / "other", fillers="zero")
    assert hash_data(one) == hash_data(claimed(tmp_path / "again"))
    assert hash_data(one) != hash_data(other)


def test_the_commit_may_be_unknown(monkeypatch):
    assert find_commit() is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", find_commit() or "")
    monkeypatch.setenv("PATH", "")
    assert find_commit() is None
