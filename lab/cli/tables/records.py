"""The table of records, for the terminal."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from analysis.records.entry import Entry
from analysis.records.history import list_cells
from analysis.records.track import TRACKS


def build_records_table(histories: Mapping[str, Sequence[Entry]]) -> Table:
    """Return a table of all entries of some tracks, the holder of each first."""
    table = Table(box=None)
    for name in ("track", "entry", "median (95 %)", "solved", "p", "date"):
        table.add_column(name, justify="left" if name in ("track", "entry") else "right")
    for name, entries in histories.items():
        if not entries:
            table.add_row(name, "none yet")
        for entry in reversed(entries):
            table.add_row(*list_cells(entry, TRACKS[name]))
    return table
