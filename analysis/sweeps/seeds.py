"""Runs that differ in the seed alone: accuracy of each, and the steps until they were solved."""

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from analysis.statistics.comparisons import estimate_median
from lab.intervals import bound_mean
from lab.training.records import name_ending


@dataclass(frozen=True)
class SeedRun:
    """One of the runs.

    Attributes:
        status: how far it got (`lab.sweeps.outcome.Status`).
        accuracy: on test rows; None if it was not evaluated.
        low: lower end of the accuracy's 95 % interval over other rows; None likewise.
        steps: until it was solved on validation rows, or all that it took.
        solved: whether it was solved.
    """

    seed: int
    status: str
    accuracy: float | None
    low: float | None
    high: float | None
    steps: int | None
    solved: bool
    seconds: float | None


@dataclass(frozen=True)
class SeedSummary:
    """What several seeds found.

    Attributes:
        interval: 95 % over seeds, or over rows where that is wider; None if unknown.
        median: of the steps until solved (Kaplan–Meier): a run that was stopped before it was
            solved counts as one that takes longer. None if fewer than half are solved.
        within: 95 % interval of the median; None for an end that is not known.
    """

    runs: tuple[SeedRun, ...]
    mean: float | None
    interval: tuple[float, float] | None
    median: float | None
    within: tuple[float | None, float | None]

    @property
    def solved(self) -> list[int]:
        """The steps of the runs that were solved, ascending."""
        return sorted(run.steps or 0 for run in self.runs if run.solved)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary, ready for JSON."""
        steps = self.solved
        return {
            "runs": [asdict(run) for run in self.runs],
            "accuracy": {"mean": self.mean, "interval": self.interval},
            "solved": len(steps),
            "steps": {
                "median": self.median,
                "interval": self.within,
                "least": steps[0] if steps else None,
                "most": steps[-1] if len(steps) == len(self.runs) else None,
            },
        }

    def describe(self) -> str:
        """Say how many seeds were solved, after how many steps, and how the others ended."""
        steps, others = self.solved, [run for run in self.runs if not run.solved]
        lines = [f"seeds solved: {len(steps)} of {len(self.runs)}"]
        if steps:
            middle = "unknown" if self.median is None else f"{self.median:,g}"
            longest = max([run.steps or 0 for run in others], default=0)
            most = f"more than {max(longest, steps[-1]):,}" if others else f"{steps[-1]:,}"
            lines.append(f"steps until solved: median {middle}, from {steps[0]:,} to {most}")
        if others:
            kinds = Counter(name_ending(run.status) for run in others)
            how = ", ".join(
                f"{kind.removeprefix('not solved: ')}: {count}" for kind, count in kinds.items()
            )
            lines.append(f"not solved, counted as taking longer than they ran: {how}")
        if self.mean is not None and self.interval is not None:
            low, high = self.interval
            lines.append(f"mean accuracy: {self.mean:.4f}, 95 %: {low:.4f} … {high:.4f}")
        return "\n".join(lines)


def summarize_seeds(table: pl.DataFrame) -> SeedSummary:
    """Return what a table of runs that differ in the seed alone shows.

    Args:
        table: with a row for each run (`lab.sweeps.table.tabulate_cells`).
    """
    columns = ("seed", "status", "accuracy", "low", "high", "steps", "solved", "seconds")
    runs = tuple(
        SeedRun(**{**row, "solved": bool(row["solved"])})
        for row in table.select(columns).sort("seed").iter_rows(named=True)
    )
    taken = [run for run in runs if run.steps]
    median, (low, high) = math.inf, (math.inf, math.inf)
    if taken:
        median, (low, high) = estimate_median(
            [run.steps or 0 for run in taken], [r.solved for r in taken]
        )
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    rows = [(r.low, r.high) for r in runs if r.low is not None and r.high is not None]
    interval = bound_mean(accuracies, rows if len(rows) == len(accuracies) else [])
    return SeedSummary(
        runs=runs,
        mean=sum(accuracies) / len(accuracies) if accuracies else None,
        interval=None if math.isnan(interval[0]) else interval,
        median=_drop_infinite(median),
        within=(_drop_infinite(low), _drop_infinite(high)),
    )


def _drop_infinite(value: float) -> float | None:
    return value if math.isfinite(value) else None
