"""An examination carries out what applies, says why the rest does not, and records numbers."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from analysis import ANALYSES
from analysis.base import NotApplicableError, Subject
from analysis.examination import examine, record, select_analyses
from analysis.plain import figure_only, to_plain
from lab.config import ModelConfig, TrainConfig
from lab.files import RunError
from lab.models import build
from lab.training.checkpoint import save_checkpoint
from lab.training.loop import start
from lab.training.run import Run
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=32)


def subject(stack: str = "AM*2", **options) -> Subject:
    model = build(stack, vocab_size=32, d_model=16, options=options)
    return Subject(TASK, model.eval(), TASK.batch(split="test", size=4))


@dataclass(frozen=True)
class Part:
    share: np.ndarray
    big: np.ndarray = figure_only()


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    named: dict[int, float]
    missing: float | None
    count: np.int64


def test_a_result_becomes_json_without_what_only_a_figure_needs():
    whole = Whole(
        (Part(np.array([0.5, np.nan]), np.zeros(9)),), {1: float("inf")}, None, np.int64(3)
    )
    expected = {
        "parts": [{"share": [0.5, None]}],
        "named": {"1": None},
        "missing": None,
        "count": 3,
    }
    assert to_plain(whole) == expected
    assert json.loads(json.dumps(to_plain(whole), allow_nan=False)) == expected


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match=r"set is a type that analysis\.json cannot hold"):
        to_plain({"a": {1}})


def test_every_analysis_is_told_and_recorded_or_says_why_not():
    begun: list[str] = []
    found = examine(subject(), on_begin=begun.append)
    assert begun == list(ANALYSES)
    assert {*found.results, *found.not_applicable} == set(ANALYSES)
    assert not {*found.results} & {*found.not_applicable}
    assert found.not_applicable["baselines"] == "no run to read the result of"
    assert set(found.seconds) == set(ANALYSES)
    told = json.loads(json.dumps(record(found), allow_nan=False))
    assert told["format"] == 1
    assert (told["rows"], told["seq_len"]) == (4, 16)
    assert list(told["analyses"]) == list(found.results)
    for results in told["analyses"].values():
        for result in results:
            assert result["title"]
            assert result["says"].endswith(".")


def test_a_name_is_looked_up():
    assert select_analyses(None) == list(ANALYSES)
    assert select_analyses(["matrices", "curves"]) == ["curves", "matrices"]
    with pytest.raises(
        ValueError, match=r"only=matrix: is not an analysis\. Did you mean matrices\?"
    ):
        select_analyses(["matrix"])
    with pytest.raises(
        ValueError, match=r"only=xyz: is not an analysis\. Known: baselines, leaks, rows"
    ):
        select_analyses(["xyz"])


def test_what_is_asked_for_by_name_must_apply():
    with pytest.raises(NotApplicableError, match="curves: no training step on record"):
        examine(subject(), ["curves"])
    assert list(examine(subject(), ["curves", "matrices"], lenient=True).results) == ["matrices"]


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path / "run", TASK, ModelConfig(d_model=16), TrainConfig(batch_size=4))
    run.claim()
    return run


def test_a_run_without_a_checkpoint_names_the_weights_there_are(run):
    with pytest.raises(RunError, match=r"has no checkpoint; give a step: 0$"):
        Subject.of(run)
    assert Subject.of(run, step=0).step == 0


def test_the_newest_checkpoint_is_taken_and_rows_follow_the_length(run):
    state = start(run.build(), run.train, "fp32")
    state.step = 7
    save_checkpoint(run, state)
    found = Subject.of(run)
    assert (found.step, len(found.batch.inputs)) == (7, 256)
    assert not found.model.training
    assert len(Subject.of(run, rows=3).batch.inputs) == 3
    with pytest.raises(ValueError, match="size=0: must be ≥ 1"):
        Subject.of(run, rows=0)


def test_rows_that_memory_does_not_hold_are_refused_before_they_are_made(run):
    with pytest.raises(
        ValueError, match=r"rows=99999999 of 16 tokens take about .* rows would fit"
    ):
        Subject.of(run, step=0, rows=99_999_999)
    with pytest.raises(ValueError, match=r"must be ≤ 1 KiB \(memory\); not even one row fits"):
        Subject.of(run, step=0, rows=4, memory=1_024)
