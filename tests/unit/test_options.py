"""What is typed for an option of a task: values, mixtures, schedules, settings to evaluate at."""

from typing import Literal

import pytest

from lab.api.settings import Span, read, read_evaluations, resolve_spans
from tasks.bounds import find_kind, varies
from tasks.mqar import MQAR
from tasks.schedule import Schedule

COLOURS = Literal["red", "green"]


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("16", int | None, 16),
        ("4,16,64", int, (4, 16, 64)),
        ("4:64", int, Span(4, 64, None)),
        ("64:4@500", int, Span(64, 4, 500)),
        ("0.5", float, 0.5),
        ("1", float, 1.0),
        ("0.1,0.9", int | float, (0.1, 0.9)),
        ("0.1:0.9@20", float, Span(0.1, 0.9, 20)),
        ("red", COLOURS, "red"),
        ("red,green", COLOURS, ("red", "green")),
        ("a,b:c@d", str | None, "a,b:c@d"),
        ("false", bool, False),
    ],
)
def test_what_is_typed_is_read(text, hint, value):
    assert read("n", text, hint) == value
    assert type(read("n", text, hint)) is type(value)


@pytest.mark.parametrize("text", ["x", "4,", "4:", "4:5:6", "4@5", "4:5@", "4:5@x", "4.5", ""])
def test_what_cannot_be_read_is_said(text):
    with pytest.raises(ValueError, match=r"n=.*must be a whole number, several \(4,16,64\)"):
        read("n", text, int)


def test_a_truth_is_one_of_two():
    with pytest.raises(ValueError, match="n=no: must be true or false"):
        read("n", "no", bool)


def test_kinds():
    assert find_kind(int | None) is int
    assert find_kind(int | float) is float
    assert find_kind(str) is str
    assert varies(int | None)
    assert varies(COLOURS)
    assert not varies(str | None)
    assert not varies(bool)


def test_spans_become_schedules_over_rows():
    options = {"n": Span(4, 64, None), "m": Span(1, 2, 10), "k": 3}
    assert resolve_spans(options, max_steps=100, batch_size=8) == {
        "n": Schedule(4, 64, 800),
        "m": Schedule(1, 2, 80),
        "k": 3,
    }


@pytest.mark.parametrize("steps", [0, 101])
def test_a_schedule_ends_while_training_does(steps):
    with pytest.raises(ValueError, match=f"n=1:2@{steps}: steps must be in 1 … 100"):
        resolve_spans({"n": Span(1, 2, steps)}, max_steps=100, batch_size=8)


def test_settings_to_evaluate_at():
    assert read_evaluations(["seq_len=512,1024", "n-pairs=4", "seq_len=2048"], MQAR) == {
        "seq_len": (512, 1024, 2048),
        "n_pairs": (4,),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("512", "eval=512: must look like seq_len=512,1024"),
        ("seq_len=", "eval=seq_len=: must look like"),
        (
            "length=5",
            "length is not an option of mqar. Did you mean seq_len",
        ),
        ("varied=5", "varied is not an option of mqar. Known: seq_len"),
        ("seq_len=4:64", "eval=seq_len=4:64: must be values, not a schedule"),
        ("seq_len=x", "seq_len=x: must be a whole number"),
    ],
)
def test_bad_settings_are_said(text, message):
    with pytest.raises(ValueError, match=message):
        read_evaluations([text], MQAR)
