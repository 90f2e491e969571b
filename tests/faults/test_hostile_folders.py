"""Whatever a stranger puts into a run folder ends in a result or one line, and stays inside."""

import shutil
from pathlib import Path

from tests.faults.attempt import attempt, report, run_command
from tests.faults.numbered import draw_cases
from tests.faults.planted import copy, take_stock
from tests.faults.plants import plant

COMMANDS = (
    ("analyze", "{run}", "--only", "tokens", "--rows", "4"),
    ("analyze", "{run}", "--only", "tokens", "--rows", "4", "--step", "4"),
    ("resume", "{run}", "--max-steps", "8", "--threads", "1"),
    ("runs", "{root}"),
    ("runs", "{root}", "--json"),
    ("compare", "{run}", "{other}", "--rows", "4"),
    (
        *("mqar", "--config", "{run}/config.json", "--out", "{home}/new", "--max-steps", "2"),
        *("--threads", "1", "--json", "--eval", "seq_len=16"),
    ),
)
PATIENCE = 240
"""Seconds after which a command waits for something, however busy the machine is."""
MOST = 2**26
"""Bytes of the largest page that is searched; a file of holes only would fill memory."""


def test_planted_folders(tmp_path, monkeypatch):
    failed, tried = [], 0
    for number, random in draw_cases(default=4):
        home = tmp_path / str(number)
        run = copy(home / "runs")
        other = copy(home / "others")
        monkeypatch.chdir(home)
        said = plant(run, random)
        words = [
            word.format(run=run, root=run.parent, other=other, home=home)
            for word in random.choice(COMMANDS)
        ]
        outside = take_stock(home / "outside")
        outcome = attempt(run_command(*words), seconds=PATIENCE)
        tried += 1
        where = f"case {number}: lab {' '.join(words[:1])}, {said}"
        pages = b"".join(page.read_bytes() for page in home.rglob("*.html") if _is_page(page))
        if outcome.fault:
            failed.append(f"{where}: {outcome.fault}: {outcome.text[-200:]!r}")
        elif take_stock(home / "outside") != outside:
            failed.append(f"{where}: changed what is outside")
        elif b"<script>alert(1)" in pages or b"<img src=x" in pages:
            failed.append(f"{where}: a page holds what would run")
        shutil.rmtree(home)
    report("planted folders", tried, failed)


def _is_page(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and file.stat().st_size < MOST
