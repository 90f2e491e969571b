"""The verdict in words for every way a run can end."""

from dataclasses import replace

import pytest

from analysis.run import baselines
from analysis.run.baselines import Standing
from lab.intervals import wilson

RULES = {"chance": 0.01, "last value": 0.06, "most recent match": 0.9, "oracle": 1.0}


def standing(stopped: str, accuracy: float | None, scored: int = 1000) -> Standing:
    interval = None if accuracy is None else wilson(accuracy, scored)
    rules = tuple(RULES), tuple(RULES.values())
    return Standing(stopped, 30, 0.99, accuracy, interval, 1024, 256, *rules)


@pytest.mark.parametrize(
    ("stopped", "accuracy", "opening"),
    [
        ("solved", 0.995, "Solved after 30 steps: 99.5 % of the answers are right."),
        ("budget", 0.5, "Not solved within 30 steps: 50.0 %"),
        ("budget", 0.995, "Solved, after all of its 30 steps: 99.5 %"),
        ("budget", 0.99, "Solved, after all of its 30 steps: 99.0 %"),
        ("interrupted", 0.5, "Interrupted after 30 steps: 50.0 %"),
        ("out of time", 0.5, "Stopped at the time limit after 30 steps: 50.0 %"),
        ("diverged", None, "Training diverged after 30 steps"),
        ("unfinished", None, "This run has not ended"),
    ],
)
def test_every_ending_has_a_sentence(stopped, accuracy, opening):
    result = standing(stopped, accuracy)
    assert result.headline.startswith(opening)


@pytest.mark.parametrize(
    ("verdict", "stopped", "accuracy", "end"),
    [
        ("not built", "solved", 0.99, ""),
        ("not built", "budget", 0.99, "is open: too narrow."),
        ("solves", "budget", 0.99, "weights set by hand do."),
        ("solves", "solved", 0.98, "weights set by hand do."),
        ("solves", "budget", 0.98, "do, so training failed to find what the model can represent."),
        ("solves", "diverged", None, "so training failed to find what the model can represent."),
    ],
)
def test_weights_set_by_hand_say_whether_training_failed(verdict, stopped, accuracy, end):
    found = {"verdict": verdict, "accuracy": 0.99, "because": "too narrow"}
    result = {"stopped": stopped, "accuracy": accuracy, "set_by_hand": found}
    said = baselines._describe_construction(result)
    assert said.endswith(end)
    assert (said == "") == (end == "")


def test_a_reason_is_given_once():
    found = {"kind": "cannot", "because": "the model is too narrow", "seq_len": 1024}
    assert baselines._describe_failure({}) == ""
    assert baselines._describe_failure({"diagnosis": found}) == ""
    assert baselines._describe_failure({"diagnosis": {**found, "kind": "not begun"}}) == (
        "Why it is not solved, at rows of 1,024 tokens: not begun. The model is too narrow."
    )


def test_the_best_shortcut_is_named_where_there_is_one():
    found = standing("budget", 0.5)
    assert "The best shortcut, “most recent match”, which " in found.rules
    assert "shortcut" not in replace(found, names=("chance", "oracle"), scores=(0.1, 1.0)).rules
