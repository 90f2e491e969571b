"""Curves: long ones are means of equal runs of steps, and references stand where they belong."""

import numpy as np
import pytest

from analysis.base import NotApplicableError, Subject
from analysis.run import baselines, curves
from analysis.run.curves import Curve, describe
from lab.config import ModelConfig, TrainConfig
from lab.training.metrics import Metrics
from lab.training.runs import Run
from tasks.mqar import MQAR


def rows():
    """Return 25 steps, each fifth evaluated."""
    steps = [{"step": i, "loss": 1 / i, "accuracy": i / 25, "seconds": 1.0} for i in range(1, 26)]
    for step in steps[4::5]:
        step |= {"validation_loss": step["loss"], "validation_accuracy": step["accuracy"]}
    return steps


@pytest.fixture
def measured(monkeypatch, tmp_path):
    monkeypatch.setattr(curves, "POINTS", 10)
    monkeypatch.setattr(Run, "read_metrics", lambda run: Metrics(tuple(rows()), 16))
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


def test_words_follow_the_numbers(measured):
    assert "from 20.0 % (step 5) to 100.0 % (step 25)" in describe(measured[1]).says
    assert "0.20 nats (step 5) to 0.04 nats (step 25)" in describe(measured[0]).says


def test_one_step_without_evaluation_can_be_drawn():
    one = np.array([1])
    none = np.zeros(0)
    curve = Curve("loss", one, one / 2, 1, none.astype(int), none, {"uniform guess": 5.5})
    assert describe(curve).says.startswith("No evaluation yet")
    assert len(curve.draw().to_dict()["data"]) == 2


def test_one_evaluation_is_no_journey():
    one = np.array([30])
    curve = Curve("accuracy", one, one / 60, 1, one, one / 60, {"chance": 0.1})
    assert describe(curve).says == (
        "The held-out accuracy is 50.0 % after step 30; it was evaluated once."
    )


def test_words_and_verticals_say_how_rows_grew(monkeypatch, tmp_path):
    grown = [{**row, "seq_len": 8 if row["step"] <= 10 else 16} for row in rows()]
    monkeypatch.setattr(Run, "read_metrics", lambda run: Metrics(tuple(grown), 16))
    run = Run(tmp_path, MQAR(seq_len=16, vocab_size=32), ModelConfig(d_model=8), TrainConfig())
    monkeypatch.setattr(baselines, "score_baselines", lambda run: {"chance": 0.01, "oracle": 1.0})
    loss, accuracy = curves.measure(Subject(run.task, run.build(), run.task.batch(size=1), run=run))
    assert accuracy.stages == ((1, 8), (11, 16))
    assert describe(accuracy).says == (
        "Rows grow from 8 to 16 tokens; those of 16 begin at step 11, and end at a held-out "
        "accuracy of 100.0 %."
    )
    verticals = [shape.x0 for shape in loss.draw().layout.shapes if shape.x0 == shape.x1]
    assert verticals == [1, 11]
