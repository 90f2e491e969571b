"""The verdict on a claim: holds, fails or undecided, and the power that its sweep has.

The statistic is a difference of two settings' accuracies, or the least or greatest of many. Seeds
are the replicates: runs of one seed at several places, such as widths, are averaged first. Each
setting is taken at the learning rate that is best on validation rows.

Of costs, the statistic is how many times as much a step of one setting takes as that of another.
Rounds of turns are the replicates: the logarithms of a round's ratios are averaged over places,
such as row lengths, and the interval is Student's over rounds. So it tells what the noise of the
machine leaves open, and nothing of other machines. Counts of bytes and parameters are exact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import polars as pl
from jaxtyping import Float

from analysis.base import Finding, NotApplicableError, Table
from analysis.claims.claim import Power, Statistic
from analysis.figures import Axis, Curves, Line, curves
from analysis.sweeps.settings import RATE, choose_rates, name_values
from lab.intervals import bound_by_student, bound_mean
from lab.sweeps.outcome import ENDED

ClaimOutcome = Literal["holds", "fails", "undecided"]
CONFIDENCE = 0.95
MANY_RATES = 3
"""Of fewer learning rates, each is at an edge of those tried."""
FEWEST = 2
"""Minimum number of seeds of a setting of which a difference has an interval."""
DRAWS = 400
"""Planted sweeps that the power is computed from; its error is about 0.02."""
UNITS = {
    "training": ("ms", 1e-3, "time forward and backward"),
    "forward": ("ms", 1e-3, "time forward"),
    "memory": ("MiB", 2**20, "memory of the tensors, forward and backward"),
    "parameters": ("million", 1e6, "parameters"),
    "active": ("million", 1e6, "parameters that one token uses"),
}
"""Unit, its size, and what is measured, by cost."""
DOES = {"accuracy": "is right as often", "bits": "takes as few bits"}
CEILINGS = {"accuracy": 1.0, "bits": 0.0}
"""The most that a setting can reach, by measure."""
MEASURED_COST = ("round", "cost")
"""Columns of a table of costs, beside the factors and seq_len."""


@dataclass(frozen=True)
class StatisticValue:
    """The value of a statistic.

    Attributes:
        value: in the unit of accuracy, in bits saved, or a ratio; NaN where runs are missing.
        seeds: replicates of each setting, the fewest; of a ratio, rounds.
        places: how many combinations of the other factors it was computed over.
        where: the place of the least or greatest; empty for a difference.
        most: the largest value that a difference can have, if the first setting is always right.
        best: of a difference, the mean accuracy of the better setting, or minus its bits; infinite
            for all else.
        surely: the lower end of that mean's 95 % interval over seeds.
        confidence: of the interval.
    """

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: int = 0
    places: int = 0
    where: str = ""
    most: float = 1.0
    best: float = math.inf
    surely: float = math.inf
    confidence: float = CONFIDENCE


def select(table: pl.DataFrame, values: Mapping[str, Any]) -> pl.DataFrame:
    """Return the rows with these values of factors."""
    for name, value in values.items():
        table = table.filter(pl.col(name) == value)
    return table


def score(table: pl.DataFrame, measure: str = "accuracy", floor: float = 0.0) -> pl.DataFrame:
    """Return the table with what is compared as its accuracy, of which more is better.

    Of bits, it is minus the bits that a token takes, and on validation rows, which choose among
    learning rates, the likelihood of a token. A run that diverged has an accuracy of 0 on every
    split, or takes the bits of a guess.

    Args:
        floor: minus the bits of a guess; not used for accuracies.
    """
    diverged = pl.col("status") == "diverged"
    scored = table.with_columns(
        pl.when(diverged).then(0.0).otherwise(pl.col(name)).alias(name)
        for name in ("accuracy", "validation", "low", "high")
    )
    if measure == "accuracy":
        return scored
    saved = pl.when(diverged).then(floor).otherwise(-pl.col("loss") / math.log(2))
    likelihood = (-pl.col("validation_loss")).exp()
    return scored.with_columns(accuracy=saved, validation=likelihood, low=None, high=None)


def estimate(
    scored: pl.DataFrame, statistic: Statistic, places: list[str], confidence: float = CONFIDENCE
) -> StatisticValue:
    """Return the statistic of a table from `score` at the best learning rates.

    Args:
        scored: the rows at which the claim is made.
        places: the factors besides those that the statistic names, the learning rate and the seed.
        confidence: of its interval.
    """
    if statistic.kind == "difference":
        ours, theirs = (
            average_seeds(choose_rates(select(scored, values), places), places)
            for values in (statistic.of, statistic.than)
        )
        ceiling = CEILINGS[statistic.measure]
        return compare(ours, theirs, count_places(scored, places), confidence, ceiling)
    chosen = choose_rates(select(scored, statistic.of), places)
    return _find_extreme(chosen, statistic, places, confidence)


def correct(looks: int) -> float:
    """Return the confidence at which each of so many looks has to decide."""
    return 1 - (1 - CONFIDENCE) / looks


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
    ours: Float[np.ndarray, " n"],
    theirs: Float[np.ndarray, " m"],
    places: int,
    confidence: float = CONFIDENCE,
    ceiling: float = 1.0,
) -> StatisticValue:
    """Return the difference of two means over seeds, each at most `ceiling`: Welch's interval."""
    from scipy import stats

    seeds = min(len(ours), len(theirs))
    if seeds == 0:
        return StatisticValue(places=places, confidence=confidence)
    value, most = float(ours.mean() - theirs.mean()), ceiling - float(theirs.mean())
    better = max(ours, theirs, key=np.mean)
    surely = bound_by_student(better.tolist())[0] if len(better) >= FEWEST else -math.inf
    low, high = -math.inf, math.inf
    if seeds >= FEWEST:
        a, b = (runs.var(ddof=1) / len(runs) for runs in (ours, theirs))
        low = high = value
        if a + b > 0:
            freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1))
            ends = stats.t.interval(confidence, freedom, value, math.sqrt(a + b))
            low, high = map(float, ends)
    best = float(better.mean())
    return StatisticValue(
        value, low, high, seeds, places, most=most, best=best, surely=surely, confidence=confidence
    )


def _find_extreme(
    rows: pl.DataFrame, statistic: Statistic, places: list[str], confidence: float
) -> StatisticValue:
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
        low, high = bound_mean(values, ends, confidence)
        wider = bound_mean(values, ends, 1 - (1 - confidence) / among)
        if statistic.kind == "least":
            high = wider[1]
        else:
            low = wider[0]
        if len(values) < FEWEST:
            low, high = -math.inf, math.inf
        found.append((sum(values) / len(values), low, high, len(values), name))
    if not found:
        return StatisticValue(confidence=confidence)
    pick = min if statistic.kind == "least" else max
    value, _, _, _, where = pick(found)
    return StatisticValue(
        value,
        pick(low for _, low, *_ in found),
        pick(high for _, _, high, *_ in found),
        min(count for *_, count, _ in found),
        len(found),
        where,
        confidence=confidence,
    )


@dataclass(frozen=True)
class ClaimVerdict:
    """What a sweep says of a claim.

    Attributes:
        operational: whether it is undecided only because runs are missing or failed: nothing was
            learned about the claim.
        unended: how many of the sweep's runs have not ended, or failed.
    """

    outcome: ClaimOutcome
    because: str
    operational: bool
    estimate: StatisticValue
    runs: int
    unended: int


@dataclass(frozen=True)
class Floor:
    """What takes no learning, averaged over the places that a claim compares: as `score` returns.

    Attributes:
        shortcut_name: the best shortcut; empty without any.
    """

    chance: float = 0.0
    shortcut_name: str = ""
    shortcut: float = 0.0


def decide(
    table: pl.DataFrame,
    statistic: Statistic,
    factors: Sequence[str],
    floor: Floor,
    looks: int = 1,
) -> ClaimVerdict:
    """Return the verdict of a sweep's table.

    A claim holds where the whole interval lies on its side of the threshold, and fails where the
    whole interval lies on the other. It is undecided otherwise; where a run is missing or has
    failed; where the order of two settings changes between the learning rates chosen for them;
    where the setting compared with is so often right that no difference could reach the threshold;
    and where neither setting is surely further above chance than the threshold asks for.

    Args:
        table: a row for each run and row length.
        factors: the columns that tell the sweep's cells apart.
        floor: chance and the best shortcut at the places that are compared.
        looks: how often a verdict may be sought in all, this time included. The interval is so
            much wider (Bonferroni's correction) that looking again is no further chance to err.
    """
    names = [*factors] + ["seq_len"] * ("seq_len" not in factors)
    places = [n for n in names if n not in {*statistic.of, *statistic.than, RATE, "seed"}]
    relevant = score(select(table, statistic.at), statistic.measure, floor.chance)
    runs = relevant.select(list(factors)).n_unique()
    missing = relevant.filter(~pl.col("status").is_in(ENDED)).unique(list(factors))
    none = StatisticValue(confidence=correct(looks))
    if len(missing) or not runs:
        counts = ", ".join(
            f"{count} {status}" for status, count in missing["status"].value_counts().rows()
        )
        why = f"not all runs have ended: {counts} of {runs}"
        return ClaimVerdict("undecided", why, True, none, runs, len(missing))
    unknown = relevant.filter(pl.col("accuracy").is_null() | pl.col("accuracy").is_nan())
    if statistic.measure == "bits" and len(unknown):
        why = f"runs without a loss on test rows: {unknown.select(list(factors)).n_unique()}"
        return ClaimVerdict("undecided", why, True, none, runs, 0)
    found = estimate(relevant, statistic, places, correct(looks))
    outcome, because = judge(found, statistic, floor.chance)
    if floor.shortcut_name and found.best < floor.shortcut:
        does = DOES[statistic.measure]
        because += (
            f"; no setting {does} as the shortcut {floor.shortcut_name!r} "
            f"({abs(found.best):.3g} and {abs(floor.shortcut):.3g})"
        )
    because += _find_edge(relevant, statistic, places)
    change = _find_change(relevant, statistic, places)
    if outcome != "undecided" and change:
        outcome, because = "undecided", change
    return ClaimVerdict(outcome, because, False, found, runs, 0)


def find_rates(
    table: pl.DataFrame, statistic: Statistic, settings: Sequence[str]
) -> set[tuple[Any, ...]]:
    """Return, for each setting, the values of these factors and its best learning rate."""
    scored = score(select(table, statistic.at), statistic.measure)
    return {*choose_rates(scored, settings).select(*settings, RATE).rows()}


def judge(
    found: StatisticValue, statistic: Statistic, chance: float = 0.0
) -> tuple[ClaimOutcome, str]:
    """Return on which side of its threshold a statistic lies with its whole interval, and why."""
    line, above = statistic.threshold, statistic.side == "above"
    if not math.isfinite(found.value):
        return "undecided", "the table has no run of a setting that the claim names"
    if found.low > line or found.high < line:
        if found.surely - chance <= abs(line):
            return "undecided", (
                f"neither setting has surely learned enough to differ by {abs(line):g}: "
                f"{_name_best(found, statistic)}, and chance is {abs(chance):.3g}"
            )
        side = "above" if found.low > line else "below"
        holds = (side == "above") is above
        if not holds and above and found.most <= line and found.high >= 0:
            return "undecided", (
                f"no difference above {line:g} was possible: the setting compared with leaves "
                f"{found.most:.2g} to gain, so harder rows are needed"
            )
        return ("holds" if holds else "fails"), f"the whole interval lies {side} {line:g}"
    if not math.isfinite(found.high - found.low):
        return "undecided", "one seed has no interval"
    return "undecided", f"the interval includes {line:g}"


def _name_best(found: StatisticValue, statistic: Statistic) -> str:
    if statistic.measure == "bits":
        return f"the better one takes {-found.best:.3g} bits ({-found.surely:.3g} or fewer)"
    return f"the better one has an accuracy of {found.best:.3g} ({found.surely:.3g} or more)"


def _find_change(table: pl.DataFrame, statistic: Statistic, places: list[str]) -> str:
    """Say at which learning rate two settings change sides, between the rates chosen for them."""
    if statistic.kind != "difference" or RATE not in table.columns:
        return ""
    chosen = [
        rate
        for values in (statistic.of, statistic.than)
        for rate in choose_rates(select(table, values), places)[RATE]
    ]
    sides = {}
    for rate in sorted(table[RATE].unique().to_list()):
        if min(chosen) <= rate <= max(chosen):
            at = table.filter(pl.col(RATE) == rate)
            ours, theirs = (
                average_seeds(select(at, values), places)
                for values in (statistic.of, statistic.than)
            )
            found = compare(ours, theirs, count_places(at, places))
            sides[rate] = found.value > statistic.threshold
    if len(set(sides.values())) < 2:
        return ""
    above = ", ".join(f"{rate:g}" for rate, side in sides.items() if side)
    return (
        "the order changes inside the window of learning rates: the difference is above the "
        f"threshold at {above} alone"
    )


def _find_edge(table: pl.DataFrame, statistic: Statistic, places: list[str]) -> str:
    """Name the settings that are best everywhere at the highest of three or more learning rates
    tried, or everywhere at the lowest.
    """
    if statistic.kind != "difference" or RATE not in table.columns:
        return ""
    tried, found = {*table[RATE]}, []
    for values in (statistic.of, statistic.than):
        chosen = {*choose_rates(select(table, values), places)[RATE]}
        if len(chosen) == 1 and chosen <= {min(tried), max(tried)}:
            found.append(f"{name_values(values)} is best at {chosen.pop():g}")
    if len(tried) < MANY_RATES or not found:
        return ""
    return f"; a better learning rate may lie beyond those tried: {', '.join(found)}"


def compute_power(statistic: Statistic, power: Power, looks: Sequence[int]) -> float:
    """Return how often the verdict is "holds" if the effect is the assumed one.

    Sweeps are planted: the accuracies of the runs of each setting are normal about means that
    differ by the effect, or about the effect itself, and cut to [0, 1]; bits are not cut.

    Args:
        looks: after how many seeds of each setting a verdict is sought, ascending.
    """
    rng = np.random.default_rng(0)
    held, high, low = 0, 0.5 + power.effect / 2, 0.5 - power.effect / 2
    means = (high, low) if statistic.kind == "difference" else (power.effect,)
    confidence = correct(len(looks))
    for _ in range(DRAWS):
        drawn = [rng.normal(mean, power.spread, max(looks)) for mean in means]
        if statistic.measure == "accuracy":
            drawn = [np.clip(runs, 0, 1) for runs in drawn]
        for seeds in looks:
            runs = [shares[:seeds] for shares in drawn]
            if len(runs) == 2:
                found = compare(runs[0], runs[1], 1, confidence)
            else:
                ends = (-math.inf, math.inf)
                if seeds >= FEWEST:
                    ends = bound_mean(runs[0].tolist(), confidence=confidence)
                found = StatisticValue(float(runs[0].mean()), *ends, seeds, 1)
            outcome = judge(found, statistic)[0]
            if outcome != "undecided":
                held += outcome == "holds"
                break
    return held / DRAWS


def decide_costs(table: pl.DataFrame, statistic: Statistic) -> ClaimVerdict:
    """Return the verdict of a table of costs: a row for each setting and round."""
    found = estimate_ratio(table, statistic)
    outcome, because = judge(found, statistic)
    settings = select(table, statistic.at).filter(pl.col("round") == 0)
    return ClaimVerdict(outcome, because, False, found, len(settings), 0)


def estimate_ratio(table: pl.DataFrame, statistic: Statistic) -> StatisticValue:
    """Return the geometric mean over places of how many times as much a setting costs."""
    named = {*statistic.of, *statistic.than, *MEASURED_COST}
    places = [name for name in table.columns if name not in named]
    at = select(table, statistic.at)
    ours, theirs = (
        select(at, values).select(*places, *MEASURED_COST)
        for values in (statistic.of, statistic.than)
    )
    pairs = ours.join(theirs, on=[*places, "round"], suffix="_than")
    if not len(pairs):
        return StatisticValue()
    ratio = (pl.col("cost") / pl.col("cost_than")).log()
    rounds = pairs.group_by("round").agg(ratio.mean().alias("ratio"))["ratio"].to_list()
    low, high = bound_by_student(rounds, CONFIDENCE)  # low = high if there is one round
    count = pairs.select(places).n_unique() if places else 1
    value, low, high = math.exp(sum(rounds) / len(rounds)), math.exp(low), math.exp(high)
    return StatisticValue(value, low, high, len(rounds), count, most=math.inf)


@dataclass(frozen=True)
class SettingCosts(Finding):
    """What a step of each setting costs at each row length.

    Attributes:
        settings: by name, the costs of the rounds at each row length, in seconds, bytes or numbers.
    """

    cost: str
    settings: Mapping[str, Mapping[int, Sequence[float]]]
    title = "Costs of a step"
    reading = (
        "A step is a batch of rows at initial weights, and every row length has as many tokens "
        "a step unless the claim's file says otherwise. Times are taken in turns on one "
        "thread, or on the GPU; lines join the medians, whiskers reach from the least to the "
        "most. Bytes are those of tensors."
    )

    @property
    def medians(self) -> dict[str, dict[int, float]]:
        """By name, the median at each row length, in the unit that is shown."""
        size = UNITS[self.cost][1]
        return {
            name: {length: median(taken) / size for length, taken in costs.items()}
            for name, costs in self.settings.items()
        }

    @property
    def says(self) -> str:
        """The least and the greatest median at the longest rows."""
        unit, _, what = UNITS[self.cost]
        longest = max(length for costs in self.settings.values() for length in costs)
        last = sorted((c[longest], name) for name, c in self.medians.items() if longest in c)
        (least, first), (most, other) = last[0], last[-1]
        return (
            f"At {longest:,} tokens a row, the median of {what} goes from {least:,.4g} {unit} "
            f"({first}) to {most:,.4g} {unit} ({other})."
        )

    def numbers(self) -> Table:
        """Return the median of each setting at each row length."""
        unit, medians = UNITS[self.cost][0], self.medians
        lengths = sorted({length for costs in medians.values() for length in costs})
        rows = [
            (name, *(f"{costs[n]:,.4g}" if n in costs else "–" for n in lengths))
            for name, costs in medians.items()
        ]
        return Table((f"setting, {unit}", *(f"{n:,} tokens" for n in lengths)), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a line for each setting over the row lengths, both axes logarithmic."""
        unit, size, what = UNITS[self.cost]
        lines = [
            Line(
                name,
                np.array(list(costs), np.float64),
                np.array(list(costs.values())),
                np.array([(min(c), max(c)) for c in self.settings[name].values()]) / size,
            )
            for name, costs in self.medians.items()
        ]
        lengths = {float(n): f"{n:,}" for costs in self.settings.values() for n in sorted(costs)}
        y = Axis(f"{what}, {unit}", scale="log")
        return curves([Curves(lines, y)], Axis("tokens a row", scale="log", ticks=lengths))


def collect_costs(table: pl.DataFrame, cost: str) -> SettingCosts:
    """Return the costs of a table's settings by row length, and by what else tells them apart.

    A factor that follows from the row length, such as the rows of a batch, is not named.

    Raises:
        NotApplicableError: for an empty table.
    """
    if not len(table):
        raise NotApplicableError("nothing was measured")
    factors = [
        name
        for name in table.columns
        if name not in {*MEASURED_COST, "seq_len"}
        and table.group_by("seq_len").agg(pl.col(name).n_unique())[name].max() != 1
    ]
    found: dict[str, dict[int, list[float]]] = {}
    for row in table.sort("seq_len", maintain_order=True).iter_rows(named=True):
        values: dict[str, Any] = {name: row[name] for name in factors}
        lengths = found.setdefault(name_values(values), {})
        lengths.setdefault(row["seq_len"], []).append(row["cost"])
    return SettingCosts(cost, found)
