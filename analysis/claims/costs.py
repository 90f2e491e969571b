"""Claims about costs: how many times as much a step of one setting costs as that of another.

Rounds of turns are the replicates: the logarithms of a round's ratios are averaged over places,
such as row lengths, and the interval is Student's over rounds. So it tells what the noise of the
machine leaves open, and nothing of other machines. Counts of bytes and parameters are exact.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import plotly.graph_objects as go
import polars as pl

from analysis.base import Finding, NotApplicableError, Words
from analysis.claims.statistic import CONFIDENCE, Statistic, StatisticValue, select
from analysis.claims.verdict import ClaimVerdict, judge
from analysis.plots.style import new_figure
from analysis.statistics.seeds import bound_by_student
from analysis.sweeps.lines import HEIGHT, add_line, put_legend_below
from analysis.sweeps.settings import name_values

UNITS = {
    "training": ("ms", 1e-3, "time forward and backward"),
    "forward": ("ms", 1e-3, "time forward"),
    "memory": ("MiB", 2**20, "memory of the tensors, forward and backward"),
    "parameters": ("million", 1e6, "parameters"),
    "active": ("million", 1e6, "parameters that one token uses"),
}
"""Unit, its size, and what is measured, by cost."""
MEASURED_COST = ("round", "cost")
"""Columns of a table of costs, beside the factors and seq_len."""


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
        return StatisticValue(math.nan, math.nan, math.nan, 0, 0)
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
        cost: what was measured, a key of `UNITS`.
        settings: by name, the costs of the rounds at each row length, in seconds, bytes or numbers.
    """

    cost: str
    settings: Mapping[str, Mapping[int, Sequence[float]]]

    def describe(self) -> Words:
        """Give the median of each setting at the longest rows, the least first."""
        unit, size, what = UNITS[self.cost]
        longest = max(length for costs in self.settings.values() for length in costs)
        last = {n: median(c[longest]) / size for n, c in self.settings.items() if longest in c}
        order = sorted(last, key=lambda name: last[name])
        parts = ", ".join(f"{last[name]:,.4g} {unit} ({name})" for name in order)
        says = f"At {longest:,} tokens a row, the medians of {what} are {parts}."
        return Words(
            f"Costs of a step: {what}",
            says,
            "A step is a batch of rows at initial weights, and every row length has as many tokens "
            "a step unless the claim's file says otherwise. Times are taken in turns on one "
            "thread, or on the GPU; lines join the medians, whiskers reach from the least to the "
            "most. Bytes are those of tensors.",
            f"Lines of {what} by row length. {says}",
        )

    def draw(self) -> go.Figure:
        """Draw a line for each setting over the row lengths, both axes logarithmic."""
        unit, size, what = UNITS[self.cost]
        fig = new_figure(height=HEIGHT)
        for number, (name, costs) in enumerate(self.settings.items()):
            shown = {length: [v / size for v in values] for length, values in costs.items()}
            middle = [median(values) for values in shown.values()]
            said = [
                f"{html.escape(name)}, {length:,} tokens: {m:,.4g} {unit}"
                for length, m in zip(shown, middle, strict=True)
            ]
            ends = [(min(values), max(values)) for values in shown.values()]
            add_line(fig, name, number, list(shown), middle, ends, said)
        lengths = sorted({length for costs in self.settings.values() for length in costs})
        fig.update_xaxes(
            title_text="tokens a row",
            type="log",
            tickvals=lengths,
            ticktext=[f"{length:,}" for length in lengths],
        )
        fig.update_yaxes(title_text=f"{what}, {unit}", type="log")
        return put_legend_below(fig, list(self.settings), HEIGHT)


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
