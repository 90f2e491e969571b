"""How the scores of a rotary mixer depend on the lag, and by which frequencies.

Axis letters as in `analysis.frequencies.rotation`.
"""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int

from analysis.base import Finding, Table
from analysis.figures import Axis, Colors, Curves, Line, Map, curves, heat
from analysis.frequencies.rotation import (
    ANSWERS,
    EDGES,
    Edges,
    Rotated,
    RotatedSides,
    average_by_lag,
    measure_score_spread,
    multiply_sides,
    sample_edges,
    score_edges,
)
from analysis.plain import figure_only
from analysis.words import format_range, name_head
from tasks.base import Batch

LAGS = 48
"""Maximum number of lags of a curve, evenly spaced on a logarithmic axis."""
FEWEST = 100
"""Minimum number of pairs at a lag that give their mean to a tenth of a standard deviation."""
PREFERS = 0.5
"""How many standard deviations the mean score at a lag must stand out to be preferred."""
TOO_FEW = f"No lag has the {FEWEST} pairs of tokens that tell whether a score prefers it."
PANEL = 210
"""Height of a panel, px."""


@dataclass(frozen=True)
class LagCurves(Rotated):
    """How the score depends on the lag.

    Attributes:
        groups: the comparison that each head uses.
        pairs: number of pairs of tokens of the batch at each lag.
        score: mean over all pairs at the lag; of attention in logits, without a mask's bias.
        decay: mean exp Σ a from source to target; 1 for attention.
        decayed: mean of score times decay.
        average: mean score of a random causal pair.
        spread: standard deviation of the scores of random causal pairs (`measure_score_spread`).
        carried: by kind of edge, the mean score if what the edges join stood at that lag.
        by_pair: what each frequency adds to `rise`.
    """

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
    by_pair: Float[np.ndarray, "l c m"] = figure_only()

    @property
    def told(self) -> Bool[np.ndarray, " l"]:
        """Which lags have enough pairs of tokens."""
        return self.pairs >= FEWEST

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
        return np.where(self.told[:, None], rise, -np.inf)

    @property
    def telling(self) -> int:
        """The comparison whose score depends most on the lag, where a lag has enough pairs."""
        return int(np.ptp(self.rise[self.told] if self.told.any() else self.rise, axis=0).argmax())

    @property
    def slowest(self) -> int:
        """The head of that comparison which decays least."""
        heads = np.flatnonzero(self.groups == self.telling)
        return int(heads[self.decay[:, heads].sum(0).argmax()])

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
    seq_len = sides.q.shape[1]
    lags = np.unique(np.geomspace(1, seq_len - 1, LAGS).round().astype(np.int64))
    parts, decay, decayed = average_by_lag(sides, lags)
    at_random = score_edges(sides, sample_edges(batch, EDGES, rng))
    spread = measure_score_spread(at_random)
    turns = sides.turn(torch.from_numpy(lags).to(sides.q.device))

    def carry(edges: Edges) -> Float[np.ndarray, "l c"]:
        mean = multiply_sides(sides, edges).mean(0)
        return torch.einsum("cm,lm->lc", mean, turns).real.double().cpu().numpy()

    return LagCurves(
        layer=sides.layer,
        sides=sides.sides,
        groups=sides.groups,
        lags=lags,
        pairs=len(sides.q) * (seq_len - lags),
        score=parts.sum(-1),
        decay=decay,
        decayed=decayed,
        average=at_random.sum(-1).mean(0),
        spread=spread,
        carried={name: carry(edges) for name, edges in kinds.items()},
        wavelengths=sides.wavelengths,
        by_pair=((parts - at_random.mean(0)) / spread[:, None]).astype(np.float32),
    )


@dataclass(frozen=True)
class ScoresByLag(Finding):
    """How scores depend on the lag, in all rotary mixers."""

    layers: tuple[LagCurves, ...]

    title = "Score by lag, mean over all pairs of tokens"
    reading = (
        "Grey: the mean over all pairs of tokens at a lag. Coloured: the mean score of answer "
        "edges if their queries and keys stood at another lag: nothing but the rotation changes. "
        "Dotted: the same with the decay exp Σa. Scores are logits of attention before any mask, "
        "or inner products C·B. Of several heads, the one whose score depends most on the lag is "
        f"drawn. A layer prefers a lag at which a mean score is {PREFERS:g} standard deviations or "
        f"more above its average; in C/B also below. Lags of fewer than {FEWEST} pairs of tokens "
        "do not count."
    )

    @property
    def says(self) -> str:
        """How many layers prefer a lag."""
        if not any(layer.told.any() for layer in self.layers):
            return TOO_FEW
        prefer = sum(bool(layer.height.max() >= PREFERS) for layer in self.layers)
        halves = format_range(layer.half_life for layer in self.layers if layer.half_life)
        return (
            f"Layers whose mean score prefers a lag: {prefer} of {len(self.layers)}; lags at which "
            f"decay has halved a layer's scores: {halves}."
        )

    def figure(self) -> go.Figure:
        """Draw scores by lag, a panel per layer."""
        panels, faded = [], " with decay"
        looks = {"all pairs": -1} | {name: i for i, name in enumerate(ANSWERS, 1)}
        for layer in self.layers:
            c, head = layer.telling, layer.slowest
            scores = {"all pairs": layer.score[:, c]}
            scores |= {name: carried[:, c] for name, carried in layer.carried.items()}
            if layer.sides == "C/B":
                scores |= {name + faded: y * layer.decay[:, head] for name, y in scores.items()}
                scores["all pairs" + faded] = layer.decayed[:, head]
            lines = [
                Line(name, layer.lags, y, look=looks[name.removesuffix(faded)])
                for name, y in scores.items()
            ]
            unit = Axis("score, logits or C·B")
            panels.append(Curves(lines, unit, layer.title, {"": 0.0}, height=PANEL))
        fig = curves(panels, Axis("lag, tokens", scale="log"), across=2)
        fig.update_traces(marker_maxdisplayed=8, line_dash="solid")
        fig.update_traces(line_dash="dot", selector=lambda trace: faded in trace.name)
        for name in ANSWERS:  # One entry in the legend tells what dots mean.
            fig.update_traces(showlegend=False, selector={"name": name + faded})
        return fig


@dataclass(frozen=True)
class Peak(Rotated):
    """The lag at which a layer's most telling comparison stands out, and by which frequencies.

    Attributes:
        rise: the mean score there above its average, standard deviations of the scores.
        wavelengths: shortest and longest of the frequencies that together add half of the rise,
            the fewest that do, tokens.
    """

    comparison: int
    lag: int
    rise: float
    wavelengths: tuple[float, float]
    count: int
    of: int


@dataclass(frozen=True)
class FrequenciesByLag(Finding):
    """What each frequency adds to the score by lag, in all rotary mixers.

    Attributes:
        peaks: for each layer that prefers a lag, that lag and the frequencies behind it.
    """

    layers: tuple[LagCurves, ...] = figure_only()
    peaks: tuple[Peak, ...] = ()

    title = "What each rotary frequency adds to the score, by lag"
    reading = (
        "A cell is what a pair of channels adds to the mean score at a lag, less what it adds on "
        "average, in standard deviations of the scores. The sum of a column says how far the lag "
        f"stands out. Lags of fewer than {FEWEST} pairs of tokens are left out. Of several heads, "
        "the one whose score depends most on the lag is drawn. C/B is shown before decay. The "
        "table has the fewest frequencies that together add half of what makes a lag stand out."
    )

    @property
    def says(self) -> str:
        """How many frequencies are behind each preferred lag."""
        if not any(layer.told.any() for layer in self.layers):
            return TOO_FEW
        counts = format_range(peak.count for peak in self.peaks)
        return (
            f"Layers whose mean score prefers a lag: {len(self.peaks)} of {len(self.layers)}; "
            f"fewest frequencies that add half of the preference: {counts}."
        )

    def numbers(self) -> Table | None:
        """Return the frequencies behind each preferred lag."""
        counts = {layer.layer: layer.rise.shape[1] for layer in self.layers}
        rows = [
            (
                peak.name_comparison(peak.comparison, counts[peak.layer]),
                f"{peak.lag:,}",
                f"{peak.rise:+.1f}",
                f"{peak.count} of {peak.of}",
                format_range(peak.wavelengths),
            )
            for peak in self.peaks[:8]
        ]
        columns = ("", "lag", "standard deviations", "half from frequencies", "wavelengths")
        return Table(columns, tuple(rows)) if rows else None

    def figure(self) -> go.Figure | None:
        """Draw what each frequency adds to the score by lag, a panel per layer.

        None where no lag has enough pairs; all layers of a batch have equally many.
        """
        if not self.layers[0].told.any():
            return None
        maps = []
        for layer in self.layers:
            lags, waves = layer.lags[layer.told], layer.wavelengths
            notes = [[f"lag {lag:,}, wavelength {wave:,.0f}" for lag in lags] for wave in waves]
            cells = layer.by_pair[layer.told, layer.telling].T
            maps.append(Map(cells, waves, lags, title=layer.title, notes=notes))
        colors = Colors("added to the mean score, standard deviations")
        x, y = Axis("lag, tokens", scale="log"), Axis("wavelength 2π/θ, tokens", scale="log")
        rows = max(len(one.rows) for one in maps)
        return heat(maps, colors, x, y, across=2, row=PANEL / rows)


def find_peak(layer: LagCurves) -> Peak | None:
    """Return where a layer's most telling comparison stands out; None if no lag is preferred."""
    c = layer.telling
    rise, height = layer.rise[:, c], layer.height[:, c]
    at = int(height.argmax())
    if height[at] < PREFERS:
        return None
    added = np.sign(rise[at]) * layer.by_pair[at, c].astype(np.float64)
    order = np.argsort(-added)
    count = int((added[order].cumsum() < np.abs(rise[at]) / 2).sum()) + 1
    waves = layer.wavelengths[order[:count]]
    return Peak(
        layer=layer.layer,
        sides=layer.sides,
        comparison=c,
        lag=int(layer.lags[at]),
        rise=float(rise[at]),
        wavelengths=(float(waves.min()), float(waves.max())),
        count=count,
        of=len(layer.wavelengths),
    )
