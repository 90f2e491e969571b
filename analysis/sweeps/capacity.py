"""How many pairs a model holds: a logistic curve through accuracy against the number of pairs.

The curve is 1 / (1 + (K / K½)^s) for K pairs. Its half point K½ is the number of pairs of which
half are recalled, and s says how sharply accuracy falls there. Intervals resample runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl
from jaxtyping import Float, Int

from analysis.base import Finding, NotApplicableError, Table
from analysis.figures import Axis, Curves, Line, curves
from analysis.sweeps.settings import RATE, choose_rates, list_factors, name_values, select_results

RESAMPLES, PERCENTILES = 200, (2.5, 97.5)
FEWEST = 4
"""Minimum number of runs through which a curve is drawn; it has two parameters."""
APART = 0.5
"""If accuracies of a setting's runs differ by more, some did not learn what they could hold."""
PAIRS = ("pairs", "n_pairs")
"""Columns that may hold the number of pairs."""
POINTS = 100
"""Points through which a fitted curve is drawn."""


@dataclass(frozen=True)
class CapacityCurve:
    """What one setting recalls, by the number of pairs.

    Attributes:
        size: the value that tells it from other settings, where that is one number; else None.
        pairs: K of each run.
        half: pairs of which half are recalled, by the fitted curve; NaN if no curve was fitted.
        sharpness: its exponent s, likewise.
        interval: 95 % of `half`; an end beyond the pairs that were tried is infinite, or 0.
    """

    name: str
    size: float | None
    pairs: Int[np.ndarray, " n"]
    accuracy: Float[np.ndarray, " n"]
    half: float = math.nan
    sharpness: float = math.nan
    interval: tuple[float, float] = (0.0, math.inf)

    @property
    def within(self) -> bool:
        """Whether the half point lies among the numbers of pairs that were tried."""
        return bool(self.pairs.min() <= self.half <= self.pairs.max())

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
    title = "How many pairs are recalled"
    reading = (
        "A mark is a run; the line is the logistic curve of least squares through the runs of a "
        "setting. Its half point has an interval that resamples runs. Where runs with as many "
        f"pairs differ by more than {APART}, some did not learn, which lowers the curve, whatever "
        "the state could hold."
    )

    @property
    def growth(self) -> float | None:
        """The power of the factor with which the half point grows; None where that is not sure."""
        known = [(curve, curve.size) for curve in self.curves if curve.within and curve.size]
        if len(known) < 2:
            return None
        (first, size), (last, last_size) = known[0], known[-1]
        if first.interval[1] >= last.interval[0] and last.interval[1] >= first.interval[0]:
            return None
        return math.log(last.half / first.half) / math.log(last_size / size)

    @property
    def says(self) -> str:
        """How many half points were reached, and how they grow."""
        reached = sum(curve.within for curve in self.curves)
        found = (
            "Settings whose half point lies among the numbers of pairs that were tried: "
            f"{reached} of {len(self.curves)}"
        )
        if self.growth is None:
            return f"{found}; no change of it is certain."
        return f"{found}; it changes as {self.factor} to the power {self.growth:.2f}."

    def numbers(self) -> Table:
        """Return mean accuracies and the half point of each setting, and how equal runs differ."""
        tried = sorted({int(k) for curve in self.curves for k in curve.pairs})
        rows = []
        for curve in self.curves:
            found = [curve.accuracy[curve.pairs == k] for k in tried]
            means = [f"{shares.mean():.3f}" if len(shares) else "–" for shares in found]
            rows.append((curve.name, *means, *_format_half(curve), f"{curve.spread:.2f}"))
        heads = [f"K {k}" for k in tried]
        return Table(("setting", *heads, "half of", "95 %", "runs differ by"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw accuracy against pairs: a mark for each run, and each setting's fitted curve."""
        lines = []
        for i, curve in enumerate(self.curves):
            if not math.isnan(curve.half):
                pairs = np.geomspace(curve.pairs.min(), curve.pairs.max(), POINTS)
                shares = compute_curve(np.log2(pairs), np.log2(curve.half), curve.sharpness)
                lines.append(Line(curve.name, pairs, shares, look=i))
            lines.append(Line(curve.name, curve.pairs, curve.accuracy, shape="points", look=i))
        tried = {float(k): f"{k:g}" for curve in self.curves for k in curve.pairs}
        x = Axis("stored pairs K", scale="log", ticks=tried)
        return curves([Curves(lines, Axis("test accuracy", "share"))], x)


def _format_half(curve: CapacityCurve) -> tuple[str, str]:
    if math.isnan(curve.half):
        return "too few runs", "–"
    least, most = curve.pairs.min(), curve.pairs.max()
    half, low, high = (
        f"below {least}" if k < least else f"above {most}" if k > most else f"{k:.1f}"
        for k in (curve.half, *curve.interval)
    )
    return half, low if low == high else f"{low} … {high}"


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
    low, high = low if low >= pairs.min() else 0.0, high if high <= pairs.max() else math.inf
    return CapacityCurve(name, size, pairs, accuracy, half, sharpness, (float(low), float(high)))


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
