"""Which weights a run keeps along the way, and that they are the ones it had."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.config import ModelConfig, Runtime, TrainConfig
from lab.files import RunError
from lab.training.checkpoint import MEMORY, RISE, WeightsSchedule, keep_weights
from lab.training.experiment import carry_out
from lab.training.loop import DivergedError, Row, fit
from lab.training.run import Run
from tasks import TASKS

STEPS = 24
POWERS = [1, 2, 3, 4, 6, 8, 11, 16, 23]
"""Of √2, rounded, up to STEPS."""


class CrashError(Exception):
    """What ends a run in the middle of a step."""


def make(path: Path, **train) -> Run:
    values = {"batch_size": 4, "max_steps": STEPS, "eval_every": 8, "test_rows": 8}
    config = TrainConfig(**{"precision": "fp32", **values, **train})
    return Run(path, TASKS["mqar"](seq_len=16, vocab_size=64), ModelConfig(d_model=8), config)


def finish(run: Run, **runtime) -> dict:
    return carry_out(run, Runtime(device="cpu", checkpoint_every=5, **runtime))


def crash(run: Run, at: int, **runtime) -> None:
    """Carry a run out until a step is on record, but nothing that comes after the record."""

    def on_row(row: Row) -> None:
        if row.step == at:
            raise CrashError

    with pytest.raises(CrashError):
        carry_out(run, Runtime(device="cpu", checkpoint_every=5, **runtime), on_row=on_row)


def files(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.path / "history").iterdir()}


def due(accuracies, first: int = 1) -> list[int]:
    pace = WeightsSchedule()
    return [step for step, share in enumerate(accuracies, first) if pace.update(step, float(share))]


@pytest.fixture
def many(monkeypatch):
    """Let a run that learns next to nothing keep weights at more than the powers."""
    monkeypatch.setattr("lab.training.checkpoint.RISE", 0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    run = make(tmp_path_factory.mktemp("whole") / "run")
    finish(run)
    return run


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> dict[str, bytes]:
    """What a run keeps that nothing interrupts, at more steps than the powers."""
    run = make(tmp_path_factory.mktemp("unbroken") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.training.checkpoint.RISE", 0.002)
        finish(run)
    assert len(files(run)) > len(POWERS)
    return files(run)


def test_a_flat_accuracy_keeps_the_powers_of_the_root_of_two():
    kept = due([0.06] * 1100)
    assert kept == [round(2 ** (k / 2)) for k in range(1, 21)]
    assert kept[:7] == [1, 2, 3, 4, 6, 8, 11]


def test_a_jump_keeps_a_step_for_each_sixteenth_that_the_running_mean_climbs():
    accuracies = [0.0] * 300 + [1.0] * 100
    expected, running, highest = [], 0.0, 0.0
    for step, share in enumerate(accuracies, 1):
        running = MEMORY * running + (1 - MEMORY) * share
        if running >= highest + RISE or any(step == round(2 ** (k / 2)) for k in range(20)):
            expected.append(step)
            highest = max(highest, running)
    assert due(accuracies) == expected
    jump = [step for step in expected if 300 < step <= 330]
    assert jump[0] == 301
    assert len(jump) >= 6
    assert np.diff(jump).max() <= 8


@pytest.mark.parametrize("level", [0.5, 0.0, 1.0])
def test_noise_keeps_few_more_than_the_powers(level):
    # One scored position a step: the accuracy is 0 or 1, the worst there is.
    noise = np.random.default_rng(0).random(20_000) < level
    assert len(due(noise)) <= len(due([0.0] * 20_000)) + 1 / RISE


def test_every_kept_step_is_the_step_it_says(whole, tmp_path):
    assert list(whole.list_kept_weights()) == POWERS
    assert whole.list_steps() == [0, *POWERS, STEPS]
    state = make(tmp_path / "again").load_state()
    state.precision = "fp32"
    wanted = {0: {k: w.clone() for k, w in state.model.state_dict().items()}}
    for row in fit(whole.task, state, whole.train):
        wanted[row.step] = {k: w.clone() for k, w in state.model.state_dict().items()}
    for step in whole.list_steps():
        model = whole.load_model(step)
        assert not model.training
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, wanted[step][name]), (step, name)


@pytest.mark.parametrize("at", [13, STEPS])
def test_a_crash_changes_no_file(unbroken, tmp_path, many, at):
    broken = make(tmp_path / "broken")
    crash(broken, at)
    finish(broken)
    assert files(broken) == unbroken


def test_without_history_none_is_kept_and_training_is_the_same(whole, tmp_path):
    run = make(tmp_path / "run")
    finish(run, history=False)
    assert not (run.path / "history").exists()
    assert run.list_steps() == [0, STEPS]
    ours, theirs = run.load_model(STEPS).state_dict(), whole.load_model(STEPS).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_history_that_begins_late_is_kept_as_it_would_have_been(unbroken, tmp_path, many):
    late = make(tmp_path / "late")
    crash(late, 13, history=False)
    finish(late)
    # It goes on from the checkpoint of step 10.
    assert files(late) == {name: data for name, data in unbroken.items() if int(name[5:13]) > 10}


def copy(run: Run, path: Path) -> Run:
    """A run folder with another's history and no checkpoint."""
    other = replace(run, path=path)
    other.claim()
    (path / "history").mkdir()
    for name, data in files(run).items():
        (path / "history" / name).write_bytes(data)
    return other


@pytest.mark.parametrize("left", [0, 4, 100, 2000])
def test_a_truncated_file_is_named(whole, tmp_path, left):
    run = copy(whole, tmp_path / "run")
    file = run.list_kept_weights()[8]
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(RunError, match=r"step-00000008.safetensors: truncated, or no weights: "):
        run.load_model(8)
    assert run.load_model(6)


def test_weights_of_another_model_are_named(whole, tmp_path):
    run = replace(copy(whole, tmp_path / "run"), model=ModelConfig(d_model=4))
    with pytest.raises(RunError, match=r"step-00000008.safetensors: does not fit its run: "):
        run.load_model(8)


def test_a_step_that_is_not_there_lists_those_that_are(whole):
    with pytest.raises(RunError, match=r"no weights of step 5; has 0, 1, 2, 3, 4, 6, 8, 11, 16"):
        whole.load_model(5)


def test_a_refusing_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    run = make(tmp_path / "run")
    crash(run, 5)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lab.files.os.fsync", full)
    before = files(run)
    with pytest.raises(RunError, match=f"{run.path}: cannot be written: No space left on device"):
        keep_weights(run, 6, run.build())
    assert files(run) == before
    monkeypatch.undo()
    finish(run)
    assert list(run.list_kept_weights()) == POWERS


def test_weights_that_are_not_finite_are_not_kept(tmp_path):
    run = make(tmp_path / "run", learning_rate=1e30, optimizer="adamw", warmup_steps=0)
    with pytest.raises(DivergedError):
        finish(run)
    for step in run.list_steps():
        assert all(w.isfinite().all() for w in run.load_model(step).state_dict().values())
    model = run.build()
    with torch.no_grad():
        model.embed.weight[0, 0] = torch.nan
    keep_weights(run, 20, model)
    assert 20 not in run.list_steps()


def test_nothing_is_unpickled(whole, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, refuse)
    assert whole.load_model(8)


def test_the_runs_folder_is_what_its_docstring_says(whole):
    from lab.training import run as module

    lines = (module.__doc__ or "").splitlines()
    named = [line.split()[0] for line in lines if line[:4] == " " * 4]
    there = {f"{path.name}/" if path.is_dir() else path.name for path in whole.path.iterdir()}
    assert there < set(named)
    config = json.loads((whole.path / "config.json").read_text())
    assert "history" not in str(config)
