"""All that a sweep's table shows: its settings, and the figures that apply."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from analysis.base import Finding, NotApplicableError
from analysis.statistics.survival import MissingLibraryError
from analysis.sweeps import capacity, costs, rates, survival, widths
from analysis.sweeps.settings import SettingResult, collect_settings
from lab.training.records import name_ending

FIGURES: dict[str, Callable[[pl.DataFrame], Sequence[Finding]]] = {
    "widths": widths.measure,
    "capacity": capacity.measure,
    "rates": rates.measure,
    "survival": survival.measure,
    "costs": costs.measure,
}
"""The figures by name, in their order on the page."""


@dataclass(frozen=True)
class SweepResults:
    """What a sweep found.

    Attributes:
        settings: each at its best learning rate, in the order of the table.
        findings: by name of the figure.
        missing: why each of the other figures is not there.
        counts: runs by how they ended.
        errors: the runs that failed or diverged, by which of the two and the error.
    """

    settings: tuple[SettingResult, ...]
    findings: dict[str, tuple[Finding, ...]]
    missing: dict[str, str]
    counts: dict[str, int]
    errors: dict[str, tuple[str, ...]]

    def summarize(self) -> str:
        """Say how many runs ended how."""
        total = sum(self.counts.values())
        parts = ", ".join(f"{count} {name_ending(status)}" for status, count in self.counts.items())
        return f"{total} {'run' if total == 1 else 'runs'}: {parts}."


def collect_results(table: pl.DataFrame, factors: Sequence[str]) -> SweepResults:
    """Return what a sweep's table shows.

    Args:
        table: of the runs, with a row for each row length.
        factors: the columns that tell runs from one another.
    """
    runs = table.unique(factors, keep="first", maintain_order=True)
    findings, missing = {}, {}
    for name, measure in FIGURES.items():
        try:
            findings[name] = tuple(measure(table))
        except (NotApplicableError, MissingLibraryError) as error:
            missing[name] = str(error)
    errors: dict[str, tuple[str, ...]] = {}
    for row in runs.filter(pl.col("error").is_not_null()).iter_rows(named=True):
        name = ", ".join(f"{factor}={row[factor]}" for factor in factors)
        error = f"{row['status']}: {row['error']}"
        errors[error] = (*errors.get(error, ()), name)
    return SweepResults(
        settings=tuple(collect_settings(table)),
        findings=findings,
        missing=missing,
        counts=dict(Counter(runs["status"])),
        errors=errors,
    )
