"""Results of an earlier table, so that a sweep can go on on another machine."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from lab.files import RunError
from lab.sweeps.folder import ENDED
from lab.sweeps.sweep import Cell, Sweep
from lab.sweeps.table import MEASURED, list_columns


@dataclass(frozen=True)
class EarlierResults:
    """Rows of a table that belong to cells of a sweep, by the name of the cell.

    A row belongs to a cell if factors and settings are the same: results of another protocol are
    not mixed with today's.

    Attributes:
        rows: by the name of the cell.
        table: as it was read.
        factors: the columns that tell cells from one another, and whether text and numbers are
            mixed there.
        others: the names of cells of the sweep whose runs in it ended with other settings.
    """

    rows: Mapping[str, tuple[dict[str, Any], ...]]
    table: pl.DataFrame = field(default_factory=pl.DataFrame)
    factors: Mapping[str, bool] = field(default_factory=dict)
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
            return cls({})
        columns = list_columns(sweep)
        try:
            found = _read_columns(file, columns)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise RunError(f"table={file}: cannot be read: {error}") from error
        needed = [*sweep.factors, "seq_len", "status", "settings"]
        if not {*needed} <= {*found.columns} <= {*columns}:
            raise RunError(
                f"table={file}: is not a table of the sweep {sweep.name}, or one of an older "
                f"version; it must have the columns {', '.join(columns)}"
            )
        rows: dict[str, tuple[dict[str, Any], ...]] = {}
        others = set[str]()
        factors = {name: _is_mixed(sweep, name) for name in sweep.factors}
        names = {_name_row(cell.factors, factors): cell.name for cell in sweep.cells}
        whole = [dict.fromkeys(columns) | row for row in found.iter_rows(named=True)]
        for row in whole:
            name = names.get(_name_row(row, factors))
            if row["settings"] is None or name is None or name not in settings:
                continue
            if settings[name] == row["settings"]:
                rows[name] = (*rows.get(name, ()), row)
            elif row["status"] in ENDED:
                others.add(name)
        table = pl.DataFrame(whole, schema=columns | dict(found.schema), orient="row")
        return cls(rows, table, factors, frozenset(others))

    def merge(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return this table with the rows of a newer one in place of those of the same cells.

        The rows of an ended run, whatever its settings, are replaced only by those of another
        ended run. Cells keep their places. Those that this table does not have come last.
        """
        if self.table.is_empty():
            return table
        merged = self._group(self.table)  # a name that is set again keeps its place
        for name, rows in self._group(table).items():
            if _have_ended(rows) or not _have_ended(merged.get(name, ())):
                merged[name] = rows
        rows = [row for group in merged.values() for row in group]
        types = {
            name: _widen(dtype, self.table.schema[name]) for name, dtype in table.schema.items()
        }
        return pl.DataFrame(rows, schema=types, orient="row", strict=False)

    def _group(self, table: pl.DataFrame) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of a table by the name of the cell, in the order of their first rows."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in table.iter_rows(named=True):
            groups.setdefault(_name_row(row, self.factors), []).append(row)
        return groups

    def has_ended(self, cell: Cell) -> bool:
        """Whether the table has the final result of a cell at all its row lengths."""
        rows = self.rows.get(cell.name, ())
        lengths = {row["seq_len"] for row in rows if row["status"] in ENDED}
        return lengths >= {*cell.lengths}


def _have_ended(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["status"] in ENDED for row in rows)


def _read_columns(file: Path, columns: Mapping[str, Any]) -> pl.DataFrame:
    """Read a table whose numeric factors may be other numbers than the sweep's: 2.5 beside 2."""
    if file.suffix == ".parquet":
        found = pl.read_parquet(file)
        known = [name for name in found.columns if name in MEASURED]
        return found.with_columns(pl.col(name).cast(MEASURED[name]) for name in known)
    fixed = {
        name: dtype for name, dtype in columns.items() if name in MEASURED or not dtype.is_numeric()
    }
    return pl.read_csv(file, schema_overrides=fixed, infer_schema_length=None)


def _widen(dtype: pl.DataType, other: pl.DataType) -> pl.DataType:
    """Return the type of a column that has values of both types."""
    if dtype.is_numeric() and other.is_numeric():
        return pl.Float64() if dtype.is_float() or other.is_float() else dtype
    return dtype if dtype == other else pl.String()


def _is_mixed(sweep: Sweep, factor: str) -> bool:
    """Whether a factor is text in some cells and a number in others; a table has both as text."""
    texts = {isinstance(cell.factors[factor], str) for cell in sweep.cells}
    return len(texts) > 1


def _name_row(row: Mapping[str, Any], factors: Mapping[str, bool]) -> str:
    """Name a cell as `Cell.name` does, but with 2 for 2.0, which is what 2 is beside 2.5."""
    values = {}
    for factor, mixed in factors.items():
        value = row[factor]
        if mixed and isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        whole = isinstance(value, float) and value.is_integer()
        values[factor] = int(value) if whole else value
    return Cell(values, "", {}, ()).name
