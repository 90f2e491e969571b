"""The verdict in words for every way a run can end."""

import pytest

from analysis.run import baselines
from analysis.run.baselines import Standing, describe
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
        ("interrupted", 0.5, "Interrupted after 30 steps: 50.0 %"),
        ("out of time", 0.5, "Stopped at the time limit after 30 steps: 50.0 %"),
        ("diverged", None, "Training diverged after 30 steps"),
        ("unfinished", None, "This run has not ended"),
    ],
)
def test_every_ending_has_a_sentence_and_a_figure(stopped, accuracy, opening):
    result = standing(stopped, accuracy)
    assert result.headline.startswith(opening)
    bars = [len(bar["y"]) for bar in result.draw().to_dict()["data"]]
    assert bars == ([4] if accuracy is None else [1, 4])
    assert "last value 6.0 %" in describe(result).alt


def test_rules_are_placed_by_the_interval():
    says = describe(standing("budget", 0.06)).says
    assert says == (
        "The model's accuracy is above chance, level with “last value”, below “most recent match”."
    )


def test_a_solved_run_is_not_said_to_be_open():
    found = {"verdict": "not built", "accuracy": None, "because": "too narrow"}
    result = {"stopped": "solved", "accuracy": 0.99, "set_by_hand": found}
    assert baselines._describe_construction(result) == ""
    result["stopped"] = "budget"
    assert "is open: too narrow" in baselines._describe_construction(result)
