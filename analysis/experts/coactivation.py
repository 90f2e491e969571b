"""Co-activation: are experts chosen together more than chance has it? The PMI of all pairs."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import Words
from analysis.experts.pairs import EDGES, Choices, Pairs, coalition, count_pairs, shuffled
from analysis.plots import style
from analysis.words import percent

PAIRS = 2**20
"""Most co-occurrences that are counted at once, all layers together."""
FEWEST_PAIRS = 2**16
"""Co-occurrences that a layer counts, however many layers there are."""
SHUFFLES = 19
"""Of all layers: a claim that beats the best of them in any layer is then wrong 1 time in 20."""
TOP = 4
"""Pairs that are named."""
OFTEN = 5
"""Tokens that must have chosen a pair for it to be named."""
SEEN = 0.01
"""Least height of a bin beside the highest that the axis reaches out for."""


@dataclass(frozen=True)
class TopPair:
    """Two experts that are often chosen by the same token, as (row, column) each.

    Attributes:
        first: an expert's place on the grid.
        second: the other's.
        both: tokens that chose both.
        expected: how many would if the two were independent.
        pmi: log(both/expected), nats.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    both: int
    expected: float
    pmi: float


@dataclass(frozen=True)
class LayerPairs:
    """The pairs of experts that a layer's tokens choose together.

    Attributes:
        layer: index of the block.
        tokens: looked at, drawn at random.
        distinct: different pairs that occurred.
        possible: pairs of experts that were chosen at all.
        mean_pmi: over co-occurrences, nats. Independent choices are near log(1 − 1/s), not 0: of a
            token's s choices one that is taken is another's loss. NaN without pairs.
        initial: the same before training; None where no run tells.
        null: the same with choices exchanged among token ids, one a shuffle.
        aligned: share of co-occurrences that have the row key or the column key in common.
        aligned_null: the same, mean of the shuffles.
        coalition: experts of the largest set that is bound together (`coalition`).
        top: the pairs that exceed independence most, by both · pmi.
        heights: share of co-occurrences in each bin of PMI (`EDGES`).
        null_heights: the same, mean of the shuffles.
    """

    layer: int
    tokens: int
    distinct: int
    possible: int
    mean_pmi: float
    initial: float | None
    null: Float[np.ndarray, " shuffles"]
    aligned: float
    aligned_null: float
    coalition: Int[np.ndarray, " members"]
    top: tuple[TopPair, ...]
    heights: Float[np.ndarray, " bins"]
    null_heights: Float[np.ndarray, " bins"]

    @property
    def excess(self) -> float:
        """How far the mean PMI is above that of the shuffles, nats."""
        return self.mean_pmi - float(self.null.mean())


@dataclass(frozen=True)
class CoActivation:
    """Co-activation in every layer.

    Attributes:
        layers: one entry a layer with experts.
    """

    layers: tuple[LayerPairs, ...]

    @property
    def chance(self) -> float:
        """The largest excess that any layer has in any shuffle, nats; NaN without pairs."""
        nulls = [layer.null for layer in self.layers if layer.distinct]
        return max((float(null.max() - null.mean()) for null in nulls), default=math.nan)


def co_activation(
    found: list[Choices], rng: np.random.Generator, initial: list[Choices] | None = None
) -> CoActivation:
    """Return which experts are chosen by the same token, layer by layer.

    Args:
        found: the choices of every layer.
        rng: draws the tokens that are looked at, and shuffles.
        initial: the choices before training, if they are known.
    """
    budget = max(FEWEST_PAIRS, PAIRS // len(found))
    before = initial or [None] * len(found)
    return CoActivation(
        tuple(
            layer_pairs(layer, rng, budget, untrained)
            for layer, untrained in zip(found, before, strict=True)
        )
    )


def layer_pairs(
    found: Choices,
    rng: np.random.Generator,
    budget: int = PAIRS,
    initial: Choices | None = None,
) -> LayerPairs:
    """Return which experts of a layer are chosen by the same token.

    Args:
        found: the layer's choices.
        rng: draws the tokens that are looked at, and shuffles.
        budget: about how many co-occurrences to count.
        initial: the layer's choices before training, if they are known.
    """
    columns = found.shape[1]
    most = budget // max(1, math.comb(found.experts.shape[1], 2))
    chosen = found.sample(most, rng)
    pairs, size = count_pairs(chosen.experts), len(chosen.experts)
    before = None if initial is None else count_pairs(initial.sample(size, rng).experts).mean_pmi
    null, aligned, heights = np.zeros(SHUFFLES), 0.0, np.zeros(len(EDGES) - 1)
    for i in range(SHUFFLES):
        chance = count_pairs(shuffled(chosen, rng))
        null[i] = chance.mean_pmi
        aligned += chance.aligned(columns) / SHUFFLES
        heights += chance.heights() / SHUFFLES
    return LayerPairs(
        layer=found.layer,
        tokens=size,
        distinct=len(pairs.both),
        possible=math.comb(len(np.unique(chosen.experts)), 2),
        mean_pmi=pairs.mean_pmi,
        initial=before,
        null=null,
        aligned=pairs.aligned(columns),
        aligned_null=aligned,
        coalition=coalition(pairs),
        top=_top(pairs, columns),
        heights=pairs.heights(),
        null_heights=heights,
    )


def _top(pairs: Pairs, columns: int) -> tuple[TopPair, ...]:
    often = np.flatnonzero(pairs.both >= OFTEN)
    excess = (pairs.both * pairs.pmi)[often]
    best = often[np.argsort(-excess, kind="stable")[:TOP]]
    expected, pmi = pairs.expected[best], pairs.pmi[best]

    return tuple(
        TopPair(
            first=_place(int(pairs.first[i]), columns),
            second=_place(int(pairs.second[i]), columns),
            both=int(pairs.both[i]),
            expected=float(expected[n]),
            pmi=float(pmi[n]),
        )
        for n, i in enumerate(best)
        if pmi[n] > 0
    )


def _place(expert: int, columns: int) -> tuple[int, int]:
    return expert // columns, expert % columns


def describe(found: CoActivation) -> Words:
    """Put co-activation in words."""
    title = "Experts chosen by the same token · PMI of all pairs"
    layers = [layer for layer in found.layers if layer.distinct]
    if not layers:
        says = "No token chooses two different experts: there are no pairs."
        return Words(title, says, "", says)
    says = _together(layers, found.chance)
    reading = (
        "Each co-occurrence, two experts chosen by one token, counts at its pair's PMI, the log of "
        "how many times more often the two meet than independent experts as loaded would. Dotted: "
        f"token ids exchange each of their choices by itself, {SHUFFLES} times; rare pairs lie "
        f"above 0 there too. {' '.join(_details(layer) for layer in _strongest(layers))}"
    )
    alt = f"Histograms of PMI, one a layer, over what shuffled choices give. {says}"
    return Words(title, says, reading, alt)


def _together(layers: list[LayerPairs], chance: float) -> str:
    """Say where experts are chosen together, beside what chance makes of it."""
    # What differs by rounding alone is not beyond.
    beyond = [layer for layer in layers if layer.excess > chance + 1e-9]
    where = f"in {len(layers)} layers" if len(layers) > 1 else f"in layer {layers[0].layer}"
    if not beyond:
        values = " and ".join(
            f"{layer.mean_pmi:.3f} (shuffled: at most {layer.null.max():.3f})"
            for layer in _strongest(layers)
        )
        return f"No pair of experts is seen to act together {where}: the mean PMI is {values} nats."
    strongest = max(beyond, key=lambda layer: layer.excess)
    says = f"Experts are chosen together in layer {strongest.layer}: over all co-occurrences the "
    says += f"mean PMI is {strongest.mean_pmi:.2f} nats, {math.exp(strongest.mean_pmi):.1f} times "
    says += f"independence ({_beside(strongest)})"
    others = [layer for layer in layers if layer is not strongest]
    if len(others) == 1:
        says += (
            f"; in layer {others[0].layer} it is {others[0].mean_pmi:.2f} ({_beside(others[0])})"
        )
    elif others:
        says += f"; beyond the shuffles of all layers also in {len(beyond) - 1} of "
        says += f"{len(others)} other layers"
    return f"{says}."


def _beside(layer: LayerPairs) -> str:
    """Name what a layer's mean PMI is to be held against."""
    before = "" if layer.initial is None else f"; before training: {layer.initial:.2f}"
    return f"shuffled: {layer.null.max():.2f}{before}"


def _strongest(layers: list[LayerPairs]) -> list[LayerPairs]:
    """Return the two layers furthest beyond chance, in their order."""
    two = sorted(layers, key=lambda layer: -layer.excess)[:2]
    return sorted(two, key=lambda layer: layer.layer)


def _details(layer: LayerPairs) -> str:
    """Name a layer's strongest pairs, and what binds them."""
    says = (
        f"Layer {layer.layer}, {layer.tokens:,} tokens: {layer.distinct:,} of {layer.possible:,} "
    )
    says += (
        f"possible pairs occur; {percent(layer.aligned)} of co-occurrences have a key in common "
    )
    says += f"(shuffled: {percent(layer.aligned_null)})"
    if layer.top:
        pairs = ", ".join(
            f"{pair.first} and {pair.second} {pair.both:,} times for {pair.expected:,.0f} expected"
            for pair in layer.top[:2]
        )
        says += f"; furthest beyond independence, as (row, column): {pairs}"
    if len(layer.coalition):
        says += (
            f"; the largest set that is mostly chosen together has {len(layer.coalition)} experts"
        )
    return f"{says}."


def draw(found: CoActivation) -> go.Figure | None:
    """Draw a histogram of PMI a layer, over that of shuffled choices."""
    layers = [layer for layer in found.layers if layer.distinct]
    if not layers:
        return None
    heights = np.stack([part for layer in layers for part in (layer.heights, layer.null_heights)])
    filled = np.flatnonzero((heights >= SEEN * heights.max()).any(0))
    first, last = max(0, filled[0] - 1), filled[-1] + 2
    high = min(180, max(44, 720 // len(layers)))
    fig = make_subplots(
        rows=len(layers),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.16 / len(layers),
        figure=style.new_figure(84 + high * len(layers) + 48),
    )
    middles = (EDGES[1:] + EDGES[:-1])[first:last] / 2
    for i, layer in enumerate(layers, 1):
        name = f"layer {layer.layer}"
        fig.add_bar(
            x=middles,
            y=layer.heights[first:last],
            marker={"color": style.BLUE, "line": {"width": 0}},
            opacity=0.75,
            name="chosen together",
            legendgroup="chosen",
            showlegend=i == 1,
            hovertemplate=f"{name}, PMI %{{x:.2f}}: %{{y:.2%}}<extra></extra>",
            row=i,
            col=1,
        )
        fig.add_scatter(
            x=middles,
            y=layer.null_heights[first:last],
            mode="lines",
            line={"color": style.VERMILLION, "width": 1.8, "dash": "dot", "shape": "hvh"},
            name="exchanged among token ids",
            legendgroup="shuffled",
            showlegend=i == 1,
            hovertemplate=f"{name}, PMI %{{x:.2f}}: %{{y:.2%}} (shuffled)<extra></extra>",
            row=i,
            col=1,
        )
        fig.add_annotation(
            text=name,
            xref="x domain",
            x=0.99,
            yref=f"y{'' if i == 1 else i} domain",
            y=0.97,
            xanchor="right",
            yanchor="top",
        )
    fig.add_vline(0, line={"color": style.MUTED, "width": 1})
    fig.update_yaxes(tickformat=".0%", rangemode="tozero", nticks=4)
    fig.update_yaxes(title_text="share of co-occurrences", row=(len(layers) + 1) // 2, col=1)
    fig.update_xaxes(range=[EDGES[first], EDGES[last]], showgrid=False)
    fig.update_xaxes(title_text="PMI of the pair, nats", row=len(layers), col=1)
    return fig.update_layout(margin_t=84, bargap=0)
