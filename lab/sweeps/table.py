"""A sweep as one tidy table, read from its folders: one row for each cell and row length."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from lab.files import RunError, explain_write_errors
from lab.folder import write
from lab.lengthening import list_stages
from lab.sweeps.folder import CellFolder
from lab.sweeps.lengths import evaluate_last
from lab.sweeps.sweep import Cell, Sweep
from lab.training.catalog import format_value
from lab.training.endings import find_ending
from lab.training.metrics import MetricsRow
from lab.training.run_folder import RunFolder

MEASURED = {
    "seq_len": pl.Int64,
    "status": pl.String,
    "solved": pl.Boolean,
    "steps": pl.Int64,
    "accuracy": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
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
not run. `accuracy` is on test rows of this length, `low` and `high` are the ends of its 95 %
interval over other rows, and `validation` is on validation rows. `settings` is
`RunFolder.settings`, by which `EarlierResults` finds the rows of the same settings.
"""


FILES = (".csv", ".parquet")


def list_columns(sweep: Sweep) -> dict[str, Any]:
    """Return the columns of a sweep's table and their types: its factors, then what is measured."""
    factors = {
        name: pl.Series([cell.factors[name] for cell in sweep.cells], strict=False).dtype
        for name in sweep.factors
    }
    return {**factors, **MEASURED}


def tabulate_cells(
    sweep: Sweep, out: Path, earlier: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
) -> pl.DataFrame:
    """Return a row for each cell and row length, in order, also for cells that were not run.

    Args:
        sweep: the cells.
        out: the folder that holds the cells' folders.
        earlier: rows of an earlier table by the name of the cell, for cells without a run here.

    Raises:
        RunError: when a file of a cell cannot be read.
    """
    rows = [
        row
        for cell in sweep.cells
        for row in _list_rows(cell, CellFolder(out / cell.name), (earlier or {}).get(cell.name, ()))
    ]
    return pl.DataFrame(rows, schema=list_columns(sweep), orient="row", strict=False)


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


def _summarize(run: RunFolder, folder: CellFolder, cell: Cell) -> dict[int, dict[str, Any]]:
    """Return the measured columns of a run by row length."""
    metrics = run.read_metrics()
    if not metrics:
        return {}
    evaluated = {found["seq_len"]: found for found in folder.read_lengths()}
    return _measure(run, metrics, {length: evaluated.get(length, {}) for length in cell.lengths})


def _measure(
    run: RunFolder, metrics: Sequence[MetricsRow], evaluated: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Return the measured columns of a run by row length, with how it was evaluated there."""
    solving = find_solving_steps(run, metrics)
    of_run = {"parameters": _read_parameters(run), "settings": run.settings}
    measured = {}
    for length, at in evaluated.items():
        solved = solving.get(length)
        upto = metrics if solved is None else [row for row in metrics if row["step"] <= solved]
        low, high = at.get("interval") or (None, None)  # older folders have none
        measured[length] = {
            "solved": solved is not None,
            "steps": upto[-1]["step"],
            "accuracy": at.get("test"),
            "low": low,
            "high": high,
            "validation": at.get("validation"),
            "rows": count_training_rows(run, upto),
            "seconds": sum(row["seconds"] for row in upto),
            **of_run,
        }
    return measured


def tabulate_runs(runs: Sequence[RunFolder]) -> pl.DataFrame:
    """Return a row for each run, of any sweep or none: its path, all its options, what is measured.

    Options of layers have columns of their own, such as S.d_state; an option that a run does not
    have is empty. The status of a run that has not ended is "unfinished".
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        metrics, result = run.read_metrics(), run.read_result() or {}
        options = {**run.task.options, **run.model.to_dict(), **run.train.to_dict()}
        layers = options.pop("options")
        values = {name: _flatten(value) for name, value in {**options, **layers}.items()}
        measured = dict.fromkeys(MEASURED)
        if metrics:
            length, evaluated = run.task.seq_len, evaluate_last(run) if result else {}
            measured |= _measure(run, metrics, {length: evaluated})[length]
        measured |= {
            "seq_len": run.task.seq_len,
            "status": find_ending(result),
        }
        rows.append({"path": str(run.path), "task": run.task.name, **values, **measured})
    columns = dict.fromkeys(name for row in rows for name in row)
    known = [name for name in columns if name not in MEASURED]
    return pl.DataFrame(
        {
            name: pl.Series(name, [row.get(name) for row in rows], MEASURED.get(name), strict=False)
            for name in [*known, *MEASURED]
        }
    )


def _flatten(value: Any) -> Any:
    """Return a number or text as it is, and a mixture or schedule as it is typed."""
    return value if isinstance(value, str | int | float | None) else format_value(value)


def check_file(file: Path) -> None:
    """Check that a table can be written to a file of this name.

    Raises:
        ValueError: for another suffix.
    """
    if file.suffix not in FILES:
        raise ValueError(f"table={file}: must end in {' or '.join(FILES)}")


def is_table(file: Path, columns: Iterable[str] = MEASURED) -> bool:
    """Whether a file is a table with these columns, those of runs if none are given."""
    try:
        parquet = file.suffix == ".parquet"
        found = pl.read_parquet_schema(file) if parquet else pl.read_csv(file, n_rows=0).columns
    except (OSError, pl.exceptions.PolarsError):
        return False
    return {*columns} <= {*found}


def save_table(table: pl.DataFrame, file: Path) -> None:
    """Write a table as .csv or .parquet.

    Raises:
        ValueError: for another suffix.
        RunError: when it cannot be written.
    """
    check_file(file)
    with explain_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".csv":
            write(file, table.write_csv())
        else:
            content = io.BytesIO()
            table.write_parquet(content)
            write(file, content.getvalue())


def find_solving_steps(run: RunFolder, metrics: Sequence[MetricsRow]) -> dict[int, int]:
    """Return the step at which validation rows of each length were first solved."""
    full, first = run.task.seq_len, {}
    for row in metrics:
        length = row.get("seq_len", full)
        needed = run.train.solved_at if length == full else run.train.lengthen_at
        if row.get("validation_accuracy", 0.0) >= needed:
            first.setdefault(length, row["step"])
    return first


def count_training_rows(run: RunFolder, metrics: Sequence[MetricsRow]) -> int:
    """Count the training rows of some steps; their number per step depends on their length."""
    sizes = {stage.task.seq_len: stage.batch_size for stage in list_stages(run.task, run.train)}
    return sum(sizes[row.get("seq_len", run.task.seq_len)] for row in metrics)


def _read_parameters(run: RunFolder) -> int | None:
    try:
        result: Mapping[str, Any] = run.read_result() or {}
    except RunError:
        return None
    return result.get("parameters")
