"""Curves: long ones are means of equal runs of steps, and references stand where they belong."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis.base import NotApplicableError, Subject
from analysis.run import baselines, curves
from analysis.run.curves import Curve
from lab.config import ModelConfig, TrainConfig
from lab.training.records import Metrics
from lab.training.run import Run
from tasks.mqar import MQAR
from tests.planted_runs import make_row


def rows():
    """Return 25 steps, each fifth evaluated."""
    steps = [make_row(i, loss=1 / i, accuracy=i / 25, seconds=1.0) for i in range(1, 26)]
    for step in steps[4::5]:
        step |= {"validation_loss": step["loss"], "validation_accuracy": step["accuracy"]}
    return steps


@pytest.fixture
def measured(monkeypatch, tmp_path):
    monkeypatch.setattr(curves, "POINTS", 10)
    monkeypatch.setattr(Run, "read_metrics", lambda run: Metrics(tuple(rows())))
    run = Run(tmp_path, MQAR(seq_len=16, vocab_size=32), ModelConfig(d_model=8), TrainConfig())
    batch = run.task.batch(size=1)
    scores = {"chance": 0.01, "copy": 0.4, "oracle": 1.0}
    monkeypatch.setattr(baselines, "score_baselines", lambda run: scores)
    return curves.measure(Subject(run.task, run.build(), batch, step=25, run=run))


def test_without_steps_there_is_no_curve(tmp_path):
    run = Run(tmp_path, MQAR(seq_len=16, vocab_size=32), ModelConfig(d_model=8), TrainConfig())
    for of in (run, None):
        with pytest.raises(NotApplicableError, match="no training step on record"):
            curves.measure(Subject(run.task, run.build(), run.task.batch(size=1), run=of))


def test_long_curves_are_means_of_equal_runs(measured):
    loss, accuracy = measured
    assert loss.window == 3
    assert loss.steps.tolist() == [3, 6, 9, 12, 15, 18, 21, 24, 25]
    values = [1 / i for i in range(1, 26)]
    expected = [np.mean(values[i : i + 3]) for i in range(0, 25, 3)]
    np.testing.assert_allclose(loss.train, expected)
    assert accuracy.held_out_steps.tolist() == [5, 10, 15, 20, 25]
    assert accuracy.references == {"oracle": 1.0, "copy": 0.4, "chance": 0.01}


def test_words_and_verticals_say_how_rows_grew(monkeypatch, tmp_path):
    grown: Any = [{**row, "seq_len": 8 if row["step"] <= 10 else 16} for row in rows()]
    monkeypatch.setattr(Run, "read_metrics", lambda run: Metrics(tuple(grown)))
    config = TrainConfig(lengthen=True, start_len=8, batch_size=4, test_rows=24)
    run = Run(tmp_path, MQAR(seq_len=16, vocab_size=32), ModelConfig(d_model=8), config)
    scores = {"chance": 0.01, "last value": 0.3, "oracle": 1.0}
    monkeypatch.setattr(baselines, "score_baselines", lambda run: scores)
    of = Subject(run.task, run.build(), run.task.batch(size=1), run=run)
    loss, accuracy = curves.measure(of)
    assert accuracy.stages == ((1, 8), (11, 16))
    assert ("tokens in a row", "8 from step 1, 16 from step 11") in accuracy.numbers().rows
    # A stage is evaluated on four of its batches, which hold more of the short rows, but no more
    # rows than are tested.
    assert accuracy.held_out_rows.tolist() == [24, 24, 16, 16, 16]
    assert ("rows held out", "16 to 24") in accuracy.numbers().rows
    verticals = [s["x0"] for s in loss.figure().to_dict()["layout"]["shapes"] if s["x0"] == s["x1"]]
    assert verticals == [11]
    often = replace(loss, stages=tuple((1 + i, 8 * 2**i) for i in range(8)))
    for finding, lengths in ((loss, "16"), (often, "16, 32, …, 1,024")):
        assert f"rows grow to {lengths} tokens" in finding.figure().layout.annotations[0].text
    short = [row for row in grown if row["seq_len"] == 8]
    monkeypatch.setattr(Run, "read_metrics", lambda run: Metrics(tuple(short)))
    assert [*curves.measure(of)[1].references] == ["oracle", "chance"]
    # A shortcut's accuracy is of one row length, those of a guess and of the oracle are of all.
    assert accuracy.since == {"last value": 11}
    line: Any
    [line] = accuracy.figure().select_traces({"name": "last value 30.0 %"})
    assert line.x.tolist() == [11, 25]


def curve(quantity, steps, values) -> Curve:
    steps, values = np.array(steps), np.array(values)
    rows = np.full(len(steps), 64)
    return Curve(quantity, steps, values, 1, steps, values, rows, {})


def find_jump(found: Curve) -> str:
    [place] = [value for name, value in found.numbers().rows if name == "most of the change"]
    return place


def test_most_of_the_change_is_where_the_axis_that_is_drawn_shows_it():
    # In nats the loss falls most in the first stretch; on the logarithmic axis, in the third.
    found = curve("loss", range(10, 61, 10), [8.0, 4.0, 3.6, 0.004, 0.002, 0.002])
    assert find_jump(found) == "between steps 30 and 40"
    found = curve("accuracy", range(10, 61, 10), [0.0, 0.01, 0.9, 0.92, 1.0, 1.0])
    assert find_jump(found) == "between steps 20 and 30"


def test_noise_has_no_jump():
    rng = np.random.default_rng(0)
    for count, most in ((4, 0), (5, 8), (10, 1), (40, 0)):
        noise = [curve("accuracy", np.arange(count), rng.random(count)) for _ in range(200)]
        assert sum(find_jump(found) != "at no one place" for found in noise) <= most


def test_the_result_is_read_from_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(Run, "read_metrics", lambda run: Metrics(tuple(rows())))
    monkeypatch.setattr(baselines, "score_baselines", lambda run: {"chance": 0.01, "oracle": 1.0})
    run = Run(tmp_path, MQAR(seq_len=16, vocab_size=32), ModelConfig(d_model=8), TrainConfig())
    of = Subject(run.task, run.build(), run.task.batch(size=1), run=run)
    result = {"accuracy": 0.9, "loss": 0.3, "steps": 25, "signal": None}
    monkeypatch.setattr(Run, "read_result", lambda run: result)
    assert [curve.final for curve in curves.measure(of)] == [(25, 0.3), (25, 0.9)]
    # A signal ends a run without a test, and none was taken before.
    result |= {"accuracy": None, "loss": None, "signal": "SIGINT"}
    assert [curve.final for curve in curves.measure(of)] == [None, None]
