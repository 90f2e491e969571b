"""What each rotary frequency adds to the scores of the edges that recall can use."""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots

from analysis.base import Finding, Words
from analysis.frequencies.axes import (
    BOTTOM,
    ROW,
    TOP,
    HeatRows,
    add_heat_rows,
    lay_out_heat_rows,
    name_axis,
)
from analysis.frequencies.comparisons import name_comparison
from analysis.frequencies.edges import Edges, measure_score_spread, sample_placebo, score_edges
from analysis.frequencies.rotation import RotatedSides
from analysis.plots.style import new_figure
from analysis.statistics.intervals import bootstrap_ratio
from analysis.words import capitalize, percent
from lab.intervals import Z95

GAP = 56
"""Height between panels, px."""


@dataclass(frozen=True)
class FrequencyUse:
    """What a kind of edge gets from each frequency, beyond other edges of the same lag.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        edge: its kind, a key of `edges.ANSWERS`.
        count: number of edges measured.
        lag: their median, tokens.
        wavelengths: 2π/θ, tokens.
        advantage: mean score of the edges less that of their placebo.
        best: the comparison with the largest effect of either sign: SSD may read by negatives.
        interval: of the best one's advantage, 95 %, by resampling rows.
        effect: advantage in standard deviations of the placebo's scores.
        by_pair: what each frequency adds to the advantage.
        long: share of the advantage from wavelengths longer than the row; outside 0 … 1 where the
            others pull the other way.
        uniform_long: share of the frequencies whose wavelengths are so long.
    """

    layer: int
    sides: str
    edge: str
    count: int
    lag: float
    wavelengths: Float[np.ndarray, " m"]
    advantage: Float[np.ndarray, " c"]
    best: int
    interval: tuple[float, float]
    effect: Float[np.ndarray, " c"]
    by_pair: Float[np.ndarray, "c m"]
    long: Float[np.ndarray, " c"]
    uniform_long: float

    @property
    def effect_by_pair(self) -> Float[np.ndarray, "c m"]:
        """What each frequency adds, in standard deviations of the placebo's scores."""
        spread = self.advantage / np.where(self.effect == 0, 1, self.effect)
        return self.by_pair / np.where(spread == 0, 1, spread)[:, None]


@dataclass(frozen=True)
class FrequencyUses(Finding):
    """What answer edges get from each frequency, in all rotary mixers.

    Attributes:
        layers: by kind of edge, then by layer.
        seq_len: tokens per row.
    """

    layers: tuple[FrequencyUse, ...]
    seq_len: int

    @property
    def kinds(self) -> dict[str, list[FrequencyUse]]:
        """The layers by kind of edge."""
        kinds: dict[str, list[FrequencyUse]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.edge, []).append(layer)
        return kinds

    def describe(self) -> Words:
        """Describe the layer that each kind of edge gets most from."""
        title = "What answer edges get from each rotary frequency"
        parts = []
        for edge, uses in self.kinds.items():
            top = max(uses, key=lambda use: abs(float(use.effect[use.best])))
            best, (low, high) = top.best, top.interval
            # The largest was chosen among all comparisons (Bonferroni's bound).
            tried = sum(len(use.advantage) for use in uses)
            widening = NormalDist().inv_cdf(1 - 0.025 / tried) / Z95
            value = float(top.advantage[best])
            half = value - low if value > 0 else high - value
            if not abs(value) > widening * half or not top.effect[best]:
                parts.append(f"{edge}: no layer's scores surely stand out")
                continue
            place = name_comparison(top.layer, top.sides, best, len(top.advantage))
            parts.append(
                f"{edge}: most in {place}, {top.effect[best]:+.2f} standard deviations; "
                f"wavelengths longer than the row {_describe_share(float(top.long[best]))} "
                f"(they are {percent(top.uniform_long)} of all)"
            )
        says = f"{'. '.join(map(capitalize, parts))}."
        reading = (
            "The colour is what a frequency adds to the mean score of the edges, less what it adds "
            "to random edges of equal lag in the same rows, in standard deviations of the random "
            "edges' scores. The number on the right is the sum over frequencies; a large negative "
            "one counts too, since SSD reads with a sign. A share below 0 or above 100 % means "
            "that the other frequencies pull the other way. The line marks the row's length."
        )
        return Words(title, says, reading, f"Heat map of {title}. {says}")

    def draw(self) -> go.Figure:
        """Draw what each frequency adds, a panel per kind of edge, a row per comparison."""
        kinds = self.kinds
        heights = [max(2, sum(len(use.effect) for use in uses)) for uses in kinds.values()]
        height = ROW * sum(heights) + GAP * (len(kinds) - 1)
        fig = make_subplots(
            rows=len(kinds),
            cols=1,
            shared_xaxes=True,
            vertical_spacing=GAP / height,
            row_heights=[float(rows) for rows in heights],
            figure=new_figure(height=TOP + height + BOTTOM),
        )
        labels = []
        for panel, uses in enumerate(kinds.values()):
            axis = name_axis(panel)
            shown = [
                HeatRows(
                    layer=use.layer,
                    sides=use.sides,
                    wavelengths=use.wavelengths,
                    values=use.effect_by_pair,
                    texts=[f"{z:+.3f} standard deviations" for z in use.effect_by_pair.ravel()],
                )
                for use in uses
            ]
            labels.append(add_heat_rows(fig, panel, shown))
            for y, effect in enumerate(np.concatenate([use.effect for use in uses]).tolist()):
                fig.add_annotation(
                    text=f"{effect:+.2f}",
                    x=1,
                    xref=f"x{axis} domain",
                    xanchor="left",
                    xshift=4,
                    y=y,
                    yref=f"y{axis}",
                )
        cells = np.concatenate([use.effect_by_pair.ravel() for use in self.layers])
        bound = float(np.quantile(np.abs(cells), 0.995)) or 1.0
        fig.update_layout(
            coloraxis={"cmin": -bound, "cmax": bound, "colorbar": {"nticks": 7}},
            margin={"l": 84, "r": 52, "t": TOP, "b": BOTTOM},
        )
        waves = [use.wavelengths for use in self.layers]
        colors = "added to the score, standard deviations"
        lay_out_heat_rows(fig, waves, self.seq_len, labels, colors)
        for panel, kind in enumerate(kinds):
            axis = name_axis(panel)
            for text, side, shift in ((f"<b>{kind}</b>", "right", 0), ("sum", "left", 4)):
                fig.add_annotation(
                    text=text,
                    x=1,
                    xref=f"x{axis} domain",
                    xanchor=side,
                    xshift=shift,
                    y=1,
                    yref=f"y{axis} domain",
                    yanchor="bottom",
                    yshift=2,
                )
        return fig


def _describe_share(share: float) -> str:
    """Say what share of a sum some of its terms are; terms of both signs can exceed the sum."""
    if share < 0:
        return f"count against it ({percent(share)})"
    more = ", more than all since shorter ones lower it," if share > 1 else ""
    return f"carry {percent(share)} of it{more}"


def measure_use(
    sides: RotatedSides, name: str, edges: Edges, rng: np.random.Generator
) -> FrequencyUse:
    """Measure what a kind of edge gets from each frequency."""
    found = score_edges(sides, edges)
    placebo = score_edges(sides, sample_placebo(edges, sides.q.shape[1], rng))
    by_pair = (found - placebo).mean(0)
    advantage = by_pair.sum(-1)
    # A head that scores by position alone gives edges of equal lag equal scores, but for rounding.
    spread = measure_score_spread(placebo)
    best = int(np.abs(advantage / spread).argmax())
    waves = 2 * np.pi / sides.theta
    long = waves > sides.q.shape[1]
    gained = (found - placebo)[:, best].sum(-1)
    # A row's edges are not independent.
    sums, counts = (np.bincount(edges.rows.cpu(), weights) for weights in (gained, None))
    interval = bootstrap_ratio(np.stack([sums, counts], 1)[counts > 0], rng)
    return FrequencyUse(
        layer=sides.layer,
        sides=sides.sides,
        edge=name,
        count=len(edges.rows),
        lag=float(edges.lags.double().median()),
        wavelengths=waves,
        advantage=advantage,
        best=best,
        interval=interval,
        effect=advantage / spread,
        by_pair=by_pair,
        long=np.divide(
            by_pair[:, long].sum(-1),
            advantage,
            out=np.full(len(advantage), np.nan),
            where=advantage != 0,
        ),
        uniform_long=float(long.mean()),
    )
