"""The live table of a sweep: it fits a terminal of 80 columns."""

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from lab.cli.tables.sweep_progress import SweepDisplay
from lab.training.endings import name_ending


def test_how_a_run_ended_is_whole_in_80_columns(tmp_path: Path):
    display = SweepDisplay()
    plan: Any = SimpleNamespace(
        out=tmp_path, costs={"seed=0": None}, left=SimpleNamespace(sizes={})
    )
    display.plan = plan
    run = tmp_path / "seed=0" / "run"
    run.mkdir(parents=True)
    row = {"step": 20_000, "seq_len": 2048, "accuracy": 0.25, "validation_accuracy": 0.125}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    display.ended["seed=0"] = "budget", f"{name_ending('budget')}; 12.5 min"
    screen = StringIO()
    Console(file=screen, width=80).print(display._draw())
    shown = screen.getvalue()
    assert "step limit reached; 12.5 min" in shown
    assert "…" not in shown
    assert "1 of 1 runs; 1 not solved: step limit reached; none left" in shown
