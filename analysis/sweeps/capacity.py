"""How many pairs a model holds: a logistic curve through accuracy against the number of pairs.

The curve is 1 / (1 + (K / K½)^s) for K pairs. Its half point K½ is the number of pairs of which
half are recalled, and s says how sharply accuracy falls there. Intervals resample runs.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl
from jaxtyping import Float, Int

from analysis.base import Finding, NotApplicableError, Words
from analysis.plots.style import new_figure
from analysis.sweeps.lines import HEIGHT, SHARES, choose_look, put_legend_below
from analysis.sweeps.settings import RATE, choose_rates, list_factors, name_values, select_results

RESAMPLES, PERCENTILES = 200, (2.5, 97.5)
FEWEST = 4
"""Minimum number of runs through which a curve is drawn; it has two parameters."""
APART = 0.5
"""If accuracies of a setting's runs differ by more, some did not learn what they could hold."""
PAIRS = ("pairs", "n_pairs")
"""Columns that may hold the number of pairs."""


@dataclass(frozen=True)
class CapacityCurve:
    """What one setting recalls, by the number of pairs.

    Attributes:
        name: what tells the setting from others.
        size: the value that does so, where it is one number; else None.
        pairs: K of each run.
        accuracy: of each run on test rows, in [0, 1].
        half: pairs of which half are recalled, by the fitted curve; None if no curve was fitted.
        sharpness: its exponent s.
        interval: 95 % of `half`; an end beyond the pairs that were tried is infinite, or 0.
    """

    name: str
    size: float | None
    pairs: Int[np.ndarray, " n"]
    accuracy: Float[np.ndarray, " n"]
    half: float | None = None
    sharpness: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def within(self) -> bool:
        """Whether the half point lies among the numbers of pairs that were tried."""
        return self.half is not None and self.pairs.min() <= self.half <= self.pairs.max()

    @property
    def spread(self) -> float:
        """The largest difference of accuracy between runs with as many pairs."""
        return max(float(np.ptp(self.accuracy[self.pairs == k])) for k in set(self.pairs.tolist()))


@dataclass(frozen=True)
class CapacityCurves(Finding):
    """Accuracy by the number of pairs, a fitted curve for each setting.

    Attributes:
        curves: one for each setting, smallest first where they differ in a number.
        factor: the name of that number; empty where there is none.
    """

    curves: tuple[CapacityCurve, ...]
    factor: str

    def describe(self) -> Words:
        """Say how many pairs each setting holds, and how that grows."""
        sentences = [_describe_curve(curve) + _describe_spread(curve) for curve in self.curves]
        known = [curve for curve in self.curves if curve.within and curve.size]
        if len(known) > 1:
            first, last = known[0], known[-1]
            assert first.half is not None
            assert last.half is not None
            assert first.size is not None
            assert last.size is not None
            growth = np.log2(last.half / first.half) / np.log2(last.size / first.size)
            change = f"the half point changes as {self.factor} to the power {growth:.2f}"
            if growth > 0:
                change = change.replace("changes", "grows")
            if _overlap(first.interval, last.interval):
                change = f"no change of the half point with {self.factor} is certain"
            sentences.append(f"From {first.name} to {last.name}, {change}.")
        says = " ".join(sentences)
        return Words(
            "How many pairs are recalled",
            says,
            "A ring is a run; the line is the logistic curve of least squares through the runs of "
            "a setting. Its half point has an interval that resamples runs.",
            f"Falling curves of accuracy by stored pairs. {says}",
        )

    def draw(self) -> go.Figure:
        """Draw accuracy against pairs: a ring for each run, and each setting's fitted curve."""
        fig = new_figure(height=HEIGHT)
        for number, curve in enumerate(self.curves):
            look, name = choose_look(number), html.escape(curve.name)
            fig.add_scatter(
                x=curve.pairs,
                y=curve.accuracy,
                mode="markers",
                marker={"symbol": f"{look['symbol']}-open", "color": look["color"], "size": 8},
                name=name,
                legendgroup=name,
                showlegend=curve.half is None,
                hovertemplate=f"{name}, %{{x}} pairs: %{{y:.1%}}<extra></extra>",
            )
            if curve.half is not None and curve.sharpness is not None:
                ends = np.log2(curve.pairs.min()), np.log2(curve.pairs.max())
                log_pairs = np.linspace(*ends, 60)
                fig.add_scatter(
                    x=np.exp2(log_pairs),
                    y=compute_curve(log_pairs, np.log2(curve.half), curve.sharpness),
                    mode="lines",
                    line={"color": look["color"], "dash": look["dash"]},
                    name=name,
                    legendgroup=name,
                    hoverinfo="skip",
                )
        tried = sorted({int(k) for curve in self.curves for k in curve.pairs})
        fig.update_xaxes(title_text="stored pairs K", type="log", tickvals=tried, ticktext=tried)
        fig.update_yaxes(title_text="test accuracy", **SHARES)
        return put_legend_below(fig, [curve.name for curve in self.curves], HEIGHT)


def measure(table: pl.DataFrame) -> Sequence[CapacityCurves]:
    """Return the curves of a sweep's table.

    Raises:
        NotApplicableError: when the runs that have ended have one number of pairs.
    """
    known = pl.col("accuracy").is_not_null()
    ended = table.filter(known)
    column = next((c for c in PAIRS if c in ended.columns and ended[c].dtype.is_numeric()), None)
    if column is None or ended[column].n_unique() < 2:
        raise NotApplicableError("the runs that have ended have one number of pairs")
    factors = [name for name in list_factors(table) if name not in (RATE, column)]
    ended = choose_rates(select_results(table), [*factors, column]).filter(known)
    # Rows of more pairs are longer; where each number has one length, it tells nothing more.
    if ended.group_by(column).agg(pl.n_unique("seq_len"))["seq_len"].max() == 1:
        factors = [name for name in factors if name != "seq_len"]
    if not factors:
        return [CapacityCurves((_fit_curve("all runs", None, ended, column),), "")]
    single = len(factors) == 1 and ended[factors[0]].dtype.is_numeric()
    groups = (ended.sort(factors) if single else ended).group_by(factors, maintain_order=True)
    curves = tuple(
        _fit_curve(
            name_values(dict(zip(factors, key, strict=True))),
            float(str(key[0])) if single else None,
            rows,
            column,
        )
        for key, rows in groups
    )
    return [CapacityCurves(curves, factors[0] if single else "")]


def _fit_curve(name: str, size: float | None, rows: pl.DataFrame, column: str) -> CapacityCurve:
    """Fit the curve, and again to resampled runs."""
    pairs, accuracy = rows[column].to_numpy(), rows["accuracy"].to_numpy()
    if len(pairs) < FEWEST or len(set(pairs.tolist())) < 3:
        return CapacityCurve(name, size, pairs, accuracy)
    half, sharpness = _fit(pairs, accuracy)
    rng, halves = np.random.default_rng(0), []
    while len(halves) < RESAMPLES:
        some = rng.integers(len(pairs), size=len(pairs))
        if len(set(pairs[some].tolist())) > 1:
            halves.append(_fit(pairs[some], accuracy[some])[0])
    low, high = np.percentile(halves, PERCENTILES)
    interval = (
        float(low) if low >= pairs.min() else 0.0,
        float(high) if high <= pairs.max() else float("inf"),
    )
    return CapacityCurve(name, size, pairs, accuracy, half, sharpness, interval)


def _fit(pairs: Int[np.ndarray, " n"], accuracy: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Return half point and sharpness of the curve of least squares."""
    from scipy.optimize import curve_fit

    # Bounds keep the fit finite where no run is near a half: there K½ is only known to be outside.
    ends = np.log2(pairs.min()) - 4, np.log2(pairs.max()) + 4
    start = np.clip(np.interp(0.5, np.sort(accuracy), np.log2(pairs)[np.argsort(accuracy)]), *ends)
    (level, sharpness), _ = curve_fit(
        compute_curve,
        np.log2(pairs),
        accuracy,
        (start, 2.0),
        bounds=((ends[0], 0.1), (ends[1], 20)),
    )
    return float(2**level), float(sharpness)


def compute_curve(
    log_pairs: Float[np.ndarray, " n"], log_half: float, sharpness: float
) -> Float[np.ndarray, " n"]:
    """Return the accuracy at 2^log_pairs pairs."""
    return 1 / (1 + np.exp2(sharpness * (log_pairs - log_half)))


def _overlap(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Whether two intervals share a point; where one is unknown, they may."""
    if one is None or other is None:
        return True
    return max(one[0], other[0]) <= min(one[1], other[1])


def _describe_curve(curve: CapacityCurve) -> str:
    name = curve.name
    if curve.half is None or curve.interval is None:
        return f"{name}: too few runs for a curve."
    least, most = int(curve.pairs.min()), int(curve.pairs.max())
    if curve.half > most:
        return f"{name} recalls more than half of {most} pairs; its half point was not reached."
    if curve.half < least:
        return f"{name} recalls less than half of {least} pairs already."
    low, high = curve.interval
    lower = f"{low:.1f}" if low else f"below {least}"
    upper = f"{high:.1f}" if high < np.inf else f"above {most}"
    return f"{name} recalls half of {curve.half:.1f} pairs (95 %: {lower} … {upper})."


def _describe_spread(curve: CapacityCurve) -> str:
    if curve.half is None or curve.spread <= APART:
        return ""
    return (
        f" Its runs with as many pairs differ by up to {curve.spread:.2f}: some did not learn, "
        "which lowers the curve, whatever the state could hold."
    )
