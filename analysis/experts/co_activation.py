"""Are experts chosen together more often than by chance? The PMI of all pairs."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.base import Finding, Words
from analysis.experts.layer_pairs import PAIRS, SHUFFLES, LayerPairs, measure_pairs
from analysis.experts.pairs import EDGES, PairedChoices
from analysis.plots import style

FEWEST_PAIRS = 2**16
"""Co-occurrences that each layer counts, however many layers there are."""
SLIGHT = 0.01
"""Excess of the mean PMI that is negligible, nats: pairs meet 1 % more often."""
VISIBLE = 0.01
"""Height of a bin, relative to the highest, from which on the axis includes it."""


@dataclass(frozen=True)
class CoActivation(Finding):
    """Which experts are chosen by the same token, in every layer.

    Attributes:
        layers: one entry for each layer with experts.
    """

    layers: tuple[LayerPairs, ...]

    @property
    def chance(self) -> float:
        """The largest excess of any layer in any shuffle, nats; NaN without pairs."""
        nulls = [layer.null for layer in self.layers if layer.distinct]
        return max((float(null.max() - null.mean()) for null in nulls), default=math.nan)

    def describe(self) -> Words:
        """Say where experts are chosen together, and which pairs most."""
        title = "Experts chosen by the same token · PMI of all pairs"
        layers = [layer for layer in self.layers if layer.distinct]
        if not layers:
            says = "No token chooses two different experts: there are no pairs."
            return Words(title, says, "", says)
        says = self._summarize(layers)
        details = " ".join(layer.describe() for layer in _find_strongest(layers))
        reading = (
            "Each time one token chooses two experts, their PMI is counted once: the log of "
            "how many times more often the two meet than independent experts with their loads. "
            f"Dotted: each choice is taken from another token id, {SHUFFLES} times; rare pairs "
            f"are above 0 there, too. {details}"
        )
        alt = f"Histograms of PMI, one for each layer, over those of shuffled choices. {says}"
        return Words(title, says, reading, alt)

    def _summarize(self, layers: list[LayerPairs]) -> str:
        """Say in which layers the mean PMI is beyond chance."""
        # Differences by rounding are not beyond chance.
        least = max(self.chance + 1e-9, SLIGHT)
        beyond = [layer for layer in layers if layer.excess > least]
        if not beyond:
            where = f"in {len(layers)} layers" if len(layers) > 1 else f"in layer {layers[0].layer}"
            values = " and ".join(
                f"{layer.mean_pmi:.3f} (shuffled: at most {layer.null.max():.3f})"
                for layer in _find_strongest(layers)
            )
            return (
                f"No pair of experts is seen to act together {where}: the mean PMI is {values} "
                "nats."
            )
        strongest = max(beyond, key=lambda layer: layer.excess)
        says = (
            f"Experts are chosen together in layer {strongest.layer}: over all co-occurrences the "
            f"mean PMI is {strongest.mean_pmi:.2f} nats, {math.exp(strongest.mean_pmi):.1f} times "
            f"independence ({_describe_references(strongest)})"
        )
        others = [layer for layer in layers if layer is not strongest]
        if len(others) == 1:
            [other] = others
            says += f"; in layer {other.layer} it is {other.mean_pmi:.2f} ("
            says += f"{_describe_references(other)})"
        elif others:
            says += (
                f"; it is beyond the shuffles of all layers also in {len(beyond) - 1} of "
                f"{len(others)} other layers"
            )
        return f"{says}."

    def draw(self) -> go.Figure | None:
        """Draw a histogram of PMI for each layer, over that of shuffled choices."""
        layers = [layer for layer in self.layers if layer.distinct]
        if not layers:
            return None
        heights = np.stack(
            [part for layer in layers for part in (layer.heights, layer.null_heights)]
        )
        filled = np.flatnonzero((heights >= VISIBLE * heights.max()).any(0))
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


def measure_co_activation(
    found: list[PairedChoices],
    rng: np.random.Generator,
    initial: list[PairedChoices] | None = None,
) -> CoActivation:
    """Measure which experts are chosen by the same token, layer by layer.

    Args:
        found: the choices of every layer.
        rng: draws the tokens that are counted, and shuffles.
        initial: the choices before training, if known.
    """
    budget = max(FEWEST_PAIRS, PAIRS // len(found))
    before = initial or [None] * len(found)
    return CoActivation(
        tuple(
            measure_pairs(layer, rng, budget, untrained)
            for layer, untrained in zip(found, before, strict=True)
        )
    )


def _describe_references(layer: LayerPairs) -> str:
    """Return the values to compare a layer's mean PMI with."""
    before = "" if layer.initial is None else f"; before training: {layer.initial:.2f}"
    return f"shuffled: {layer.null.max():.2f}{before}"


def _find_strongest(layers: list[LayerPairs]) -> list[LayerPairs]:
    """Return the two layers furthest beyond chance, in their order."""
    two = sorted(layers, key=lambda layer: -layer.excess)[:2]
    return sorted(two, key=lambda layer: layer.layer)
