"""An extended run is the run that had the later limit from the start."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lab.cli import app
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.training import checkpoint
from lab.training.experiment import carry_out
from lab.training.extension import describe_effects, explain_ending, extend
from lab.training.runs import Run
from tasks import TASKS

STEPS = 16
EASY = TrainConfig(
    batch_size=4,
    eval_every=4,
    test_rows=32,
    max_steps=STEPS,
    learning_rate=0.02,
    warmup_steps=0,
    lengthen=True,
    lengthen_at=0.6,
    precision="fp32",
)


def train(path: Path, steps: int, minutes: float | None = None, **changes) -> Run:
    task = TASKS["flip_flop"](seq_len=32, **changes.pop("task", {}))
    config = replace(EASY, max_steps=steps, **changes)
    run = Run(path, task, ModelConfig(stack="AM", d_model=8), config)
    carry_out(run, Runtime(device="cpu", max_minutes=minutes))
    return run


def list_rows(run: Run) -> list[dict]:
    return [{**row, "seconds": 0, "cpu_seconds": 0} for row in run.read_metrics()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = train(tmp_path_factory.mktemp("whole") / "run", STEPS)
    assert [stage.began for stage in run.read_metrics().stages][:3] == [0, 4, 8]
    return run


@pytest.mark.parametrize("steps", [4, 8, 10])
def test_it_ends_with_the_same_bits(whole, tmp_path, steps):
    """Limits at which the rows grow, and one between two evaluations."""
    run = extend(train(tmp_path / "run", steps), STEPS)
    carry_out(run, Runtime(device="cpu"))
    assert Run.open(run.path).to_dict() == whole.to_dict()
    assert list_rows(run) == list_rows(whole)
    assert run.list_steps() == whole.list_steps()
    ours, theirs = (r.load_state() for r in (run, whole))
    assert (ours.rows, ours.stage_step) == (theirs.rows, theirs.stage_step)
    for name, weight in ours.model.state_dict().items():
        assert torch.equal(weight, theirs.model.state_dict()[name]), name
    kept = json.loads((run.path / f"result.step-{steps}.json").read_text())
    assert (kept["stopped"], kept["steps"]) == ("budget", steps)


def test_with_schedule_error_the_rate_forgets_the_last_evaluation(tmp_path, monkeypatch):
    """A run of 10 steps is evaluated after the last; a longer one after steps 8 and 12."""
    monkeypatch.setattr("lab.training.annealing.BELOW", 1.0)  # so that the rate always falls
    whole = train(tmp_path / "whole", STEPS, schedule="error")
    run = extend(train(tmp_path / "run", 10, schedule="error"), STEPS)
    carry_out(run, Runtime(device="cpu"))
    assert list_rows(run) == list_rows(whole)
    assert run.load_state().annealing == whole.load_state().annealing


def test_the_command_goes_on_and_extends(whole, tmp_path):
    path = train(tmp_path / "run", 4, minutes=1e-9).path
    found = CliRunner().invoke(app, f"resume {path} --max-steps {STEPS}".split())
    assert found.exit_code == 0, found.output
    assert "resuming after step 1" in found.output
    assert list_rows(Run.open(path)) == list_rows(whole)
    found = CliRunner().invoke(app, f"resume {path} --max-steps {STEPS}".split())
    assert found.exit_code == 2
    assert f"max_steps={STEPS}: must be > {STEPS}, the steps already taken" in found.stderr


def test_a_limit_below_the_steps_taken_is_refused_also_where_a_later_one_changes_nothing(tmp_path):
    run = train(tmp_path / "run", 8, solved_at=0.01, lengthen=False)
    taken = run.read_metrics()[-1]["step"]
    assert explain_ending(run) == f"solved after {taken} steps"
    found = CliRunner().invoke(app, f"resume {run.path} --max-steps {taken - 1}".split())
    assert found.exit_code == 2
    [line] = found.stderr.strip().splitlines()
    assert line == f"Error: max_steps={taken - 1}: must be > {taken}, the steps already taken"


def test_rows_that_lengthen_unlearned_do_so_at_a_former_limit_too(tmp_path):
    options = {"lengthen_at": 1.0, "stage_steps": 5, "unlearned": "lengthen"}
    whole = train(tmp_path / "whole", 12, **options)
    run = extend(train(tmp_path / "run", 5, **options), 12)
    carry_out(run, Runtime(device="cpu"))
    assert [stage.began for stage in whole.read_metrics().stages] == [0, 5, 10]
    assert list_rows(run) == list_rows(whole)
    assert run.list_steps() == whole.list_steps()


@pytest.mark.parametrize(
    "write", [(Run, "keep_weights"), (Run, "write_metrics"), (checkpoint, "rewrite_counters")]
)
def test_an_extension_killed_between_two_writes_can_be_repeated(tmp_path, write, monkeypatch):
    options = {"lengthen_at": 1.0, "stage_steps": 5, "unlearned": "lengthen"}
    whole, run = train(tmp_path / "whole", 8, **options), train(tmp_path / "run", 5, **options)
    home, name = write
    original = getattr(home, name)

    def write_and_die(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(home, name, write_and_die)
        with pytest.raises(KeyboardInterrupt):
            extend(run, 8)
    carry_out(extend(run, 8), Runtime(device="cpu"))
    assert list_rows(run) == list_rows(whole)
    assert run.list_steps() == whole.list_steps()


def test_what_a_later_limit_changes_is_said(tmp_path):
    run = train(tmp_path / "run", 2, schedule="cosine", task={"p_ignore": (0.5, 0.9)})
    (cosine,) = describe_effects(run, 8)
    assert "schedule=cosine: the learning rate goes from 0.002 to 0.0" in cosine
    assert not list(describe_effects(replace(run, train=EASY), 8))


def test_a_limit_that_changes_nothing_is_said(tmp_path):
    solved = train(tmp_path / "solved", STEPS, solved_at=0.3)
    assert explain_ending(solved) == f"solved after {solved.read_metrics()[-1]['step']} steps"
    stuck = train(tmp_path / "stuck", STEPS, stage_steps=3, lengthen_at=0.99)
    assert explain_ending(stuck) == "stopped after stage_steps=3 steps at rows of 8 tokens"
    assert explain_ending(train(tmp_path / "limit", 3)) == ""


def test_solved_only_by_the_test_of_the_last_step_is_extended(tmp_path):
    """That test was made because it was the last; another run would have gone on."""
    run = train(tmp_path / "run", 4, lengthen=False, solved_at=0.99)
    *rows, last = run.read_metrics()
    rows.append({**last, "test_accuracy": 1.0})
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.path / "result.json").unlink()
    assert carry_out(run, Runtime(device="cpu"))["stopped"] == "solved"
    assert explain_ending(run) == ""
    extend(run, 5)
    assert "test_accuracy" not in run.read_metrics()[-1]
