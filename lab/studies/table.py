"""A study as one tidy table, read from its folders: one row for each cell and row length."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from lab.files import RunError
from lab.lengthening import list_stages
from lab.studies.folder import CellFolder
from lab.studies.study import Cell, Study
from lab.training.metrics import MetricsRow
from lab.training.runs import Run

MEASURED = {
    "seq_len": pl.Int64,
    "status": pl.String,
    "solved": pl.Boolean,
    "steps": pl.Int64,
    "accuracy": pl.Float64,
    "validation": pl.Float64,
    "rows": pl.Int64,
    "seconds": pl.Float64,
    "parameters": pl.Int64,
    "settings": pl.String,
    "error": pl.String,
}
"""The columns after those of the factors.

`solved` says whether the accuracy on validation rows of this length reached the run's threshold. If
so, `steps`, `rows` and `seconds` count training up to that evaluation, including shorter rows. If
not, they count all training, after which the run is censored. They are empty for a cell that was
not run. `accuracy` is on test rows of this length, `validation` on validation rows. `settings` is
`Run.settings`, by which `EarlierResults` finds the rows of the same settings.
"""


def list_columns(study: Study) -> dict[str, Any]:
    """Return the columns of a study's table and their types: its factors, then what is measured."""
    factors = {
        name: pl.Series([cell.factors[name] for cell in study.cells], strict=False).dtype
        for name in study.factors
    }
    return {**factors, **MEASURED}


def tabulate_cells(
    study: Study, out: Path, earlier: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
) -> pl.DataFrame:
    """Return a row for each cell and row length, in order, also for cells that were not run.

    Args:
        study: the cells.
        out: the folder that holds the cells' folders.
        earlier: rows of an earlier table by the name of the cell, for cells without a run here.

    Raises:
        RunError: when a file of a cell cannot be read.
    """
    rows = [
        row
        for cell in study.cells
        for row in _list_rows(cell, CellFolder(out / cell.name), (earlier or {}).get(cell.name, ()))
    ]
    return pl.DataFrame(rows, schema=list_columns(study), orient="row", strict=False)


def _list_rows(
    cell: Cell, folder: CellFolder, earlier: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    status, run = folder.find_status(), folder.open_run()
    if run is None and earlier:
        yield from earlier
        return
    run_rows = {} if run is None else _summarize(run, folder, cell)
    for length in cell.lengths:
        yield {
            **cell.factors,
            **dict.fromkeys(MEASURED),
            **run_rows.get(length, {}),
            "seq_len": length,
            "status": status,
            "error": folder.read_error() if status in ("failed", "diverged") else None,
        }


def _summarize(run: Run, folder: CellFolder, cell: Cell) -> dict[int, dict[str, Any]]:
    """Return the measured columns of a run by row length."""
    metrics = run.read_metrics()
    if not metrics:
        return {}
    solving = find_solving_steps(run, metrics)
    evaluated = {found["seq_len"]: found for found in folder.read_lengths()}
    parameters = _read_parameters(run)
    found = {}
    for length in cell.lengths:
        solved = solving.get(length)
        upto = metrics if solved is None else [row for row in metrics if row["step"] <= solved]
        at = evaluated.get(length, {})
        found[length] = {
            "solved": solved is not None,
            "steps": upto[-1]["step"],
            "accuracy": at.get("test"),
            "validation": at.get("validation"),
            "rows": count_rows(run, upto),
            "seconds": sum(row["seconds"] for row in upto),
            "parameters": parameters,
            "settings": run.settings,
        }
    return found


def find_solving_steps(run: Run, metrics: Sequence[MetricsRow]) -> dict[int, int]:
    """Return the step at which validation rows of each length were first solved."""
    full, first = run.task.seq_len, {}
    for row in metrics:
        length = row.get("seq_len", full)
        needed = run.train.solved_at if length == full else run.train.lengthen_at
        if row.get("validation_accuracy", 0.0) >= needed:
            first.setdefault(length, row["step"])
    return first


def count_rows(run: Run, metrics: Sequence[MetricsRow]) -> int:
    """Count the training rows of some steps; their number per step depends on their length."""
    sizes = {stage.task.seq_len: stage.batch_size for stage in list_stages(run.task, run.train)}
    return sum(sizes[row.get("seq_len", run.task.seq_len)] for row in metrics)


def _read_parameters(run: Run) -> int | None:
    try:
        result: Mapping[str, Any] = run.read_result() or {}
    except RunError:
        return None
    return result.get("parameters")
