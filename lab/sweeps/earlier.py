"""Results of an earlier table, so that a sweep can go on on another machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from lab.files import RunError
from lab.sweeps.folder import ENDED
from lab.sweeps.sweep import Cell, Sweep
from lab.sweeps.table import list_columns


@dataclass(frozen=True)
class EarlierResults:
    """Rows of a table that belong to cells of a sweep, by the name of the cell.

    A row belongs to a cell if factors and settings are the same: results of another protocol are
    not mixed with today's.

    Attributes:
        rows: by the name of the cell.
        others: rows of the table that belong to no cell, such as those that `--only` leaves out.
    """

    rows: Mapping[str, tuple[dict[str, Any], ...]]
    others: pl.DataFrame = field(default_factory=pl.DataFrame)

    @classmethod
    def read(cls, file: Path, sweep: Sweep, settings: Mapping[str, str]) -> "EarlierResults":
        """Read a table that `tabulate_cells` has made; where there is no file, there are no rows.

        Args:
            file: the table, as .csv or .parquet.
            sweep: the cells.
            settings: of each cell's run, by the cell's name (`Run.settings`).

        Raises:
            RunError: for a file that cannot be read, or is no table of this sweep.
        """
        if not file.exists():
            return cls({})
        columns = list_columns(sweep)
        try:
            if file.suffix == ".parquet":
                found = pl.read_parquet(file)
            else:
                found = pl.read_csv(file, schema_overrides=columns)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise RunError(f"table={file}: cannot be read: {error}") from error
        needed = [*sweep.factors, "seq_len", "status", "settings"]
        if not {*needed} <= {*found.columns} <= {*columns}:
            raise RunError(
                f"table={file}: is no table of the sweep {sweep.name}, or one of an older "
                f"version; it must have the columns {', '.join(columns)}"
            )
        rows: dict[str, tuple[dict[str, Any], ...]] = {}
        others, names = [], {cell.name for cell in sweep.cells}
        for row in found.iter_rows(named=True):
            name = Cell({factor: row[factor] for factor in sweep.factors}, "", {}, ()).name
            row = dict.fromkeys(columns) | row
            if name not in names:
                others.append(row)
            elif row["settings"] is not None and settings[name] == row["settings"]:
                rows[name] = (*rows.get(name, ()), row)
        return cls(rows, pl.DataFrame(others, schema=columns, orient="row", strict=False))

    def append_others(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return a table of the sweep's cells with the rows that belong to none of them."""
        return table if self.others.is_empty() else pl.concat([table, self.others])

    def has_ended(self, cell: Cell) -> bool:
        """Whether the table has the final result of a cell at all its row lengths."""
        rows = self.rows.get(cell.name, ())
        lengths = {row["seq_len"] for row in rows if row["status"] in ENDED}
        return lengths >= {*cell.lengths}
