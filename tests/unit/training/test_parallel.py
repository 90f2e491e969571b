"""One run in several processes: it ends as in one, and whatever ends one process ends all."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lab.cli import app
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.machine.launch import NAME, Launch, LostProcessError, read_launch
from lab.training.experiment import carry_out
from lab.training.parallel import check_shares, dismiss, find_share, follow
from lab.training.runs import Run
from tasks import TASKS
from tests.forkserver import connect_server

RUNTIME = Runtime(device="cpu", threads=1, checkpoint_every=4, history=False)
TRAIN = {
    "max_steps": 12,
    "learning_rate": 0.03,
    "batch_size": 5,  # three rows and two
    "eval_every": 3,
    "test_rows": 32,
    "warmup_steps": 2,
    "lengthen": True,
    "lengthen_at": 0.6,  # a little above chance
    "stage_steps": 20,
    "precision": "fp32",
}
ROUTED = ModelConfig(stack="AR SM", d_model=8, options={"R.n_experts": 4, "R.balance_weight": 1.0})
TRAIN_COMMAND = [
    *["mqar", "--seq-len", "8", "--vocab-size", "32", "--d-model", "8", "--batch-size", "4"],
    *["--no-lengthen", "--test-rows", "8"],
]


def make(path: Path, seq_len=32, **changes) -> Run:
    """A run whose rows have one to nine scored positions each, and whose experts are balanced."""
    task = TASKS["flip_flop"](seq_len=seq_len)
    return Run(path, task, ROUTED, TrainConfig(**{**TRAIN, **changes}))


def describe(rank: int, count: int, port: int) -> dict[str, str]:
    """The environment of a process, as torchrun would set it."""
    return {
        NAME: "test",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def train_in_double() -> None:
    build = Run.build
    Run.build = lambda self: build(self).double()


def help_to_train(environment: dict[str, str]) -> None:
    """What a process does that does not lead."""
    os.environ.update(environment)
    train_in_double()
    launch = read_launch()
    assert launch is not None
    follow(launch)


@pytest.fixture(autouse=True)
def _in_double(monkeypatch):
    monkeypatch.setattr(Run, "build", Run.build)  # which is then put back
    train_in_double()


@pytest.fixture
def start(monkeypatch):
    """Starts the other processes of several, and makes this one lead them."""
    context = connect_server()

    @contextmanager
    def start(count: int = 2, exit_codes: tuple[int, ...] = (0,)):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        others = [
            context.Process(target=help_to_train, args=(describe(rank, count, port),))
            for rank in range(1, count)
        ]
        for other in others:
            other.start()
        for name, value in describe(0, count, port).items():
            monkeypatch.setenv(name, value)
        try:
            yield others
            for other in others:
                other.join(60)
            assert {other.exitcode for other in others} == set(exit_codes)
        finally:
            for other in others:
                other.kill()

    return start


def train(run: Run, on_row=lambda row: None) -> dict:
    return carry_out(run, RUNTIME, on_row=on_row, launch=read_launch())


def assert_same(run: Run, other: Run, atol: float = 1e-9) -> None:
    for row, known in zip(run.read_metrics(), other.read_metrics(), strict=True):
        for name in row.keys() - {"seconds", "cpu_seconds"}:
            assert row[name] == pytest.approx(known[name], abs=atol), (row["step"], name)
    weights = other.load_state().model.state_dict()
    for name, weight in run.load_state().model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (2, {}),
        (3, {"optimizer": "adamw", "train_rows": 40}),
        # Rows of several lengths, cut after the last answer of any of them.
        (2, {"seq_len": (8, 24), "lengthen": False}),
    ],
)
def test_several_processes_end_as_one(start, tmp_path, count, changes):
    runs = make(tmp_path / "several", **changes), make(tmp_path / "one", **changes)
    with start(count):
        several = train(runs[0])
    assert read_launch() is None
    one = train(runs[1])
    assert_same(*runs)
    assert several["accuracy"] == pytest.approx(one["accuracy"])
    assert changes or len({row["seq_len"] for row in runs[0].read_metrics()}) > 1


def test_a_signal_to_another_process_ends_the_run_and_one_process_resumes_it(start, tmp_path):
    run, whole = make(tmp_path / "run"), make(tmp_path / "whole")
    with start() as (other,):

        def interrupt(row) -> None:
            if row.step == 5:
                os.kill(other.pid, signal.SIGTERM)
                time.sleep(0.2)

        result = train(run, interrupt)
    assert (result["stopped"], result["signal"]) == ("interrupted", "SIGTERM")
    assert list(run.list_checkpoints()) == [result["steps"]]
    assert result["steps"] in (6, 7)
    train(run)
    train(whole)
    assert_same(run, whole)


def test_a_killed_process_leaves_a_checkpoint_of_the_last_step(start, tmp_path):
    run = make(tmp_path / "run")
    with start(exit_codes=(-signal.SIGKILL,)) as (other,):

        def kill(row) -> None:
            if row.step == 5:
                other.kill()
                other.join()

        with pytest.raises(LostProcessError, match="the same command goes on from the newest"):
            train(run, kill)
    assert list(run.list_checkpoints()) == [5]
    assert train(run)["steps"] == 12


def test_what_ends_the_leader_ends_the_others(start, tmp_path):
    def fail(row) -> None:
        raise OSError("the disk is full")

    with start(), pytest.raises(OSError, match="the disk is full"):
        train(make(tmp_path / "run"), fail)


def test_the_others_end_where_nothing_is_trained(start):
    with start():
        dismiss()


@pytest.mark.parametrize(("rows", "count"), [(2, 2), (5, 2), (7, 3), (64, 5)])
def test_every_row_has_one_process_and_shares_are_even(rows, count):
    shares = [range(rows)[find_share(rows, Launch(r, count, r, count))] for r in range(count)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_fewer_rows_than_processes_are_refused(tmp_path):
    run = make(tmp_path / "run", batch_size=3)
    check_shares(run, Launch(0, 3, 0, 3), "cpu")
    with pytest.raises(ValueError, match=r"batch_size=3: must be ≥ 4, the number of processes"):
        check_shares(run, Launch(0, 4, 0, 4), "cpu")


def test_each_process_needs_a_gpu_of_its_own(tmp_path, monkeypatch):
    run = make(tmp_path / "run")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_shares(run, Launch(0, 4, 0, 2), "auto")  # on two machines
    with pytest.raises(ValueError, match="device=cuda: this machine has 2 GPUs for 3 processes"):
        check_shares(run, Launch(0, 3, 0, 3), "cuda")
    with pytest.raises(ValueError, match="device=cuda:1: must be cuda, as each process takes"):
        check_shares(run, Launch(0, 2, 0, 2), "cuda:1")


@pytest.mark.parametrize(
    "words",
    [
        [*TRAIN_COMMAND, "--seeds", "2"],
        ["sweep", "mqar", "--preset", "small", "--grid", "d_model=8,16"],
        ["claim", "state-space-recall", "--scale", "smoke"],
    ],
)
def test_a_command_of_several_runs_is_refused(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words, env=describe(0, 2, 1))
    assert result.exit_code == 2
    assert "torchrun is for a single run; start this command without it" in result.output
    assert not any(tmp_path.rglob("metrics.jsonl"))


def test_one_process_of_torchrun_is_alone(monkeypatch):
    for name, value in describe(0, 1, 1).items():
        monkeypatch.setenv(name, value)
    assert read_launch() is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, "goes on"), (signal.SIGKILL, "SIGKILL")]
)
def test_torchrun(tmp_path, number, words):
    options = ["--out", str(tmp_path / "run"), "--json", "--max-steps", "400"]
    lab = ["-m", "lab", *TRAIN_COMMAND, *options, "--checkpoint-every", "20"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = subprocess.Popen([*torchrun, *lab], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 30:
        time.sleep(0.05)
        assert process.poll() is None
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(listed.stdout.split()[0]), number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert words in said
    kept = list(Run.open(tmp_path / "run").list_checkpoints())
    assert kept[0] >= 20
    for _ in range(2):  # the second time there is nothing to train
        done = subprocess.run([*torchrun, *lab], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert '"steps": 400' in done.stdout
        assert done.stdout.count('"stopped"') == 1
