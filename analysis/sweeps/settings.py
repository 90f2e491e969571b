"""The settings of a sweep: runs that differ in nothing but the seed, at their best learning rate.

The learning rate is chosen on validation rows. Test rows take no part in the choice.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from lab.intervals import bound_mean
from lab.sweeps.table import MEASURED

RATE = "learning_rate"
NO_FACTORS = {*MEASURED, "seed", "path", "date"} - {"seq_len"}
"""Columns that tell no setting from another."""
HAS_RESULT = pl.col("accuracy").is_not_null() | (pl.col("status") == "diverged").fill_null(False)


@dataclass(frozen=True)
class SettingResult:
    """Runs that differ in nothing but the seed.

    Attributes:
        factors: the values that tell it from other settings, by column.
        rows: the interval of each over other rows, if all runs have one.
        steps: of each run until it was solved, or all.
        parameters: of the model; None if unknown.
        state_bytes: what decoding keeps of one row; None if unknown.
        unended: runs that have no accuracy: diverged, failed or not run.
        diverged: how many of them diverged.
    """

    factors: Mapping[str, Any]
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    rows: tuple[tuple[float, float], ...]
    steps: tuple[int, ...]
    solved: tuple[bool, ...]
    seconds: tuple[float, ...]
    parameters: int | None
    state_bytes: int | None
    unended: int = 0
    diverged: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean, over seeds, and over rows where that is wider."""
        return bound_mean(self.accuracies, self.rows)

    @property
    def mean(self) -> float:
        """Mean accuracy over seeds; NaN without a run."""
        return sum(self.accuracies) / len(self.accuracies) if self.accuracies else math.nan

    @property
    def cost(self) -> float:
        """Mean seconds of training of a run."""
        return sum(self.seconds) / len(self.seconds)

    def name(self, without: Iterable[str] = ()) -> str:
        """Return what tells it from other settings, such as "AM*2, d_model=32"."""
        left_out = {*without}
        return name_values({n: v for n, v in self.factors.items() if n not in left_out})


def list_factors(table: pl.DataFrame) -> list[str]:
    """Return the columns that tell settings from one another: those with several values."""
    return [
        name
        for name in table.columns
        if name not in NO_FACTORS and table[name].drop_nulls().n_unique() > 1
    ]


def select_results(table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of runs from which something was learned: an accuracy, or divergence."""
    return table.filter(HAS_RESULT)


def choose_rates(table: pl.DataFrame, setting: Sequence[str]) -> pl.DataFrame:
    """Return the rows at the best learning rate of each setting.

    The best rate has the highest mean accuracy on validation rows, of which a run that diverged has
    none right. Rates at which all runs were solved count as equal, and of them the best took the
    fewest steps. A rate that was run with fewer seeds than another has no part in the choice.

    Args:
        table: of runs, with a column of learning rates or without.
        setting: columns that tell settings from one another, without the learning rate.
    """
    if RATE not in table.columns:
        return table
    solved = pl.col("solved").fill_null(False).all()
    right = pl.when(pl.col("status") == "diverged").then(0.0).otherwise(pl.col("validation"))
    score = pl.when(solved).then(2 + 1 / (1 + pl.mean("steps"))).otherwise(right.mean())
    seeds = pl.col("seed").filter(HAS_RESULT).n_unique()
    by_rate = table.group_by([*setting, RATE], maintain_order=True).agg(_seeds=seeds, _score=score)
    ranked = by_rate.sort("_seeds", "_score", descending=True, nulls_last=True, maintain_order=True)
    best = ranked.unique(setting or None, keep="first") if setting else ranked.head(1)
    return table.join(
        best.select([*setting, RATE]), on=[*setting, RATE], nulls_equal=True, maintain_order="left"
    )


def collect_settings(table: pl.DataFrame) -> list[SettingResult]:
    """Return the settings of a table in its order, each at its best learning rate."""
    factors = list_factors(table)
    keys = [name for name in factors if name != RATE]
    chosen = choose_rates(table, keys)
    shown = [*keys, RATE] if RATE in factors else keys
    groups = chosen.group_by(shown, maintain_order=True) if shown else [((), chosen)]
    return [_collect(dict(zip(shown, key, strict=True)), rows) for key, rows in groups]


def _collect(factors: Mapping[str, Any], rows: pl.DataFrame) -> SettingResult:
    known = rows.filter(pl.col("accuracy").is_not_null())
    ends = [(low, high) for low, high in known.select("low", "high").iter_rows() if low is not None]
    return SettingResult(
        factors=factors,
        seeds=tuple(known["seed"]),
        accuracies=tuple(known["accuracy"]),
        rows=tuple(ends) if len(ends) == len(known) else (),
        steps=tuple(known["steps"].fill_null(0)),
        solved=tuple(known["solved"].fill_null(False)),
        seconds=tuple(known["seconds"].fill_null(0.0)),
        parameters=next(iter(known["parameters"].drop_nulls()), None),
        state_bytes=next(iter(known["state_bytes"].drop_nulls()), None),
        unended=len(rows) - len(known),
        diverged=rows.filter(pl.col("status") == "diverged").height,
    )


def name_values(factors: Mapping[str, Any]) -> str:
    """Return the values of factors as one name; text says by itself what it is a value of."""
    parts = []
    for name, value in factors.items():
        number = f"{value:g}" if isinstance(value, float) else str(value)
        parts.append(number if isinstance(value, str) else f"{name}={number}")
    return ", ".join(parts) or "all runs"
