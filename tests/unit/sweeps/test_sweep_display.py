"""The live table of a sweep: it fits a terminal of 80 columns; the time left."""

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from lab.api.progress import SweepDisplay, estimate_left
from lab.training.records import name_ending


def test_how_a_run_ended_is_whole_in_80_columns(tmp_path: Path):
    display = SweepDisplay()
    plan: Any = SimpleNamespace(out=tmp_path, todo=[None])
    display.plan = plan
    run = tmp_path / "seed=0"
    run.mkdir()
    row = {"step": 20_000, "seq_len": 2048, "accuracy": 0.25, "validation_accuracy": 0.125}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    display.ended["seed=0"] = "budget", f"{name_ending('budget')}; 12.5 min"
    screen = StringIO()
    Console(file=screen, width=80).print(display._draw())
    shown = screen.getvalue()
    assert "step limit reached; 12.5 min" in shown
    assert "…" not in shown
    assert "1 of 1 runs; 1 not solved: step limit reached; none left" in shown


def test_the_time_left_follows_runs_that_have_ended_and_those_that_run():
    assert estimate_left([], [(5.0, 0.0)], 3, 2) is None
    # At its pace the one that runs takes 40 s, and so will the three that wait.
    assert estimate_left([], [(10.0, 0.25)], 3, 2) == (30 + 3 * 40) / 2
    # Runs that ended took 20 s: the first has 8 s left; the second has taken longer, at its pace.
    assert estimate_left([16.0, 24.0], [(12.0, 0.1), (30.0, 0.5)], 2, 2) == (8 + 30 + 40) / 2
    assert estimate_left([16.0], [(12.0, 0.1)], 0, 2) == 4
