"""How many pairs a state holds: a logistic curve through accuracy against the number of pairs.

The curve is 1 / (1 + (K / K½)^s) for K pairs. Its half point K½ is the number of pairs of which
half are recalled, and s says how sharply accuracy falls there. Intervals resample runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl
from jaxtyping import Float, Int
from scipy.optimize import curve_fit

from analysis.plots.style import new_figure
from lab.palette import BLUE, GREEN, ORANGE, VERMILLION

RESAMPLES, PERCENTILES = 200, (2.5, 97.5)
FEWEST = 4
"""Fewest runs through which a curve is drawn; it has two parameters."""
COLORS = (ORANGE, VERMILLION, BLUE, GREEN)


@dataclass(frozen=True)
class StateCapacity:
    """What one state size recalls, by the number of pairs.

    Attributes:
        d_state: width of the state of each channel.
        pairs: K of each run.
        accuracy: of each run on test rows, in [0, 1].
        half: pairs of which half are recalled, by the fitted curve; None if no curve was fitted.
        sharpness: its exponent s.
        interval: 95 % of `half`; an end beyond the pairs that were tried is infinite, or 0.
    """

    d_state: int
    pairs: Int[np.ndarray, " n"]
    accuracy: Float[np.ndarray, " n"]
    half: float | None = None
    sharpness: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def within(self) -> bool:
        """Whether the half point lies among the numbers of pairs that were tried."""
        return self.half is not None and self.pairs.min() <= self.half <= self.pairs.max()


def measure(table: pl.DataFrame) -> list[StateCapacity]:
    """Return the capacity of each state size of which a run has ended, smallest first."""
    ended = table.filter(pl.col("accuracy").is_not_null()).sort("d_state", "pairs", "seed")
    return [
        _fit_state(int(str(size)), rows["pairs"].to_numpy(), rows["accuracy"].to_numpy())
        for (size,), rows in ended.group_by("d_state", maintain_order=True)
    ]


def _fit_state(
    d_state: int, pairs: Int[np.ndarray, " n"], accuracy: Float[np.ndarray, " n"]
) -> StateCapacity:
    """Fit the curve, and again to resampled runs."""
    if len(pairs) < FEWEST or len(set(pairs.tolist())) < 3:
        return StateCapacity(d_state, pairs, accuracy)
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
    return StateCapacity(d_state, pairs, accuracy, half, sharpness, interval)


def _fit(pairs: Int[np.ndarray, " n"], accuracy: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Return half point and sharpness of the curve of least squares."""
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


def summarize(found: Sequence[StateCapacity], without: int) -> list[str]:
    """Say how many pairs each state holds, and how that grows with the state.

    Args:
        found: as `measure` returns.
        without: how many cells of the study have not ended.
    """
    sentences = [_describe_state(state) for state in found]
    known = [state for state in found if state.within]
    if len(known) > 1:
        first, last = known[0], known[-1]
        assert first.half is not None
        assert last.half is not None
        growth = np.log2(last.half / first.half) / np.log2(last.d_state / first.d_state)
        sentences.append(
            f"From a state of {first.d_state} to one of {last.d_state}, the half point grows as "
            f"the state to the power {growth:.2f}."
        )
    if not found:
        sentences.append("No run has ended yet.")
    if without:
        sentences.append(f"{without} runs have not ended and are left out.")
    return sentences


def _describe_state(state: StateCapacity) -> str:
    name = f"A state of {state.d_state}"
    if state.half is None or state.interval is None:
        return f"{name}: too few runs for a curve."
    least, most = int(state.pairs.min()), int(state.pairs.max())
    if state.half > most:
        return f"{name} recalls more than half of {most} pairs; its half point was not reached."
    if state.half < least:
        return f"{name} recalls less than half of {least} pairs already."
    low, high = state.interval
    lower = f"{low:.1f}" if low else f"below {least}"
    upper = f"{high:.1f}" if high < np.inf else f"above {most}"
    return f"{name} recalls half of {state.half:.1f} pairs (95 %: {lower} … {upper})."


def draw(found: Sequence[StateCapacity]) -> go.Figure:
    """Draw accuracy against pairs: a circle for each run, and each state's fitted curve."""
    fig = new_figure(height=380)
    for state, color in zip(found, COLORS * len(found), strict=False):
        name = f"state of {state.d_state}"
        fig.add_scatter(
            x=state.pairs,
            y=state.accuracy,
            mode="markers",
            marker={"symbol": "circle-open", "color": color, "size": 8},
            name=name,
            legendgroup=name,
            showlegend=state.half is None,
            hovertemplate=f"{name}, %{{x}} pairs: %{{y:.1%}}<extra></extra>",
        )
        if state.half is not None and state.sharpness is not None:
            log_pairs = np.linspace(np.log2(state.pairs.min()), np.log2(state.pairs.max()), 60)
            fig.add_scatter(
                x=np.exp2(log_pairs),
                y=compute_curve(log_pairs, np.log2(state.half), state.sharpness),
                mode="lines",
                line={"color": color},
                name=name,
                legendgroup=name,
                hoverinfo="skip",
            )
    tried = sorted({int(k) for state in found for k in state.pairs})
    fig.update_xaxes(title_text="stored pairs K", type="log", tickvals=tried, ticktext=tried)
    return fig.update_yaxes(title_text="test accuracy", range=[-0.04, 1.06], tickformat=".0%")
