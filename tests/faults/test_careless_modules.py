"""Modules that `lab certify` examines: none outlives it, or ends it without a word."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.faults.attempt import attempt, run_command
from tests.faults.careless_modules import NOTES
from tests.forkserver import connect_server

MODULES = "tests.faults.careless_modules:"
PATIENCE = 120
"""Seconds after which a process that should start or end has not."""


def certify(name: str, *words: str):
    return run_command("certify", f"{MODULES}{name}", "--quick", "--only", "causal", *words)


def wait_until(holds) -> bool:
    end = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTES, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    return tmp_path


def list_living(notes: Path) -> list[int]:
    """Return the processes that have left a note and have not ended."""
    found = []
    for note in notes.iterdir():
        state = Path("/proc", note.name, "stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(int(note.name))
    return found


def test_no_process_outlives_a_parent_that_is_killed(notes):
    parent = connect_server().Process(target=_certify_spinning, args=(dict(os.environ),))
    parent.start()
    assert wait_until(lambda: len(list_living(notes)) == 2)
    parent.kill()
    parent.join()
    assert wait_until(lambda: not list_living(notes))


def _certify_spinning(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    certify("Spinning", "--seconds", "100")()


@pytest.mark.thorough
def test_a_target_that_spins_is_ended_with_all_its_processes(notes):
    outcome = attempt(certify("Spinning", "--seconds", "2", "--json"), memory=8, seconds=PATIENCE)
    assert outcome.code == 2, outcome.text
    said = json.loads(outcome.text.splitlines()[0])
    assert "took longer than 2 s and was stopped" in said["refused"]
    assert len(list(notes.iterdir())) == 2
    assert wait_until(lambda: not list_living(notes))


def test_a_folder_that_cannot_be_written_is_refused_as_json():
    words = ("--snippets", "/proc/no_folder", "--json")
    outcome = attempt(run_command("certify", "torch.nn:Identity", *words))
    assert outcome.code == 2, outcome.text
    said = json.loads(outcome.text.splitlines()[0])
    assert said["refused"].startswith("/proc/no_folder: cannot be written")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raising", "Unspeakable"),
        ("Colourful", r"it raised ValueError: \x1b]0;title"),
        ("Hoarding", "used more than 2 GiB: "),
        ("Deep", "RecursionError"),
        ("Crashing", "died with signal SIGSEGV"),
    ],
)
def test_whatever_a_target_does_is_said_in_one_line(notes, name, words):
    limits = ("--seconds", "20", "--memory", "2")
    outcome = attempt(certify(name, *limits), memory=8, seconds=PATIENCE)
    assert outcome.code == 2, outcome.text
    assert not outcome.fault
    assert words in " ".join(outcome.text.split())
    assert wait_until(lambda: not list_living(notes))
