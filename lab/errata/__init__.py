"""The paper's errata, run live: the printed reading fails, the meant one holds.

    R rotation    S state space duality    D dynamic mask    I inner function
    C cross domain mixture of experts      T tables

>>> [(erratum.row, erratum.confirmed) for erratum in run(["C4"])]
[('C4', True)]

Each row takes at most seconds on a CPU, and gives the same numbers every time.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module

from lab.errata.erratum import Erratum
from tasks.bounds import check_choice

FILES: dict[str, tuple[str, ...]] = {
    "rotation": ("R1", "R2", "R3", "R4", "R5", "R6", "R7"),
    "ssd": ("S1", "S2", "S3", "S4"),
    "mask": ("D1", "D2", "D3"),
    "inner_function": ("I1", "I2", "I3", "I4"),
    "cdmoe": ("C1", "C2", "C3", "C4", "C5"),
    "tables": ("T1",),
}
"""Module of this package → its rows, each a function with the row's name."""


def _run_row(file: str, row: str) -> Erratum:
    # Imported here, so that listing the rows does not wait for torch.
    return getattr(import_module(f"{__name__}.{file}"), row.lower())()


ERRATA: dict[str, Callable[[], Erratum]] = {
    row: partial(_run_row, file, row) for file, rows in FILES.items() for row in rows
}
"""Row → the function that runs it."""


def run(rows: Iterable[str] | None = None) -> Iterator[Erratum]:
    """Run some rows, or all, and yield each when it is done.

    The record of errata is right if `confirmed` is true for all: printed fails, meant holds.

    Raises:
        ValueError: at once, for an unknown row; lists the known.
    """
    chosen = list(ERRATA) if rows is None else list(rows)
    for row in chosen:
        check_choice("row", row, ERRATA)
    return (ERRATA[row]() for row in chosen)
