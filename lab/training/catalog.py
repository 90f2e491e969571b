"""All runs below a folder, and a table of them."""

import contextlib
from pathlib import Path

import polars as pl

from lab.files import RunError
from lab.training.runs import Run

COLUMNS = {
    "path": pl.String,
    "task": pl.String,
    "model": pl.String,
    "seq_len": pl.Int64,
    "d_model": pl.Int64,
    "seed": pl.Int64,
    "accuracy": pl.Float64,
    "steps": pl.Int64,
    "seconds": pl.Float64,
    "stopped": pl.String,
}


def find_runs(root: Path) -> list[Run]:
    """Return the readable runs at or below a folder, by path."""
    runs = []
    for file in sorted(root.rglob("config.json")):
        with contextlib.suppress(RunError):
            runs.append(Run.open(file.parent))
    return runs


def tabulate(runs: list[Run]) -> pl.DataFrame:
    """Return a row for each run: path, task, stack, sizes, accuracy, steps, seconds, ending."""
    rows = []
    for run in runs:
        try:
            result = run.read_result() or {"stopped": "unfinished"}
        except RunError:
            result = {"stopped": "unreadable"}
        rows.append(
            {
                "path": str(run.path),
                "task": run.task.name,
                "model": run.model.model or run.model.stack,
                "seq_len": run.task.seq_len,
                "d_model": run.model.d_model,
                "seed": run.train.seed,
                "accuracy": result.get("accuracy"),
                "steps": result.get("steps"),
                "seconds": result.get("seconds"),
                "stopped": result["stopped"],
            }
        )
    return pl.DataFrame(rows, schema=COLUMNS)
