"""The paper's errata, run live: each printed reading shown to fail as said, the meant one to hold.

    R rotation    S state space duality    D dynamic mask    I inner function
    C cross domain mixture of experts      T tables

>>> for erratum in run(["C4"]):  # doctest: +SKIP
...     print(erratum.printed_evidence, "|", erratum.meant_evidence)

Each row takes seconds at most, on a CPU, and gives the same numbers every time.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module

from lab.errata.erratum import Erratum

FILES: dict[str, tuple[str, ...]] = {
    "rotation": ("R1", "R2", "R3", "R4", "R5", "R6", "R7"),
    "ssd": ("S1", "S2", "S3", "S4"),
    "mask": ("D1", "D2", "D3"),
    "inner_function": ("I1", "I2", "I3", "I4"),
    "cdmoe": ("C1", "C2", "C3", "C4", "C5"),
    "tables": ("T1",),
}
"""Module of this package → the rows it holds, each a function named by its row."""


def _run_row(file: str, row: str) -> Erratum:
    # Imported here: listing the rows must not wait for torch.
    return getattr(import_module(f"{__name__}.{file}"), row.lower())()


ERRATA: dict[str, Callable[[], Erratum]] = {
    row: partial(_run_row, file, row) for file, rows in FILES.items() for row in rows
}
"""Row → the function that runs it."""


def run(rows: Iterable[str] | None = None) -> Iterator[Erratum]:
    """Run some rows, or all, and yield each as it is done.

    The paper's record is sound when `confirmed` is true of all: printed fails, meant holds.

    Raises:
        ValueError: at once, for an unknown row; lists the known.
    """
    chosen = list(ERRATA) if rows is None else list(rows)
    for row in chosen:
        if row not in ERRATA:
            raise ValueError(f"row={row!r} must be one of {', '.join(ERRATA)}")
    return (ERRATA[row]() for row in chosen)
