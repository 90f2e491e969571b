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
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from lab.cli import app
from lab.sweeps.connection import connect
from lab.training.checkpoint import list_checkpoints
from tests.faults.attempt import report
from tests.faults.numbered import draw_cases
from tests.sweep_ends import read_ends

LAB = (sys.executable, "-m", "lab")
RAY_NODES = Path(__file__).with_name("ray_nodes.py")
TOKEN = "a-token-of-these-tests-alone"
STEPS = 60
KILLS, PAUSE = 5, 8.0
"""Kills of a case, and the most seconds between two."""
MOST_CASES, MOST_TRIES = 20, 3
"""Cases, of which each takes minutes; failures of a sweep that nothing disturbs any more."""
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


def find_steps(out: Path) -> dict[str, int]:
    """Return the newest step that each run has a checkpoint of."""
    return {
        path.parent.name: max(list_checkpoints(path), default=0)
        for path in sorted(out.glob("*/run"))
    }


def wait_for_checkpoints(out: Path, count: int) -> None:
    while sum(step > 0 for step in find_steps(out).values()) < count:
        time.sleep(0.05)


def wait_for_no_folder(home: Path) -> None:
    """Wait until nothing is left of the folders in which tasks have trained."""
    for _ in range(60):
        if not list(home.glob("lab-cells-*")):
            return
        time.sleep(1)
    raise AssertionError(f"tasks left {list(home.glob('lab-cells-*'))}")


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


@pytest.mark.thorough
def test_what_is_killed_changes_no_result(tmp_path):
    here, out = run_here(tmp_path / "here"), tmp_path / "ray"
    with open_nodes(2) as nodes:
        sweep = nodes.start(out)
        wait_for_checkpoints(out, 1)
        tasks = nodes.list_tasks()
        assert tasks
        for task in tasks:
            os.kill(task, signal.SIGKILL)
        wait_for_checkpoints(out, 2)
        nodes.order("kill 1")
        wait_for_checkpoints(out, 4)
        nodes.order("kill 0")
        _, said = sweep.communicate()
        assert sweep.returncode == 1, said
        # By the sweep, which names the head, or in place of a process that Ray has ended.
        assert re.search("Error: .* the same command goes on$", " ".join(said.split())), said
        steps = find_steps(out)
        nodes.order("add 0")
        nodes.order("add 1")
        sweep = nodes.start(out)
        _, said = sweep.communicate()
        assert sweep.returncode == 0, said
        ended = find_steps(out)  # also of runs that had not begun
        assert all(step <= ended[name] for name, step in steps.items())
        wait_for_no_folder(Path(nodes.home))
    assert read_ends(out) == here


def disturb(nodes: Nodes, out: Path, random: Random) -> tuple[int, str]:
    """Run a sweep to its end while one of its processes or a node is killed, again and again.

    Returns:
        How often something was killed, and what the sweep said if it did not end.
    """
    kills, tries, sweep, said = 0, 0, nodes.start(out), ""
    while tries < MOST_TRIES:
        with suppress(subprocess.TimeoutExpired):
            _, said = sweep.communicate(timeout=random.uniform(0, PAUSE) if kills < KILLS else None)
        if sweep.returncode == 0:
            return kills, ""
        if sweep.returncode is None:
            victim = random.choice(("sweep", "task", "task", "node", "head"))
            tasks = nodes.list_tasks()
            if victim == "task" and not tasks:
                continue
            kills += 1
            if victim == "task":
                os.kill(random.choice(tasks), signal.SIGKILL)
            elif victim == "sweep":
                sweep.kill()
            elif victim == "node":
                nodes.order("kill 1")
                nodes.order("add 1")
            else:
                for order in ("kill 1", "kill 0"):
                    nodes.order(order)
                sweep.communicate()  # it ends, since it has lost the head
                for order in ("add 0", "add 1"):
                    nodes.order(order)
        else:
            tries += kills >= KILLS
            sweep = nodes.start(out)
    return kills, said


@pytest.mark.thorough
def test_random_kills_change_no_result(tmp_path):
    here, failed, kills = run_here(tmp_path / "here"), [], 0
    for number, random in islice(draw_cases(default=4), MOST_CASES):
        out = tmp_path / f"{number}"
        with open_nodes(2) as nodes:
            count, said = disturb(nodes, out, random)
        kills += count
        if said:
            failed.append(f"case {number}: does not end: {said[-600:]}")
        elif read_ends(out) != here:
            failed.append(f"case {number}: ends otherwise than undisturbed")
    report("kills on a cluster", kills, failed)


@pytest.mark.thorough
def test_interrupted_it_says_how_to_go_on_and_goes_on_without_ray(tmp_path):
    out = tmp_path / "ray"
    with open_nodes(1) as nodes:
        sweep = nodes.start(out)
        wait_for_checkpoints(out, 1)
        sweep.send_signal(signal.SIGINT)
        _, said = sweep.communicate()
    assert sweep.returncode == 128 + signal.SIGINT
    assert "run the same command again to resume" in said
    assert run_here(out) == run_here(tmp_path / "here")
