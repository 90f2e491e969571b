"""The statistic of a claim, with its interval: a difference of two settings, or the least of many.

A ratio of costs is computed by `analysis.claims.costs`; all else is of accuracies.

Seeds are the replicates: runs of one seed at several places, such as widths, are averaged first.
Each setting is taken at the learning rate that is best on validation rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
from jaxtyping import Float

from analysis.statistics.seeds import bound_mean
from analysis.sweeps.settings import RATE, choose_rates, name_values
from lab.bench.costs import Cost
from tasks.bounds import check_choice

CONFIDENCE = 0.95
FEWEST = 2
"""Minimum number of seeds of a setting of which a difference has an interval."""
Side = Literal["above", "below"]
KINDS = ("difference", "least", "greatest", "ratio")


@dataclass(frozen=True)
class Statistic:
    """What is computed of a table, and the threshold that decides.

    Attributes:
        kind: "difference": mean accuracy of one setting minus that of another; "least": the lowest
            mean accuracy over all places; "greatest": the highest; "ratio": how many times as much
            one setting costs as another.
        of: the factors' values of the setting.
        than: those of the setting that it is compared with; empty for least and greatest.
        side: whether the claim is that the statistic lies above or below the threshold.
        threshold: in the unit of accuracy; of a ratio, a number > 0.
        at: values of further factors, to which the claim is restricted.
        cost: of a ratio, what is measured; otherwise empty.
    """

    kind: Literal["difference", "least", "greatest", "ratio"]
    of: Mapping[str, Any]
    than: Mapping[str, Any]
    side: Side
    threshold: float
    at: Mapping[str, Any]
    cost: Cost | Literal[""] = ""

    def __post_init__(self):
        check_choice("kind", self.kind, KINDS)
        if not self.of:
            raise ValueError("of: must name a setting, such as { d_model = 64 }")
        if self.of == self.than:
            raise ValueError("than: must differ from the setting in `of`")
        compares = self.kind in ("difference", "ratio")
        if compares != bool(self.than):
            raise ValueError(
                f"than: must be given for a difference or a ratio, and only there ({self.kind})"
            )
        if self.kind != "ratio":
            if self.cost:
                raise ValueError(f"cost={self.cost}: must be given for a ratio only ({self.kind})")
            if not -1 <= self.threshold <= 1:
                raise ValueError(f"{self.side}={self.threshold}: must be in -1 … 1")
            return
        check_choice("cost", self.cost, get_args(Cost))
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"{self.side}={self.threshold}: must be > 0 and finite for a ratio")


@dataclass(frozen=True)
class StatisticValue:
    """The value of a statistic.

    Attributes:
        value: in the unit of accuracy, or a ratio; NaN where runs are missing.
        low: lower end of its 95 % interval.
        high: upper end.
        seeds: replicates of each setting, the fewest; of a ratio, rounds.
        places: how many combinations of the other factors it was computed over.
        where: the place of the least or greatest; empty for a difference.
        most: the largest value that a difference can have, if the first setting is always right.
        best: of a difference, the mean accuracy of the better setting; infinite for all else.
        surely: the lower end of that mean's 95 % interval over seeds.
    """

    value: float
    low: float
    high: float
    seeds: int
    places: int
    where: str = ""
    most: float = 1.0
    best: float = math.inf
    surely: float = math.inf


def select(table: pl.DataFrame, values: Mapping[str, Any]) -> pl.DataFrame:
    """Return the rows with these values of factors."""
    for name, value in values.items():
        table = table.filter(pl.col(name) == value)
    return table


def score(table: pl.DataFrame) -> pl.DataFrame:
    """Return the table with diverged runs counted as accuracy 0, on every split."""
    diverged = pl.col("status") == "diverged"
    return table.with_columns(
        pl.when(diverged).then(0.0).otherwise(pl.col(name)).alias(name)
        for name in ("accuracy", "validation", "low", "high")
    )


def estimate(table: pl.DataFrame, statistic: Statistic, places: list[str]) -> StatisticValue:
    """Return the statistic of a table at the best learning rates.

    Args:
        table: a row for each run and row length, all ended.
        statistic: what to compute.
        places: the factors besides those that the statistic names, the learning rate and the seed.
    """
    scored = score(select(table, statistic.at))
    if statistic.kind == "difference":
        ours, theirs = (
            average_seeds(choose_rates(select(scored, values), places), places)
            for values in (statistic.of, statistic.than)
        )
        return compare(ours, theirs, count_places(scored, places))
    return _find_extreme(choose_rates(select(scored, statistic.of), places), statistic, places)


def count_places(table: pl.DataFrame, places: list[str]) -> int:
    """Return how many combinations of the other factors a table has."""
    return table.select(places).n_unique() if places else 1


def average_seeds(rows: pl.DataFrame, places: list[str]) -> Float[np.ndarray, " n"]:
    """Return the mean accuracy over places of each seed that has been run at all of them."""
    most = count_places(rows, places) if len(rows) else 0
    by_seed = rows.drop_nulls("accuracy").group_by("seed", maintain_order=True)
    means = by_seed.agg(pl.mean("accuracy"), pl.len().alias("count"))
    return means.filter(pl.col("count") == most)["accuracy"].to_numpy()


def compare(
    ours: Float[np.ndarray, " n"], theirs: Float[np.ndarray, " m"], places: int
) -> StatisticValue:
    """Return the difference of two means over seeds, with Welch's interval."""
    from scipy import stats

    seeds = min(len(ours), len(theirs))
    if seeds == 0:
        return StatisticValue(math.nan, math.nan, math.nan, 0, places)
    value, most = float(ours.mean() - theirs.mean()), 1 - float(theirs.mean())
    better = max(ours, theirs, key=np.mean)
    surely = bound_mean(better.tolist())[0] if len(better) >= FEWEST else -math.inf
    low, high = -math.inf, math.inf
    if seeds >= FEWEST and ours.std() == theirs.std() == 0:
        low = high = value
    elif seeds >= FEWEST:
        ends = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(CONFIDENCE)
        low, high = float(ends.low), float(ends.high)
    best = float(better.mean())
    return StatisticValue(value, low, high, seeds, places, most=most, best=best, surely=surely)


def _find_extreme(rows: pl.DataFrame, statistic: Statistic, places: list[str]) -> StatisticValue:
    """Return the lowest or highest mean over places, with ends that hold for all places at once.

    "All lie above" needs no correction for how many places there are, since each of them must do
    so. "One lies below" needs Bonferroni's, since any of them may by chance. So the lower end of
    the lowest is the lowest lower end, and its upper end the lowest of wider upper ends.
    """
    groups = rows.group_by(places, maintain_order=True) if places else [((), rows)]
    found, among = [], count_places(rows, places) if len(rows) else 1
    for key, group in groups:
        known = group.drop_nulls("accuracy")
        if not len(known):
            continue
        values = known["accuracy"].to_list()
        ends = known.select("low", "high").rows() if not known["low"].null_count() else []
        name = name_values(dict(zip(places, key, strict=True)))
        low, high = bound_mean(values, ends)
        wider = bound_mean(values, ends, 1 - (1 - CONFIDENCE) / among)
        if statistic.kind == "least":
            high = wider[1]
        else:
            low = wider[0]
        if len(values) < FEWEST:
            low, high = -math.inf, math.inf
        found.append((sum(values) / len(values), low, high, len(values), name))
    if not found:
        return StatisticValue(math.nan, math.nan, math.nan, 0, 0)
    pick = min if statistic.kind == "least" else max
    value, _, _, _, where = pick(found)
    return StatisticValue(
        value,
        pick(low for _, low, *_ in found),
        pick(high for _, _, high, *_ in found),
        min(count for *_, count, _ in found),
        len(found),
        where,
    )


def list_rates(table: pl.DataFrame, values: Mapping[str, Any], places: list[str]) -> list[float]:
    """Return the learning rates that a setting is taken at, over all places."""
    rows = choose_rates(select(table, values), places)
    return sorted(rows[RATE].unique().to_list()) if RATE in rows.columns else []
