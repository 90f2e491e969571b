"""A run that is killed, stopped or broken, and taken up again."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from lab.config import ModelConfig, Runtime, TrainConfig
from lab.files import RunError, lock
from lab.training import checkpoint
from lab.training.experiment import carry_out, is_solved
from lab.training.loop import DivergedError
from lab.training.run import OutError, Run
from tasks import TASKS
from tests.forkserver import connect_server

STEPS = 24


def make(path: Path, **train) -> Run:
    values = {
        "batch_size": 4,
        "max_steps": STEPS,
        "eval_every": 8,
        "test_rows": 16,
        "precision": "fp32",
        "schedule": "cosine",
        **train,
    }
    task = TASKS["mqar"](seq_len=16, vocab_size=64)
    model = ModelConfig(
        stack="AM SE", d_model=16, options={"S.d_state": 8, "S.chunk_len": 8, "E.n_experts": 16}
    )
    return Run(path, task, model, TrainConfig(**values))


def finish(run: Run, **runtime) -> dict:
    return carry_out(run, Runtime(device="cpu", checkpoint_every=5, **runtime))


def weights(run: Run) -> dict[str, torch.Tensor]:
    return run.load_state().model.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module", params=["muon"])
def whole(request, tmp_path_factory):
    run = make(tmp_path_factory.mktemp("whole") / "run", optimizer=request.param)
    return run, finish(run)


def train_until(path: Path, number: int, at: int) -> None:
    """Train a run in a process that sends itself a signal after a step."""
    torch.set_num_threads(1)

    def on_row(row) -> None:
        if row.step == at:
            os.kill(os.getpid(), number)

    carry_out(Run.open(path), Runtime(device="cpu", checkpoint_every=5), on_row=on_row)


def interrupt(run: Run, number: int, at: int) -> int | None:
    run.claim()
    process = connect_server().Process(target=train_until, args=(run.path, int(number), at))
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.parametrize(
    ("whole", "at"), [("muon", 1), ("muon", STEPS), ("adamw", 13)], indirect=["whole"]
)
def test_killed_at_any_step_and_resumed_ends_with_the_same_bits(whole, tmp_path, at):
    run, result = whole
    broken = make(tmp_path / "run", optimizer=run.train.optimizer)
    assert interrupt(broken, signal.SIGKILL, at) == -signal.SIGKILL
    resumed = finish(broken)
    assert same(weights(broken), weights(run))
    keys = ("accuracy", "loss", "steps", "rows", "parameters", "stopped", "baselines")
    assert {k: resumed[k] for k in keys} == {k: result[k] for k in keys}
    for ours, theirs in zip(broken.read_metrics(), run.read_metrics(), strict=True):
        untimed = {"seconds": 0, "cpu_seconds": 0}
        assert ours.keys() >= untimed.keys()
        assert {**ours, **untimed} == {**theirs, **untimed}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_of_the_step_under_way(tmp_path, number):
    run = make(tmp_path / "run")
    assert interrupt(run, number, 7) == 0
    assert list(run.list_checkpoints()) == [7]
    result = run.read_result()
    assert result is not None
    assert (result["set_by_hand"], result["diagnosis"]) == (None, None)  # the user waits
    assert (result["stopped"], result["steps"]) == ("interrupted", 7)
    assert finish(run)["stopped"] == "budget"


def test_stopping_for_time_resumes_to_the_same_bits(whole, tmp_path):
    run, _ = whole
    other = make(tmp_path / "run", optimizer=run.train.optimizer)
    first = finish(other, max_minutes=1e-9)
    assert (first["stopped"], first["steps"]) == ("interrupted", 1)
    finish(other)
    assert same(weights(other), weights(run))


def test_a_finished_run_is_left_as_it_is(whole):
    run, result = whole
    before = (run.path / "metrics.jsonl").read_bytes()
    assert finish(run) == result
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_solved_stops_early_and_stays_solved(tmp_path):
    run = make(tmp_path / "run", solved_at=0.01, max_steps=400, test_rows=64)
    result = finish(run)
    assert result["stopped"] == "solved"
    assert result["accuracy"] >= 0.01
    assert result["steps"] < 400
    run.path.joinpath("result.json").unlink()
    again = finish(run)
    assert again["steps"] == result["steps"]


def test_just_the_accuracy_asked_for_is_solved(tmp_path):
    config = make(tmp_path / "run", solved_at=0.75).train
    assert is_solved({"step": 3, "test_accuracy": 0.75}, 3, config)
    assert not is_solved({"step": 3, "test_accuracy": 0.7499}, 3, config)
    assert not is_solved({"step": 2, "test_accuracy": 0.75}, 3, config)


def test_an_exploding_run_is_named_and_keeps_its_last_good_checkpoint(tmp_path):
    run = make(tmp_path / "run", learning_rate=1e30, optimizer="adamw", warmup_steps=0)
    with pytest.raises(DivergedError, match="at step"):
        carry_out(run, Runtime(device="cpu", checkpoint_every=1))
    result = run.read_result()
    assert result is not None
    assert result["stopped"] == "diverged"
    assert result["accuracy"] is None
    assert all(p.isfinite().all() for p in run.load_state().model.parameters())


def test_another_configuration_is_refused_and_nothing_is_lost(whole):
    run, _ = whole
    before = weights(run)
    other = make(run.path, optimizer=run.train.optimizer, learning_rate=0.5)
    with pytest.raises(OutError, match=r"holds a run with train.learning_rate=0.003, this one has"):
        finish(other)
    assert same(weights(run), before)


def test_a_file_or_a_foreign_folder_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(OutError, match="is a file, must be a folder or new"):
        finish(make(file))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutError, match="is not empty and holds no run"):
        finish(make(tmp_path))
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", ["model", "optimizer"])
@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_checkpoint_is_named(tmp_path, name, damage):
    run = make(tmp_path / "run")
    finish(run, max_minutes=1e-9)
    file = run.list_checkpoints()[1] / f"{name}.safetensors"
    data = file.read_bytes()
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "changed":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        file.unlink()
    with pytest.raises(RunError, match=f"checkpoint .*{name}.safetensors: "):
        finish(run)
    assert len(run.read_metrics()) == 1


def test_a_damaged_state_file_is_named(tmp_path):
    run = make(tmp_path / "run")
    finish(run, max_minutes=1e-9)
    (run.list_checkpoints()[1] / "state.json").write_text('{"step": 1')
    with pytest.raises(
        RunError,
        match=r"checkpoint .* is incomplete; --fresh begins the run again",
    ):
        finish(run)


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    run, other = make(tmp_path / "a"), make(tmp_path / "b")
    finish(run, max_minutes=1e-9)
    config = json.loads((run.path / "config.json").read_text())
    config["model"]["d_model"] = 8
    (run.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"checkpoint .* does not fit its run: "):
        Run.open(run.path).load_state()
    assert not other.path.exists()


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    run = make(tmp_path / "run")
    finish(run, max_minutes=1e-9)
    before = weights(run)

    write = checkpoint.write

    def fill(path, content):
        if path.name == "optimizer.safetensors":
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(checkpoint, "write", fill)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        finish(run)
    assert list(run.list_checkpoints()) == [1]
    assert same(weights(run), before)
    assert not list(run.path.glob("checkpoint/.*"))


def test_a_newer_format_is_refused(tmp_path):
    run = make(tmp_path / "run")
    run.claim()
    config = json.loads((run.path / "config.json").read_text())
    (run.path / "config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(RunError, match="format=99: must be 1, which this lab reads"):
        Run.open(run.path)


def test_nothing_is_unpickled_on_load(whole, monkeypatch):
    run, _ = whole
    (home,) = run.list_checkpoints().values()
    assert sorted(os.listdir(home)) == ["model.safetensors", "optimizer.safetensors", "state.json"]

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, refuse)
    assert run.load_state().step == STEPS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 5}, "the counts in state.json are impossible; --fresh begins the run again"),
        ({"stage_step": 2}, "the counts in state.json are impossible"),
        ({"stage": 1}, "is of stage 1, this run has 1"),
        ({"step": "1"}, r"state.json; --fresh .*: step='1': must be a valid integer"),
        ({"format": 9}, "format 9, this lab reads 1"),
        ({"first_loss": "x"}, "first_loss='x': must be a valid number"),
        ({"threads": -1}, "threads=-1: must be greater than or equal to 0"),
        (
            {"annealing": {"wrong": 0.1, "least": 0.1, "waits": -1, "halvings": 0}},
            r"annealing.waits=-1: must be greater than or equal to 0",
        ),
    ],
)
def test_a_tampered_state_file_is_named(tmp_path, change, message):
    run = make(tmp_path / "run")
    finish(run, max_minutes=1e-9)
    file = run.list_checkpoints()[1] / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(RunError, match=message):
        finish(run)


@pytest.mark.parametrize("left", [b'{"step": 2, "lo', b"3", b"\xff\xfe"])
def test_a_last_line_that_is_no_row_is_left_out(whole, tmp_path, left):
    run, _ = whole
    other = make(tmp_path / "run", optimizer=run.train.optimizer)
    finish(other, max_minutes=1e-9)
    with open(other.path / "metrics.jsonl", "ab") as file:
        file.write(left)
    finish(other)
    assert [row["step"] for row in other.read_metrics()] == list(range(1, STEPS + 1))
    assert same(weights(other), weights(run))


@pytest.mark.parametrize(
    ("lose", "message"),
    [
        (lambda lines: lines[:7] + lines[8:], "line 8 is of step 9; lines are missing"),
        (lambda lines: lines[:-3], f"has {STEPS - 3} of {STEPS} steps; lines are missing"),
        (lambda lines: [*lines[:7], b"{}\n", *lines[8:]], "line 8 is damaged: step is missing"),
        (lambda lines: [], f"has 0 of {STEPS} steps; lines are missing"),
    ],
)
def test_metrics_that_lost_lines_are_not_read_as_whole(whole, tmp_path, lose, message):
    run = Run.open(shutil.copytree(whole[0].path, tmp_path / "run"))
    file = run.path / "metrics.jsonl"
    file.write_bytes(b"".join(lose(file.read_bytes().splitlines(keepends=True))))
    with pytest.raises(RunError, match=message):
        run.read_metrics()


@pytest.mark.parametrize("at", [STEPS + 3, STEPS + 8])
def test_a_later_limit_goes_on_and_ends_the_same_whenever_it_is_killed(whole, tmp_path, at):
    later, found = STEPS + 8, []
    for name in ("once", "killed"):
        run = Run.open(shutil.copytree(whole[0].path, tmp_path / name)).set_limit(later)
        if name == "killed":
            # The result of the shorter run is still there, as if the kill had come at once.
            assert run.read_final_result() is None
            assert interrupt(run, signal.SIGKILL, at) == -signal.SIGKILL
        found.append((finish(Run.open(run.path).set_limit(later)), weights(run), run))
    (once, one, _), (killed, other, run) = found
    assert same(one, other)
    assert not same(one, weights(whole[0]))
    keys = ("accuracy", "loss", "steps", "rows", "stopped")
    assert {key: killed[key] for key in keys} == {key: once[key] for key in keys}
    assert (killed["stopped"], killed["steps"]) == ("budget", later)
    assert finish(Run.open(run.path).set_limit(later)) == killed
    with pytest.raises(ValueError, match=f"max_steps={STEPS}: must be ≥ {later}, the steps alread"):
        run.set_limit(STEPS)


def test_a_result_that_is_stale_is_dropped_when_training_goes_on(whole, tmp_path):
    run = make(tmp_path / "run", optimizer=whole[0].train.optimizer)
    first = finish(run, max_minutes=1e-9)
    assert (first["stopped"], first["steps"]) == ("interrupted", 1)
    assert interrupt(run, signal.SIGKILL, 7) == -signal.SIGKILL
    assert run.read_result() is None
    run.write_result(first)  # as if it had been put back
    assert finish(run)["steps"] == STEPS
    assert same(weights(run), weights(whole[0]))


@pytest.mark.parametrize("content", ["{}", "{", "3"])
def test_a_tampered_result_is_named(tmp_path, content):
    run = make(tmp_path / "run")
    run.claim()
    (run.path / "result.json").write_text(content)
    with pytest.raises(RunError, match="remove it to conclude the run again"):
        finish(run)


def test_two_processes_never_share_a_folder(tmp_path):
    run = make(tmp_path / "run")
    run.claim()
    with lock(run.path), pytest.raises(RunError, match="another process is training this run"):
        finish(run)
    assert finish(run)["steps"] == STEPS


class Dropping(torch.nn.Module):
    """A user's mixer that draws random numbers while it trains."""

    def __init__(self, d_model: int):
        super().__init__()
        self.map = torch.nn.Sequential(torch.nn.Linear(d_model, d_model), torch.nn.Dropout(0.5))

    def forward(self, x):
        return self.map(x)


def test_dropout_resumes_exactly_and_is_off_in_evaluation(tmp_path):
    runs = []
    for name, minutes in (("whole", None), ("broken", 1e-9)):
        run = make(tmp_path / name)
        mixer = ModelConfig(stack="UM", d_model=16, model=f"{__name__}:Dropping")
        run = dataclasses.replace(run, model=mixer)
        finish(run, max_minutes=minutes)
        torch.manual_seed(1)
        runs.append((run, finish(run)))
    (whole, first), (broken, second) = runs
    assert same(weights(whole), weights(broken))
    assert (first["loss"], first["accuracy"]) == (second["loss"], second["accuracy"])


def test_a_divergence_says_what_is_kept(tmp_path):
    run = make(tmp_path / "run", learning_rate=1e30, optimizer="adamw", warmup_steps=0)
    with pytest.raises(DivergedError, match="last good checkpoint: none yet; try a lower"):
        carry_out(run, Runtime(device="cpu", checkpoint_every=50))
    # The same again diverges again: no checkpoint is missed that there never was.
    with pytest.raises(DivergedError, match="last good checkpoint: none yet; try a lower"):
        carry_out(run, Runtime(device="cpu", checkpoint_every=50))


@pytest.mark.gpu
def test_a_run_begun_on_cuda_goes_on_there_or_on_a_cpu(tmp_path):
    for device in ("cuda", "cpu"):
        run = make(tmp_path / device, precision="auto")
        first = carry_out(run, Runtime(device="cuda", max_minutes=1e-9))
        assert first["device"] == "cuda"
        assert first["precision"] in ("fp32", "bf16")
        assert carry_out(run, Runtime(device=device))["steps"] == STEPS
