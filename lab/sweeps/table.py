"""A sweep as one tidy table: a row for each cell and row length, from its folders or a file."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from lab.files import RunError, explain_write_errors, read, shorten_message, write
from lab.lengthening import list_stages
from lab.sweeps.outcome import (
    ENDED,
    Entry,
    find_status,
    open_run,
    read_lengths,
    read_records,
    read_spent,
)
from lab.sweeps.sweep import Cell, Sweep
from lab.training.catalog import format_value
from lab.training.records import RowLine, find_ending
from lab.training.run import Run

MEASURED = {
    "seq_len": pl.Int64,
    "status": pl.String,
    "solved": pl.Boolean,
    "steps": pl.Int64,
    "accuracy": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "validation": pl.Float64,
    "loss": pl.Float64,
    "validation_loss": pl.Float64,
    "rows": pl.Int64,
    "seconds": pl.Float64,
    "parameters": pl.Int64,
    "state_bytes": pl.Int64,
    "settings": pl.String,
    "error": pl.String,
}
"""The columns after those of the factors.

`solved` says whether the accuracy on validation rows of this length reached the run's threshold. If
so, `steps`, `rows` and `seconds` count training up to that evaluation, including shorter rows. If
not, they count all training, after which the run is censored. They are empty for a cell that was
not run. `accuracy` is on test rows of this length, `low` and `high` are the ends of its 95 %
interval over other rows, and `validation` is on validation rows. `loss` and `validation_loss` are
in nats a scored position, or the squared error where answers are numbers. `state_bytes` is what
decoding keeps of a row of this length, empty where a mixer does not tell. `settings` is
`Run.settings`, by which `EarlierResults` finds the rows of the same settings.
"""


LATER = {"loss", "validation_loss"}
"""Columns that tables of 0.1.0 do not have."""
FILES = (".csv", ".parquet")
MOST_BYTES, MOST_ROWS = 2**26, 10**6
"""Bytes and rows of the largest table that is read."""


def list_columns(sweep: Sweep) -> dict[str, Any]:
    """Return the columns of a sweep's table and their types: its factors, then what is measured."""
    factors = {
        name: pl.Series([cell.factors[name] for cell in sweep.cells], strict=False).dtype
        for name in sweep.factors
    }
    return {**factors, **MEASURED}


Row = dict[str, Any]


def tabulate_cells(
    sweep: Sweep, out: Path, earlier: Mapping[str, Sequence[Row]] | None = None
) -> pl.DataFrame:
    """Return a row for each cell and row length, in order, also for cells that were not run.

    Args:
        sweep: the cells.
        out: the folder that holds the run folders.
        earlier: rows of an earlier table by the name of the cell, for cells without a run here.

    A run with a damaged file has failed, with this as its error.
    """
    rows: list[Row] = []
    for cell in sweep.cells:
        known, status = (earlier or {}).get(cell.name, ()), find_status(out, cell)
        if status == "not run" and known:
            rows += known
            continue
        error, measured = None, {}
        try:
            run = open_run(out, cell)
            error = read_spent(out / cell.name)[1] if status in ("failed", "diverged") else None
            if run is not None and run.read_metrics():
                found = read_lengths(run)
                measured = _measure(run, {length: found.get(length, {}) for length in cell.lengths})
        except RunError as damage:  # of this run alone
            status, error = "failed", str(damage)
        for length in cell.lengths:
            known = {**dict.fromkeys(MEASURED), **measured.get(length, {}), "seq_len": length}
            rows.append({**cell.factors, **known, "status": status, "error": error})
    return pl.DataFrame(rows, schema=list_columns(sweep), orient="row", strict=False)


def _measure(run: Run, evaluated: Mapping[int, Entry]) -> dict[int, Row]:
    """Return the measured columns of a run by row length, with how it was evaluated there."""
    metrics = run.read_metrics()
    solving = find_solving_steps(run, metrics)
    of_run = {"parameters": _read_parameters(run), "settings": run.settings}
    measured = {}
    for length, at in evaluated.items():
        solved = solving.get(length)
        upto = metrics if solved is None else [row for row in metrics if row["step"] <= solved]
        low, high = at.get("interval") or (None, None)
        measured[length] = {
            "solved": solved is not None,
            "steps": upto[-1]["step"],
            "accuracy": at.get("test"),
            "low": low,
            "high": high,
            "validation": at.get("validation"),
            "loss": at.get("loss"),
            "validation_loss": at.get("validation_loss"),
            "rows": count_training_rows(run, upto),
            "seconds": sum(row["seconds"] for row in upto),
            "state_bytes": at.get("state_bytes"),
            **of_run,
        }
    return measured


def tabulate_runs(runs: Sequence[Run]) -> pl.DataFrame:
    """Return a row for each run, of any sweep or none: its path, all its options, what is measured.

    Options of layers have columns of their own, such as S.d_state; an option that a run does not
    have is empty. The status of a run that has not ended is "unfinished", that of one with a
    damaged file "unreadable", with this as its error.
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        options = {**run.task.options, **run.model.to_dict(), **run.train.to_dict()}
        layers = options.pop("options")
        values = {name: _flatten(value) for name, value in {**options, **layers}.items()}
        length, measured = run.task.seq_len, dict.fromkeys(MEASURED)
        try:
            status, error = find_ending(run.read_result()), None
            if run.read_metrics():
                measured |= _measure(run, {length: read_records(run) or {}})[length]
        except RunError as damage:  # of this run alone
            status, error = "unreadable", str(damage)
        measured |= {"seq_len": length, "status": status, "error": error}
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


def read_table(file: Path, types: Mapping[str, Any] | None = None) -> pl.DataFrame:
    """Read a .csv or .parquet table of a sane size.

    Columns that tables of runs have had since 0.1.0 are empty where they are missing.

    Args:
        file: the table.
        types: of columns of a .csv file; of the others, the values tell.

    Raises:
        RunError: for a file that cannot be read, is no table, or has more rows than any sweep.
    """
    try:
        data = read(file, MOST_BYTES)
        if file.suffix != ".parquet":
            return _complete(pl.read_csv(data, schema_overrides=types, infer_schema_length=None))
        # Rows that are equal take next to nothing in a file, and all their size in memory.
        found = pl.scan_parquet(io.BytesIO(data))
        rows = found.select(pl.len()).collect().item()
        if rows > MOST_ROWS:
            raise RunError(f"has {rows:,} rows, must have ≤ {MOST_ROWS:,}")
        nested = [name for name, kind in found.collect_schema().items() if kind.is_nested()]
        if nested:
            raise RunError(f"has lists in the column {nested[0]}")
        return _complete(found.collect())
    except (OSError, RunError, pl.exceptions.PolarsError) as error:
        raise RunError(f"table={file}: cannot be read: {shorten_message(error)}") from error


def _complete(table: pl.DataFrame) -> pl.DataFrame:
    missing = LATER - {*table.columns}
    if {*MEASURED} - LATER <= {*table.columns} and missing:
        return table.with_columns(pl.lit(None, pl.Float64).alias(name) for name in missing)
    return table


def is_table(file: Path, columns: Iterable[str] = MEASURED) -> bool:
    """Whether a file is a table with these columns, those of runs if none are given."""
    try:
        return {*columns} <= {*read_table(file).columns}
    except RunError:
        return False


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


def find_solving_steps(run: Run, metrics: Sequence[RowLine]) -> dict[int, int]:
    """Return the step at which validation rows of each length were first solved."""
    full, first = run.task.seq_len, {}
    for row in metrics:
        length = row.get("seq_len", full)
        needed = run.train.solved_at if length == full else run.train.lengthen_at
        if row.get("validation_accuracy", 0.0) >= needed:
            first.setdefault(length, row["step"])
    return first


def count_training_rows(run: Run, metrics: Sequence[RowLine]) -> int:
    """Count the training rows of some steps; their number per step depends on their length."""
    sizes = {stage.task.seq_len: stage.batch_size for stage in list_stages(run.task, run.train)}
    return sum(sizes[row.get("seq_len", run.task.seq_len)] for row in metrics)


def _read_parameters(run: Run) -> int | None:
    try:
        result: Mapping[str, Any] = run.read_result() or {}
    except RunError:
        return None
    return result.get("parameters")


@dataclass(frozen=True)
class EarlierResults:
    """The results in a table, so that a sweep can go on on another machine.

    A row belongs to a cell if factors and settings are the same: results of another protocol are
    not mixed with today's.

    Attributes:
        rows: that belong to cells of the sweep, by the name of the cell.
        table: as it was read; empty if there is none.
        texts: the factors that are text in all cells of the sweep.
        others: the names of cells of the sweep whose runs in it ended with other settings.
    """

    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    table: pl.DataFrame = field(default_factory=pl.DataFrame)
    texts: Mapping[str, bool] = field(default_factory=dict)
    others: frozenset[str] = frozenset()

    @classmethod
    def read(cls, file: Path, sweep: Sweep, settings: Mapping[str, str]) -> "EarlierResults":
        """Read a table that `tabulate_cells` has made; where there is no file, there are no rows.

        Args:
            file: the table, as .csv or .parquet.
            sweep: the cells.
            settings: of each cell's run, by the cell's name (`Run.settings`).

        Raises:
            RunError: for a file that cannot be read, or is not a table of this sweep.
        """
        if not file.exists():
            return cls()
        columns = list_columns(sweep)
        # Numeric factors may be other numbers than the sweep's: 2.5 beside 2.
        fixed = {n: t for n, t in columns.items() if n in MEASURED or not t.is_numeric()}
        table = read_table(file, fixed)
        if {*table.columns} != {*columns}:
            raise RunError(
                f"table={file}: is not a table of the sweep {sweep.name}; it must have the "
                f"columns {', '.join(columns)}"
            )
        casts = [pl.col(name).cast(dtype) for name, dtype in MEASURED.items()]
        try:
            table = table.select(*sweep.factors, *casts)
        except pl.exceptions.PolarsError as error:
            raise RunError(f"table={file}: {shorten_message(error)}") from error
        texts = {
            name: all(isinstance(cell.factors[name], str) for cell in sweep.cells)
            for name in sweep.factors
        }
        names = {_identify(cell.factors, texts): cell.name for cell in sweep.cells}
        rows: dict[str, list[Row]] = {}
        others = set[str]()
        for row in table.iter_rows(named=True):
            name = names.get(_identify(row, texts))
            if row["settings"] is None or name is None:
                continue
            if settings.get(name) == row["settings"]:
                rows.setdefault(name, []).append(row)
            elif name in settings and row["status"] in ENDED:
                others.add(name)
        return cls(rows, table, texts, frozenset(others))

    def has_ended(self, cell: Cell) -> bool:
        """Whether the table has the final result of a cell at all its row lengths."""
        rows = self.rows.get(cell.name, ())
        return {*cell.lengths} <= {row["seq_len"] for row in rows if row["status"] in ENDED}

    def merge(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return this table with the rows of a newer one in place of those of the same cells.

        The rows of an ended run, whatever its settings, are replaced only by those of another
        ended run. Cells keep their places. Those that this table does not have come last.
        """
        if self.table.is_empty():
            return table
        merged: dict[Any, pl.DataFrame] = {}  # a cell that is set again keeps its place
        for part in (self.table, table):
            places: dict[Any, list[int]] = {}
            for place, row in enumerate(part.iter_rows(named=True)):
                places.setdefault(_identify(row, self.texts), []).append(place)
            for name, found in places.items():
                rows = part[found]
                if name not in merged or _have_ended(rows) or not _have_ended(merged[name]):
                    merged[name] = rows
        return pl.concat([*merged.values(), table.clear()], how="vertical_relaxed")


def _have_ended(rows: pl.DataFrame) -> bool:
    return rows["status"].is_in(ENDED).any()


def _identify(row: Mapping[str, Any], texts: Mapping[str, bool]) -> tuple[Any, ...]:
    """Return the factors of a cell; 2, 2.0 and, in a column that is no text, "2.0" are the same."""
    return tuple(str(row[n]) if text else _read_number(row[n]) for n, text in texts.items())


def _read_number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value
