"""How far it holds is said from planted evaluations, and no further than intervals allow."""

import json
from typing import Any

import pytest

from analysis.base import NotApplicableError, Subject
from analysis.plain import to_plain
from analysis.run.generalisation import AccuracyByOption, measure
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


def lengths(*accuracies: tuple[int, float]) -> list[dict[str, Any]]:
    return [entry("seq_len", length, accuracy) for length, accuracy in accuracies]


TASK = Induction(seq_len=32, vocab_size=11)


def test_it_holds_then_halves_then_is_a_guess(tmp_path):
    shares = ((512, 0.1), (64, 0.93), (128, 0.7), (256, 0.3), (32, 0.93))
    reach = found(tmp_path, TASK, lengths(*shares))
    assert reach.values == ("32", "64", "128", "256", "512")
    # What was evaluated in the same way goes before the result's.
    assert (reach.reference, reach.reference_interval) == (0.93, (0.92, 0.9400000000000001))
    assert reach.verdicts == ["holds", "holds", "half", "falls", "not surely above a guess"]
    assert reach.says == (
        "With seq_len at 32, as in training, 93.0 % of the answers are right; other values at "
        "which this holds, of 4 tried: 64."
    )


def test_what_a_shortcut_reaches_too_does_not_hold(tmp_path):
    shares = ((32, 0.4), (64, 0.4))
    reach = found(tmp_path / "null", TASK, lengths(*shares), copy=0.5)
    assert reach.verdicts == ["", ""]
    assert "not surely better than the shortcut “copy” (50.0 %)" in reach.says
    reach = found(tmp_path / "planted", TASK, lengths(*shares), copy=0.3)
    assert reach.says.endswith("this holds, of 1 tried: 64.")


def test_a_mixture_and_a_schedule_are_ranges(tmp_path):
    entries = lengths((16, 0.9), (64, 0.9), (256, 0.2))
    mixture = found(tmp_path / "mixture", TASK.replace(seq_len=(16, 64)), entries)
    assert mixture.trained == (16, 64)
    assert mixture.title == "Accuracy by seq_len, trained at 16, 64"
    assert mixture.says.endswith("of 1 tried: none.")
    task = TASK.replace(seq_len=Schedule(first=16, last=64, rows=100))
    schedule = found(tmp_path / "schedule", task, entries)
    assert schedule.trained == (16, 64)
    assert "trained at 16 → 64 over 100 rows" in schedule.title
    fig = schedule.figure()
    assert fig is not None
    assert [(s["x0"], s["x1"]) for s in fig.to_dict()["layout"]["shapes"]][-1] == (16, 64)


def test_values_in_no_order_are_told_one_by_one(tmp_path):
    entries = [entry("mode", "prefix", 0.3), entry("mode", "copy", 0.9)]
    reach = found(tmp_path / "mode", Copy(seq_len=16), entries)
    assert (reach.places, reach.trained) == (None, None)
    assert reach.verdicts == ["falls", "holds"]
    assert reach.says.endswith("of 1 tried: none.")
    fig = reach.figure()
    assert fig is not None
    assert list(fig.to_dict()["layout"]["yaxis"]["ticktext"]) == ["prefix", "copy"]
    task = Overwrite(seq_len=64, n_pairs=4, vocab_size=64)
    reach = found(tmp_path / "spacing", task, [entry("spacing", 1, 0.4), entry("spacing", 2, 0.9)])
    assert reach.says.startswith("With spacing at the default, as in training, 90.0 % of")


def test_what_the_model_cannot_take_is_said(tmp_path):
    error = {"option": "seq_len", "value": 64, "step": STEPS, "error": "64 tokens are too many."}
    reach = found(tmp_path / "one", TASK, [*lengths((32, 0.9)), error])
    assert reach.numbers().rows[-1] == ("64", "", "", "64 tokens are too many.")
    assert found(tmp_path / "all", TASK, [error]).figure() is None


def test_a_run_that_was_tried_nowhere_else_has_nothing_to_show(tmp_path):
    with pytest.raises(NotApplicableError, match="in no setting but its own"):
        found(tmp_path, TASK, [])
    model = build("AM", vocab_size=11, d_model=8)
    with pytest.raises(NotApplicableError, match="no run"):
        measure(Subject(TASK, model, TASK.batch(size=1)))
