"""Sweeps on real Ray clusters of this machine: the same bits as without, whatever is killed."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.cli.app import app
from lab.files import RunError
from lab.sweeps.cluster import connect, pack, receive, train_elsewhere
from lab.sweeps.outcome import find_status
from tests.sweep_ends import read_ends
from tests.unit.sweeps.test_cells import cell, describe, study

LAB = (sys.executable, "-m", "lab")
RAY_NODES = Path(__file__).with_name("ray_nodes.py")
TOKEN = "a-token-of-these-tests-alone"
STEPS = 60
SWEEP = (
    *("sweep", "mqar", "--grid", "learning_rate=1e-3,3e-3", "--workers", "2"),
    *("--seq-len", "16", "--vocab-size", "32", "--d-model", "16", "--batch-size", "8"),
    *("--start-len", "16", "--test-rows", "16", "--eval-every", "20", "--no-early-stop"),
    *("--max-steps", str(STEPS), "--checkpoint-every", "10"),
)


class Nodes:
    """A cluster in processes of its own; `ray_nodes.py` says what its commands are."""

    def __init__(self, count: int):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.2:{self.port}"
        self.home = tempfile.mkdtemp(prefix="lab-ray-", dir="/tmp")  # names of sockets are short
        self.environment = {
            **os.environ,
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_TMPDIR": self.home,
            "TMPDIR": self.home,  # of the folders in which tasks train
        }
        self.process = subprocess.Popen(
            [sys.executable, RAY_NODES, self.home, str(self.port), str(count)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("ready")

    def order(self, command: str) -> None:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        self._expect("done")

    def _expect(self, said: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == said:
                return
        raise AssertionError(f"the cluster ended before it said {said}")

    def start(self, out: Path, *options: str) -> subprocess.Popen[str]:
        """Start the sweep on the cluster."""
        return subprocess.Popen(
            [*LAB, *SWEEP, "--ray", self.address, "--out", str(out), *options],
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def list_tasks(self) -> list[int]:
        """Return the processes in which Ray runs tasks of a sweep."""
        listed = subprocess.run(
            ["ps", "-eo", "pid=,ppid=,args="], stdout=subprocess.PIPE, text=True, check=True
        )
        rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
        raylets = [pid for pid, parent, _ in rows if int(parent) == self.process.pid]
        return [
            int(pid)
            for pid, parent, args in rows
            if parent in raylets and args.startswith("ray::train_elsewhere")
        ]

    def close(self) -> None:
        self.process.communicate()  # closes the input
        assert self.process.returncode == 0
        shutil.rmtree(self.home)


@contextmanager
def open_nodes(count: int) -> Iterator[Nodes]:
    nodes = Nodes(count)
    try:
        yield nodes
    finally:
        nodes.close()


def run_here(out: Path, *options: str) -> dict[str, tuple]:
    """Run the sweep without Ray, and return its ends."""
    subprocess.run([*LAB, *SWEEP, "--out", str(out), *options], check=True)
    return read_ends(out)


def wait_for_checkpoints(out: Path, count: int) -> None:
    while len([*out.glob("*/checkpoint/step-*/state.json")]) < count:
        time.sleep(0.05)


def refuse(nodes: Nodes, out: Path, **environment: str) -> str:
    """Start the sweep with another token; return what it says."""
    given = {**nodes.environment, "HOME": nodes.home, **environment}
    command = [*LAB, *SWEEP, "--ray", nodes.address, "--out", str(out)]
    ended = subprocess.run(command, env=given, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2, ended.stderr
    assert not out.exists()
    return ended.stderr


@pytest.mark.cluster
def test_a_node_trains_a_sweep_to_the_same_bits_and_refuses_another_token(tmp_path):
    with open_nodes(1) as nodes:
        said = refuse(nodes, tmp_path / "refused", RAY_AUTH_TOKEN="another-token")
        assert said.startswith(f"Error: ray={nodes.address}: ")
        assert "token" in said
        one = ("--only", "learning_rate=0.003", "--seeds", "1")
        sweep = nodes.start(tmp_path / "ray", *one)
        _, said = sweep.communicate()
        assert sweep.returncode == 0, said
        assert read_ends(tmp_path / "ray") == run_here(tmp_path / "here", *one)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://127.0.0.1:10001", "must be HOST:PORT of the head node, auto, or local"),
        ("cluster", "must be HOST:PORT of the head node, auto, or local"),
        ("127.0.0.1:1", "no cluster answers there"),
    ],
)
def test_an_address_without_a_cluster_is_refused_in_one_line(address, said, tmp_path):
    words = [*SWEEP, "--ray", address, "--out", str(tmp_path / "out")]
    ended = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert ended.exit_code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"Error: ray={address}: {said}")
    assert not (tmp_path / "out").exists()


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs Ray.*wonderful-lab\[cluster\]"), connect("auto"):
        pass


@pytest.mark.cluster
def test_a_killed_task_and_a_lost_node_change_no_result(tmp_path):
    out = tmp_path / "ray"
    with open_nodes(2) as nodes:
        sweep = nodes.start(out)
        wait_for_checkpoints(out, 1)
        for task in nodes.list_tasks():
            os.kill(task, signal.SIGKILL)
        wait_for_checkpoints(out, 2)
        nodes.order("kill 1")
        _, said = sweep.communicate()
        assert sweep.returncode == 0, said
    assert read_ends(out) == run_here(tmp_path / "here")


@pytest.mark.cluster
@pytest.mark.parametrize("cause", ["interrupted", "head lost"])
def test_what_ends_the_command_is_one_sentence_and_it_goes_on_without_ray(cause, tmp_path):
    out = tmp_path / "ray"
    with open_nodes(1) as nodes:
        sweep = nodes.start(out)
        wait_for_checkpoints(out, 1)
        if cause == "interrupted":
            sweep.send_signal(signal.SIGINT)
        else:
            nodes.order("kill 0")
        _, said = sweep.communicate()
    words = " ".join(said.split())
    if cause == "interrupted":
        assert sweep.returncode == 128 + signal.SIGINT
        assert "run the same command again to resume" in words
    else:
        assert sweep.returncode == 1, said
        assert re.search(r"Error: .* is gone.* the same command goes on$", words), said
    assert run_here(out) == run_here(tmp_path / "here")


def test_what_arrives_stays_below_its_run_and_leaves_what_home_writes(tmp_path):
    (each,) = describe(study(cell()), tmp_path)
    each.run.claim()
    config = (each.run.path / "config.json").read_bytes()
    receive(each.run, {"config.json": b"{}", "spent.json": b"{}", "history/step-1": b"1"})
    assert (each.run.path / "config.json").read_bytes() == config
    assert {file.name for file in each.run.path.iterdir()} == {"config.json", "history"}
    with pytest.raises(RunError, match="is not below it"):
        receive(each.run, {"../outside": b""})
    assert not (tmp_path / "outside").exists()


@pytest.mark.usefixtures("forked_workers")
def test_a_run_cut_off_elsewhere_goes_on_from_what_came_home(tmp_path):
    long = {"max_steps": 100, "checkpoint_every": 10, "early_stop": False}
    ends = []
    for cuts in (1, 0):
        (each,) = describe(study(cell(**long)), tmp_path / str(cuts))
        each.run.claim()
        for left in reversed(range(cuts + 1)):
            for delivery in (training := train_elsewhere(each, pack(each.run), None)):
                receive(each.run, delivery.files)
                if left:
                    break
            training.close()
        (home,) = each.run.list_checkpoints().values()
        losses = [row["loss"] for row in each.run.read_metrics()]
        ends.append(((home / "model.safetensors").read_bytes(), losses))
        assert find_status(each.run.path.parent, each.cell) == "budget"
    assert ends[0] == ends[1]
