"""Command lines that no one should type end in one line, or do what they say."""

import os
import shutil
from pathlib import Path

from tasks import TASKS
from tests.faults.attempt import attempt, report, run_command
from tests.faults.numbered import draw_cases
from tests.faults.planted import copy

WORDS = (
    "",
    " ",
    "x",
    "-1",
    "0",
    "1e400",
    "nan",
    "1:1000000000",
    "1:2@0",
    "9" * 40,
    "a" * 5000,
    "\x1b[2J",
    "\udcff\udcfe",
    "/dev/null",
    "/",
    ".",
    "..",
    "/proc/self/mem",
    "os:system",
    "S.d_state=x",
    "[]",
    "=",
    "*",
)
"""Values of options and arguments."""
OPTIONS = {
    "analyze": ("--only", "--rows", "--step", "--memory", "--figures", "--format"),
    "compare": ("--out", "--rows"),
    "resume": ("--max-steps", "--threads", "--max-minutes", "--device", "--checkpoint-every"),
    "runs": ("--only", "--sort"),
    "model": ("--size", "--d-model", "--n-heads", "--vocab-size", "--option", "--figure"),
    "errata": (),
    "tasks": ("--json",),
    "mixers": ("--json", "--d-model", "--n-heads"),
    "certify": ("--option", "--lengths", "--memory", "--seconds", "--figure", "--device"),
    "study": ("--out", "--only", "--seeds", "--workers", "--figure", "--table"),
    "train": (
        *("--out", "--config", "--stack", "--d-model", "--n-heads", "--model", "--option"),
        *("--batch-size", "--seq-len", "--vocab-size", "--seed", "--learning-rate", "--eval"),
        *("--test-rows", "--threads", "--max-minutes", "--show", "--figure", "--export", "--rows"),
    ),
}
"""Options of each command; "train" stands for a task's."""


def _write_line(random, run: Path) -> list[str]:
    """Return the words of a command line that ends soon if it is not refused."""
    command = random.choice(list(OPTIONS))
    given = [
        random.choice(OPTIONS[command])
        for _ in range(random.randint(1, 2) if OPTIONS[command] else 0)
    ]
    options = [word for option in given for word in (option, random.choice(WORDS))]
    if command == "train":
        short = ["--max-steps", "1", "--out", str(run.parent / "new"), "--json"]
        return [random.choice(list(TASKS)), *short, *options]
    first = {
        "analyze": [str(run), "--only", "tokens", "--rows", "2"],
        "resume": [str(run)],
        "compare": [str(run), random.choice(WORDS)],
        "runs": [str(run.parent)],
        "model": [random.choice(("AM", "cheems", *WORDS))],
        "errata": [random.choice(WORDS)],
        "certify": [random.choice(WORDS)],
        "study": ["capacity", "--show"],
    }
    return [command, *first.get(command, []), *options]


def test_odd_command_lines(tmp_path, monkeypatch):
    failed, tried = [], 0
    for number, random in draw_cases(default=4):
        home = tmp_path / str(number)
        run = copy(home / "runs")
        monkeypatch.chdir(home)
        words = _write_line(random, run)
        outcome = attempt(run_command(*words))
        tried += 1
        if outcome.fault and not (outcome.fault == "ended by SIGALRM" and "still" in outcome.text):
            shown = " ".join(word[:40] for word in words).encode(errors="backslashreplace")
            failed.append(f"case {number}: lab {shown.decode()}: {outcome.fault}")
    report("odd command lines", tried, failed)


def test_nothing_that_the_lab_did_not_make_is_overwritten(tmp_path, monkeypatch):
    run, mine = copy(tmp_path), tmp_path / "mine.html"
    monkeypatch.chdir(tmp_path)
    mine.write_text("mine")
    lines = (
        ("compare", str(run), str(run), "--out", str(mine)),
        ("model", "AM", "--figure", str(mine)),
        ("mqar", "--show", "1", "--figure", str(mine)),
        ("certify", "torch.nn:Identity", "--figure", str(mine)),
        ("study", "capacity", "--show", "--figure", str(mine)),
    )
    for words in lines:
        outcome = attempt(run_command(*words))
        assert outcome.code == 2, outcome.text
        assert "the lab did not make it" in outcome.text
    assert mine.read_text() == "mine"
    assert attempt(run_command("model", "AM", "--figure", str(mine), "--force")).code == 0
    assert attempt(run_command("model", "AM", "--figure", str(mine))).code == 0
    assert "<!doctype html>" in mine.read_text().lower()
    link = tmp_path / "link.html"
    link.symlink_to("/dev/stdout")
    outcome = attempt(run_command("model", "AM", "--figure", "link.html", "--force"))
    assert "is a link, must be a file; name what it leads to" in outcome.text
    assert link.is_symlink()
    os.mkfifo(tmp_path / "pipe.html")
    outcome = attempt(run_command("model", "AM", "--figure", "pipe.html", "--force"))
    assert "is a device or a pipe" in outcome.text


def test_the_names_of_run_folders_control_no_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, hostile = copy(tmp_path), tmp_path / "\x1b[2J\x9b31m\u202egnp\udcff"  # and not UTF-8
    shutil.copytree(run, hostile)
    for words in (
        ("compare", str(run), hostile.name, "--rows", "4", "--out", "page.html"),
        ("analyze", hostile.name, "--only", "tokens", "--only", "curves", "--rows", "4"),
        ("runs", "."),
    ):
        outcome = attempt(run_command(*words))
        assert outcome.code == 0, outcome.text
        assert not set("\x1b\x9b\u202e") & set(outcome.text)
        assert r"\x1b[2J" in outcome.text
