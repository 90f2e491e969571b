"""Modules that certify examines: none outlives it, decides for it, or takes more than it may."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.faults.attempt import attempt, run_command
from tests.faults.hostile_modules import NOTES
from tests.forkserver import connect_server

MODULES = "tests.faults.hostile_modules:"
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
        state = Path("/proc", note.name.rpartition("-")[2], "stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(int(note.name.rpartition("-")[2]))
    return found


def test_no_process_outlives_a_parent_that_is_killed(notes):
    parent = connect_server().Process(target=_certify_escaping, args=(dict(os.environ),))
    parent.start()
    assert wait_until(lambda: len(list_living(notes)) == 2)
    parent.kill()
    parent.join()
    assert wait_until(lambda: not list_living(notes))


def _certify_escaping(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    certify("Escaping", "--seconds", "100")()


@pytest.mark.thorough
def test_a_target_that_spins_is_ended_with_all_its_processes(notes):
    outcome = attempt(certify("Escaping", "--seconds", "2", "--json"), memory=8, seconds=PATIENCE)
    assert outcome.code == 2, outcome.text
    said = json.loads(outcome.text.splitlines()[0])
    assert "took longer than 2 s and was stopped" in said["refused"]
    assert wait_until(lambda: not list_living(notes))


def test_a_folder_that_cannot_be_written_is_refused_as_json():
    words = ("--snippets", "/proc/no_folder", "--json")
    outcome = attempt(run_command("certify", "torch.nn:Identity", *words))
    assert outcome.code == 2, outcome.text
    said = json.loads(outcome.text.splitlines()[0])
    assert said["refused"].startswith("/proc/no_folder: cannot be written")


def test_verdicts_cannot_be_written_by_the_target(notes):
    outcome = attempt(certify("Forging"), memory=8, seconds=PATIENCE)
    assert outcome.code == 2, outcome.text
    assert "something else than the worker wrote into the pipe" in outcome.text


@pytest.mark.thorough
def test_shared_memory_and_children_count(notes):
    outcome = attempt(certify("Sharing", "--memory", "1"), memory=8, seconds=PATIENCE)
    assert outcome.code == 2, outcome.text
    assert "used more than 1 GiB, with all its processes" in outcome.text


def test_nothing_outlives_a_guard_that_the_target_has_killed(notes):
    outcome = attempt(certify("Orphaning", "--seconds", "20"), memory=8, seconds=PATIENCE)
    assert outcome.code == 2, outcome.text
    assert "was killed (SIGKILL)" in outcome.text
    assert list(notes.iterdir())
    assert wait_until(lambda: not list_living(notes))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Flooding", "something else than the worker wrote into the pipe"),
        ("Stopping", "took longer than 20 s and was stopped"),
        ("Raising", "Unspeakable"),
        ("Colourful", r"it raised ValueError: \x1b]0;owned"),
        ("Leaving", "the process ended with code 0"),
        ("Deep", "RecursionError"),
        ("Crashing", "died with signal SIGSEGV"),
        ("Closing", "the process ended with code 1"),
        ("Replacing", "something else than the worker wrote into the pipe"),
    ],
)
def test_whatever_a_target_does_is_said_in_one_line(notes, name, words):
    outcome = attempt(certify(name, "--seconds", "20"), memory=8, seconds=PATIENCE)
    assert outcome.code == 2, outcome.text
    assert not outcome.fault
    assert words in " ".join(outcome.text.split())
    assert wait_until(lambda: not list_living(notes))
