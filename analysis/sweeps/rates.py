"""How robust settings are to the learning rate: the whole curve, and the rate that is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import polars as pl

from analysis.base import Finding, NotApplicableError, Words
from analysis.plots.style import new_figure
from analysis.statistics.seeds import bound_mean
from analysis.sweeps.lines import HEIGHT, SHARES, add_line, choose_look, put_legend_below
from analysis.sweeps.settings import RATE, choose_rates, list_factors, name_values, select_results
from analysis.words import percent

CLOSE = 0.05
"""Rates whose mean validation accuracy is within this of the chosen one's form the window."""


@dataclass(frozen=True)
class RateCurve:
    """One setting at several learning rates.

    Attributes:
        name: what tells the setting from others.
        rates: learning rates, ascending.
        validation: mean accuracy on validation rows at each rate; 0 where all runs diverged.
        accuracies: of each run on test rows, at each rate.
        chosen: the rate that is best on validation rows, of those with the most seeds.
    """

    name: str
    rates: tuple[float, ...]
    validation: tuple[float, ...]
    accuracies: tuple[tuple[float, ...], ...]
    chosen: float

    @property
    def window(self) -> tuple[float, float]:
        """The lowest and highest rate without a gap around the chosen one that are close to it."""
        at = self.rates.index(self.chosen)
        least = self.validation[at] - CLOSE
        low = high = at
        while low > 0 and self.validation[low - 1] >= least:
            low -= 1
        while high < len(self.rates) - 1 and self.validation[high + 1] >= least:
            high += 1
        return self.rates[low], self.rates[high]


@dataclass(frozen=True)
class RateCurves(Finding):
    """Accuracy by learning rate, a line for each setting."""

    curves: tuple[RateCurve, ...]

    def describe(self) -> Words:
        """Name the chosen rate and the window of each setting."""
        parts = []
        for curve in self.curves:
            low, high = curve.window
            window = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            edge = curve.chosen in (curve.rates[0], curve.rates[-1])
            note = ", at the end of what was tried" if edge else ""
            works = f"{curve.chosen:g}{note} (window {window})"
            if not max(curve.validation):
                works = "none of those that were tried works"
            parts.append(f"{curve.name}: {works}")
        says = f"Learning rates chosen on validation rows: {'; '.join(parts)}."
        return Words(
            "Accuracy by learning rate",
            says,
            "A point is the mean over seeds on test rows; whiskers are 95 % intervals. The ring is "
            "the rate that is best on validation rows, of those with the most seeds; the window "
            f"holds the rates within {CLOSE} of it there. A best rate at the end of what was tried "
            "asks for further rates.",
            f"Lines of accuracy by learning rate. {says}",
        )

    def draw(self) -> go.Figure:
        """Draw a line for each setting."""
        fig = new_figure(height=HEIGHT)
        for number, curve in enumerate(self.curves):
            known = [(r, a) for r, a in zip(curve.rates, curve.accuracies, strict=True) if a]
            means = [sum(a) / len(a) for _, a in known]
            add_line(
                fig,
                curve.name,
                number,
                [rate for rate, _ in known],
                means,
                [bound_mean(a) for _, a in known],
                [
                    f"{curve.name}, {rate:g}: {percent(mean)}"
                    for (rate, _), mean in zip(known, means, strict=True)
                ],
            )
            at = [
                mean for (rate, _), mean in zip(known, means, strict=True) if rate == curve.chosen
            ]
            fig.add_scatter(
                x=[curve.chosen] * len(at),
                y=at,
                mode="markers",
                marker={
                    "symbol": "circle-open",
                    "size": 15,
                    "line": {"width": 2},
                    "color": choose_look(number)["color"],
                },
                showlegend=False,
                hoverinfo="skip",
            )
        rates = sorted({rate for curve in self.curves for rate in curve.rates})
        fig.update_xaxes(title_text="learning rate", type="log", tickvals=rates)
        fig.update_xaxes(ticktext=[f"{rate:g}" for rate in rates])
        fig.update_yaxes(title_text="test accuracy", **SHARES)
        return put_legend_below(fig, [curve.name for curve in self.curves], HEIGHT)


def measure(table: pl.DataFrame) -> Sequence[RateCurves]:
    """Return the curves of a sweep's table.

    Raises:
        NotApplicableError: when the runs that have ended have one learning rate.
    """
    ended = select_results(table)
    if (
        RATE not in ended.columns
        or ended[RATE].n_unique() < 2
        or not ended[RATE].dtype.is_numeric()
    ):
        raise NotApplicableError("the runs that have ended have one learning rate")
    keys = [name for name in list_factors(table) if name != RATE]
    best = choose_rates(ended, keys)
    chosen = {_key(row, keys): row[RATE] for row in best.iter_rows(named=True)}
    groups = ended.group_by(keys, maintain_order=True) if keys else [((), ended)]
    return [
        RateCurves(
            tuple(
                _collect(dict(zip(keys, key, strict=True)), rows, chosen[tuple(key)])
                for key, rows in groups
            )
        )
    ]


def _key(row: Mapping[str, object], keys: Sequence[str]) -> tuple[object, ...]:
    return tuple(row[key] for key in keys)


def _collect(factors: Mapping[str, object], rows: pl.DataFrame, chosen: float) -> RateCurve:
    found = rows.sort(RATE).group_by(RATE, maintain_order=True)
    by_rate = {float(str(rate)): group for (rate,), group in found}
    return RateCurve(
        name=name_values(factors),
        rates=tuple(by_rate),
        validation=tuple(_average(g["validation"]) for g in by_rate.values()),
        accuracies=tuple(tuple(g["accuracy"].drop_nulls()) for g in by_rate.values()),
        chosen=chosen,
    )


def _average(values: pl.Series) -> float:
    known = values.fill_null(0.0).to_list()
    return sum(known) / len(known)
