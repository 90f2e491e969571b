"""A sweep whose processes are killed at random moments ends with the same bits as undisturbed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from random import Random

import polars as pl
import pytest

from tests.faults.attempt import report
from tests.faults.numbered import draw_cases
from tests.sweep_ends import read_ends

LAB = (sys.executable, "-m", "lab")
MARK = "LAB_TRIAL"
"""Environment variable that tells the processes of a trial from all others."""
KILLS = 5
"""Kills of a case, as long as its sweep lasts, which then takes longer than undisturbed."""
MOST_CASES = 20
"""`make faults` asks for thousands, of which each would take half a minute."""
GRID = {"learning_rate": [1e-3, 3e-3], "max_steps": [240, 400]}
OPTIONS = {"seq_len": 16, "start_len": 16, "vocab_size": 32, "d_model": 16, "batch_size": 8}
SEEDS, WORKERS = 2, 2
CLOCKED = ("seconds",)
"""Columns of a table that depend on the machine's speed."""


def write_words() -> tuple[str, ...]:
    """Return the words of the sweep's command."""
    words = ["sweep", "mqar", "--seeds", str(SEEDS), "--workers", str(WORKERS)]
    for name, values in GRID.items():
        words += ["--grid", f"{name}={','.join(map(str, values))}"]
    for name, value in OPTIONS.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--test-rows", "16", "--eval-every", "20", "--no-early-stop"]
    return (*words, "--checkpoint-every", "10")


class Trial:
    """A sweep in a folder, with the processes that belong to it."""

    def __init__(self, home: Path):
        self.out, self.table = home / "out", home / "table.parquet"
        self.command = [*LAB, *write_words()]
        self.command += ["--out", str(self.out), "--table", str(self.table)]
        self.said = home / "said.txt"
        home.mkdir()

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.said, "a") as said:
            return subprocess.Popen(
                self.command,
                stdout=said,
                stderr=said,
                env={**os.environ, MARK: str(self.out)},
                start_new_session=True,
            )

    def find_processes(self) -> list[int]:
        """Return the command and all processes that it has started, the command first."""
        mark, found = f"{MARK}={self.out}".encode(), []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return sorted(found)

    def read(self) -> tuple[Mapping[str, object], list[tuple]]:
        """Return what must not depend on kills: the ends of all runs, and the table."""
        return read_ends(self.out), pl.read_parquet(self.table).drop(CLOCKED).rows()


def disturb(trial: Trial, random: Random, longest: float) -> tuple[int, str]:
    """Run a sweep to its end, killing its processes meanwhile; return the kills, and what failed.

    A killed command is repeated at once, though its workers may still be there.
    """
    kills, tries, command = 0, 1, trial.start()
    while kills < KILLS:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(random.uniform(0, longest))
            break
        victim = random.choice(trial.find_processes())
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(victim, signal.SIGKILL)
            kills += 1
        if victim == command.pid:
            command.wait()
            command = trial.start()
    while command.wait() and tries < 3:  # a run that another process still holds is tried again
        tries, command = tries + 1, trial.start()
    if command.returncode:
        return kills, f"exit code {command.returncode}: {trial.said.read_text()[-600:]}"
    return kills, ""


@pytest.mark.thorough
def test_random_kills_of_a_sweep_change_no_bit(tmp_path):
    whole, began = Trial(tmp_path / "whole"), time.monotonic()
    assert whole.start().wait() == 0, whole.said.read_text()
    took, expected = time.monotonic() - began, whole.read()
    failed, tried = [], 0
    for number, random in islice(draw_cases(default=4), MOST_CASES):
        trial = Trial(tmp_path / f"{number}")
        kills, fault = disturb(trial, random, took / KILLS)
        tried += kills
        if fault:
            failed.append(f"case {number}: {fault}")
        elif trial.read() != expected:
            failed.append(f"case {number}: ends otherwise than undisturbed")
        elif left := [*trial.find_processes(), *trial.out.rglob(".*")]:
            failed.append(f"case {number}: leaves {left}")
    report("kills of a sweep", tried, failed)
