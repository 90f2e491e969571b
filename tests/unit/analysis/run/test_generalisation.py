"""How far it holds is said from planted evaluations, and no further than intervals allow."""

import json
from typing import Any

import pytest

from analysis.base import NotApplicableError, Subject
from analysis.plain import to_plain
from analysis.run.generalisation import AccuracyByOption, describe, measure
from lab.config import ModelConfig, TrainConfig
from lab.models import build
from lab.training.run import Run
from tasks.base import Schedule
from tasks.copying import Copy
from tasks.induction import Induction
from tasks.overwrite import Overwrite
from tests.planted_runs import make_result, make_row, write_rows

STEPS = 7


def entry(option: str, value: Any, accuracy: float, half: float = 0.01) -> dict[str, Any]:
    return {
        "option": option,
        "value": value,
        "step": STEPS,
        "accuracy": accuracy,
        "interval": [accuracy - half, accuracy + half],
        "loss": 1.0,
        "rows": 64,
        "scored": 64,
        "chance": 0.1,
        "seconds": 0.1,
    }


def found(
    tmp_path,
    task,
    entries: list[dict[str, Any]],
    accuracy: float | None = 0.9,
    **shortcuts: float,
) -> AccuracyByOption:
    run = Run(tmp_path / "run", task, ModelConfig(stack="AM", d_model=8), TrainConfig(test_rows=32))
    run.claim()
    write_rows(run, map(make_row, range(1, STEPS + 1)))
    result = make_result(accuracy=accuracy, steps=STEPS, stopped="budget")
    scores = {"chance": 0.1, "oracle": 1.0, **shortcuts}
    run.write_result({**result, "baselines": scores, "evaluations": entries})
    subject = Subject(task, run.build().eval(), task.batch(size=1), step=0, run=run)
    (reach,) = measure(subject)
    json.dumps(to_plain(reach), allow_nan=False)
    return reach


def figure(reach: AccuracyByOption) -> dict[str, Any]:
    fig = reach.draw()
    assert fig is not None
    return fig.to_dict()


def lengths(*accuracies: tuple[int, float]) -> list[dict[str, Any]]:
    return [entry("seq_len", length, accuracy) for length, accuracy in accuracies]


TASK = Induction(seq_len=32, vocab_size=11)


def test_it_holds_then_halves_then_is_a_guess(tmp_path):
    shares = ((512, 0.1), (64, 0.93), (128, 0.7), (256, 0.3), (32, 0.93))
    reach = found(tmp_path, TASK, lengths(*shares))
    assert reach.values == ("32", "64", "128", "256", "512")
    # What was evaluated in the same way goes before the result's.
    assert (reach.reference, reach.reference_interval) == (0.93, (0.92, 0.9400000000000001))
    assert describe(reach).says == (
        "With seq_len at 32, as in training, 93.0 % of the answers are right; "
        "above that it holds up to 64 (93.0 %), "
        "keeps half of its lead over a guess up to 128, and is 10.0 % at 512, not certainly more "
        "than a guess."
    )


def test_it_holds_as_far_as_was_tried(tmp_path):
    reach = found(tmp_path, TASK, lengths((16, 0.85), (64, 0.85), (128, 0.88)))
    # Wilson's interval of 0.9 on 32 rows of one answer reaches below 0.86.
    assert reach.reference_interval == pytest.approx((0.748, 0.964), abs=0.01)
    assert describe(reach).says == (
        "With seq_len at 32, as in training, 90.0 % of the answers are right; "
        "above that it holds as far as was tried, 88.0 % at 128; "
        "below that it holds as far as was tried, 85.0 % at 16."
    )


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        (((32, 0.9), (64, 0.3), (128, 0.2)), "falls at once, to 30.0 % at 64, and is 20.0 % at"),
        (((32, 0.9), (64, 0.5)), "above that it falls at once, to 50.0 % at 64."),
        (
            ((32, 0.9), (8, 0.3), (16, 0.9)),
            "below that it holds down to 16 (90.0 %), and is 30.0 %",
        ),
        (((32, 0.9),), "; no other value was tried."),
        (
            ((32, 0.09), (64, 0.3)),
            "That is not certainly more than a guess (10.0 %), which needs",
        ),
    ],
)
def test_other_endings(tmp_path, shares, says):
    assert says in describe(found(tmp_path, TASK, lengths(*shares))).says


def test_what_a_shortcut_reaches_too_does_not_hold(tmp_path):
    shares = ((32, 0.4), (64, 0.4))
    says = describe(found(tmp_path / "null", TASK, lengths(*shares), copy=0.5)).says
    assert says == (
        "With seq_len at 32, as in training, 40.0 % of the answers are right. "
        "That is not certainly more than the "
        "shortcut “copy” (50.0 %), which needs no training: the model has learned nothing that "
        "could hold elsewhere."
    )
    says = describe(found(tmp_path / "planted", TASK, lengths(*shares), copy=0.3)).says
    assert "holds as far as was tried, 40.0 % at 64" in says


def test_an_interval_that_reaches_the_trained_one_is_no_fall(tmp_path):
    wide = [entry("seq_len", 32, 0.9), entry("seq_len", 64, 0.7, half=0.25)]
    says = describe(found(tmp_path, TASK, wide)).says
    assert "holds as far as was tried, 70.0 % at 64" in says


def test_a_mixture_and_a_schedule_are_ranges(tmp_path):
    entries = lengths((16, 0.9), (64, 0.9), (256, 0.2))
    mixture = found(tmp_path / "mixture", TASK.replace(seq_len=(16, 64)), entries)
    assert mixture.trained == (16, 64)
    assert "Accuracy by seq_len, trained at 16, 64" in describe(mixture).title
    assert "grey range" in describe(mixture).reading
    assert describe(mixture).says.startswith(
        "With seq_len at 16, 64, as in training, 90.0 % of the answers are right; above"
    )
    task = TASK.replace(seq_len=Schedule(first=16, last=64, rows=100))
    schedule = found(tmp_path / "schedule", task, entries)
    assert schedule.trained == (16, 64)
    assert "trained at 16 → 64 over 100 rows" in describe(schedule).title
    traces = {trace["name"]: trace for trace in figure(schedule)["data"]}
    assert set(traces["trained on"]["x"]) == {16, 64}


def test_values_in_no_order_are_told_one_by_one(tmp_path):
    task = Copy(seq_len=16)
    entries = [entry("mode", "prefix", 0.3), entry("mode", "copy", 0.9)]
    reach = found(tmp_path / "mode", task, entries)
    assert (reach.places, reach.trained) == (None, None)
    assert describe(reach).says == (
        "With mode at copy, as in training, 90.0 % of the answers are right; 30.0 % at prefix; "
        "90.0 % at copy, no certain difference."
    )
    assert figure(reach)["layout"]["xaxis"]["type"] == "category"
    task = Overwrite(seq_len=64, n_pairs=4, vocab_size=64)
    reach = found(tmp_path / "spacing", task, [entry("spacing", 1, 0.4), entry("spacing", 2, 0.9)])
    assert (
        "With spacing at the default, as in training, 90.0 % of the answers" in describe(reach).says
    )
    assert "trained on" not in [trace["name"] for trace in figure(reach)["data"]]


def test_what_the_model_cannot_take_is_said(tmp_path):
    error = {"option": "seq_len", "value": 64, "step": STEPS, "error": "64 tokens are too many."}
    reach = found(tmp_path / "one", TASK, [*lengths((32, 0.9)), error])
    assert describe(reach).says.endswith(
        "no other value was tried. Not at 64: 64 tokens are too many."
    )
    reach = found(tmp_path / "all", TASK, [error])
    assert describe(reach).says.startswith("No value could be evaluated. Not at 64")
    assert reach.draw() is None


def test_without_an_accuracy_of_its_own_nothing_holds(tmp_path):
    reach = found(tmp_path, TASK, lengths((64, 0.5), (128, 0.3)), accuracy=None)
    assert describe(reach).says.startswith(
        "The accuracy is between 30.0 % at 128 and 50.0 % at 64; the run has no"
    )
    assert "Holds" not in describe(reach).reading


def test_lengths_stand_on_a_logarithmic_axis_and_chance_is_dotted(tmp_path):
    reach = found(tmp_path, TASK, lengths((64, 0.9), (256, 0.4)))
    fig = figure(reach)
    assert fig["layout"]["xaxis"]["type"] == "log"
    traces = {trace["name"]: trace for trace in fig["data"]}
    assert traces["chance"]["line"]["dash"] == "dot"
    assert list(traces["as trained"]["x"]) == [32, 256]


def test_a_run_that_was_tried_nowhere_else_has_nothing_to_show(tmp_path):
    with pytest.raises(NotApplicableError, match="in no setting but its own"):
        found(tmp_path, TASK, [])
    model = build("AM", vocab_size=11, d_model=8)
    with pytest.raises(NotApplicableError, match="no run"):
        measure(Subject(TASK, model, TASK.batch(size=1)))
