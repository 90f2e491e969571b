"""How the scores of a rotary mixer depend on the lag between source and target.

Axis letters as in `analysis.frequencies.rotation`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.frequencies.edges import (
    EDGES,
    Edges,
    measure_score_spread,
    multiply_sides,
    sample_edges,
    score_edges,
)
from analysis.frequencies.rotation import RotatedSides, average_by_lag
from analysis.plain import figure_only
from analysis.plots.style import new_figure
from analysis.words import name_head
from tasks.base import Batch

LAGS = 48
"""Maximum number of lags of a curve, evenly spaced on a logarithmic axis."""
FEWEST = 100
"""Minimum number of pairs at a lag that give their mean to a tenth of a standard deviation."""
TOO_FEW = f"no lag has the {FEWEST} pairs of tokens that tell whether a score prefers it"
PREFERS = 0.5
"""How many standard deviations the mean score at a lag must stand out to be preferred."""


@dataclass(frozen=True)
class LagCurves:
    """How the score depends on the lag.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        groups: the comparison that each head uses.
        lags: tokens from the source to the target.
        pairs: number of pairs of tokens of the batch at each lag.
        score: mean over all pairs at the lag; of attention in logits, without a mask's bias.
        decay: mean exp Σ a from source to target; 1 for attention.
        decayed: mean of score times decay.
        average: mean score of a random causal pair.
        spread: standard deviation of the scores of random causal pairs (`measure_score_spread`).
        carried: by kind of edge, the mean score if what the edges join stood at that lag.
        wavelengths: 2π/θ, tokens.
        by_pair: what each frequency adds to `rise`, of the comparison `telling` alone.
    """

    layer: int
    sides: str
    groups: Int[np.ndarray, " h"]
    lags: Int[np.ndarray, " l"]
    pairs: Int[np.ndarray, " l"]
    score: Float[np.ndarray, "l c"]
    decay: Float[np.ndarray, "l h"]
    decayed: Float[np.ndarray, "l h"]
    average: Float[np.ndarray, " c"]
    spread: Float[np.ndarray, " c"]
    carried: dict[str, Float[np.ndarray, "l c"]]
    wavelengths: Float[np.ndarray, " m"]
    by_pair: Float[np.ndarray, "l m"] = figure_only()

    @property
    def telling(self) -> int:
        """The comparison whose score depends most on the lag, where a lag has enough pairs."""
        return find_telling(self.rise, self.pairs)

    @property
    def slowest(self) -> int:
        """The head of that comparison which decays least."""
        heads = np.flatnonzero(self.groups == self.telling)
        return int(heads[self.decay[:, heads].sum(0).argmax()])

    @property
    def rise(self) -> Float[np.ndarray, "l c"]:
        """How far the score stands above the average, in standard deviations of the scores."""
        return (self.score - self.average) / self.spread

    @property
    def height(self) -> Float[np.ndarray, "l c"]:
        """How far the score stands out at each lag; −∞ where a lag has too few pairs.

        A low logit only withholds attention; C·B counts by its size.
        """
        rise = self.rise if self.sides == "Q/K" else np.abs(self.rise)
        return np.where(self.pairs[:, None] >= FEWEST, rise, -np.inf)

    @property
    def half_life(self) -> int | None:
        """The first lag at which the slowest decay of all heads has halved, if any has."""
        halved = (self.decay <= 0.5).all(1)
        return int(self.lags[halved.argmax()]) if halved.any() else None

    @property
    def title(self) -> str:
        """Title of the layer's panel, with the head that is drawn if there are several."""
        many = self.score.shape[1] > 1 or len(self.groups) > 1
        head = f", {name_head(self.layer, self.slowest)}" if many else ""
        return f"layer {self.layer} · {self.sides}{head}"


def measure_lag_curves(
    sides: RotatedSides, kinds: dict[str, Edges], batch: Batch, rng: np.random.Generator
) -> LagCurves:
    """Measure how a mixer's scores depend on the lag; `kinds` are edges to carry to all lags."""
    lags = make_lag_grid(sides.q.shape[1])
    parts, decay, decayed = average_by_lag(sides, lags)
    pairs = len(sides.q) * (sides.q.shape[1] - lags)
    at_random = score_edges(sides, sample_edges(batch, EDGES, rng))
    average, spread = at_random.sum(-1).mean(0), measure_score_spread(at_random)
    rise = (parts - at_random.mean(0)) / spread[:, None]
    turns = sides.turn(torch.from_numpy(lags).to(sides.q.device))

    def carry(edges: Edges) -> Float[np.ndarray, "l c"]:
        mean = multiply_sides(sides, edges).mean(0)
        return torch.einsum("cm,lm->lc", mean, turns).real.double().cpu().numpy()

    return LagCurves(
        layer=sides.layer,
        sides=sides.sides,
        groups=sides.groups,
        lags=lags,
        pairs=pairs,
        score=parts.sum(-1),
        decay=decay,
        decayed=decayed,
        average=average,
        spread=spread,
        carried={name: carry(edges) for name, edges in kinds.items()},
        wavelengths=2 * np.pi / sides.theta,
        by_pair=rise[:, find_telling(rise.sum(-1), pairs)].astype(np.float32),
    )


def find_telling(rise: Float[np.ndarray, "l c"], pairs: Int[np.ndarray, " l"]) -> int:
    """Return the comparison whose score depends most on the lag, where a lag has enough pairs."""
    enough = pairs >= FEWEST
    return int(np.ptp(rise[enough] if enough.any() else rise, axis=0).argmax())


def make_lag_grid(seq_len: int) -> Int[np.ndarray, " l"]:
    """Return lags from 1 to seq_len − 1, dense where they are short."""
    return np.unique(np.geomspace(1, seq_len - 1, LAGS).round().astype(np.int64))


def new_lag_panels(
    layers: Sequence[LagCurves], *, panel: int, gap: int, around: int
) -> tuple[go.Figure, list[tuple[int, int]], int]:
    """Return a figure of empty panels with axes of lags, their places, and their height together.

    Args:
        layers: a panel for each, two side by side.
        panel: height of a panel, px.
        gap: height between two panels, px.
        around: height of the figure above and below the panels, px.
    """
    across = min(2, len(layers))
    down = math.ceil(len(layers) / across)
    height = down * panel + (down - 1) * gap
    fig = make_subplots(
        rows=down,
        cols=across,
        horizontal_spacing=0.13,
        vertical_spacing=gap / height if down > 1 else 0,
        subplot_titles=[layer.title for layer in layers],
        figure=new_figure(height=around + height),
    )
    places = [(i // across + 1, i % across + 1) for i in range(len(layers))]
    for i, (row, col) in enumerate(places):
        fig.update_xaxes(
            type="log",
            title_text="lag, tokens" if i >= len(layers) - across else None,
            tickvals=[4**k for k in range(12)],
            showgrid=False,
            row=row,
            col=col,
        )
    return fig, places, height
