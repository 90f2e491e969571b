"""The load of every layer's experts by rank, and how a layer looks among others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.experts.load import Load
from analysis.plots.style import BLUE, GREEN, MUTED, PURPLE, VERMILLION, new_figure
from analysis.statistics.estimates import thin
from analysis.words import name_layers, percent

FACES = (
    (BLUE, "circle"),
    (VERMILLION, "square"),
    (GREEN, "diamond"),
    (PURPLE, "triangle-up"),
)
"""Colours that stand out on light and on dark pages, with their symbols."""


class Face(NamedTuple):
    """How a layer looks among others."""

    color: str
    symbol: str | None


@dataclass(frozen=True)
class LoadByRank(Finding):
    """The load of every layer's experts, by rank.

    Attributes:
        layers: those that choose among experts.
    """

    layers: tuple[Load, ...]

    def describe(self) -> Words:
        """Say how evenly experts are used in the least and in the most even layer."""
        loads = self.layers
        worst, best = (pick(loads, key=lambda one: one.evenness) for pick in (min, max))
        says = (
            f"Layer {worst.layer} uses its {worst.n_experts:,} experts as evenly as "
            f"{format_count(worst.choices.effective)} equal ones (random choice: "
            f"{format_count(worst.uniform.effective)}): {percent(worst.choices.used)} are chosen "
            f"at all ({percent(worst.uniform.used)}), and {worst.choices.covering[1]:,.0f} hold "
            f"90 % of the choices ({format_count(worst.uniform.covering[1])})"
        )
        if best is not worst:
            says += (
                f"; the most even of {len(loads)} layers, layer {best.layer}, uses its experts "
                f"like {format_count(best.choices.effective)} of {best.n_experts:,}"
            )
        collapsed = [one for one in loads if one.collapsed]
        if collapsed:
            first = collapsed[0]
            says = (
                f"Collapsed: in {name_layers([one.layer for one in collapsed])} nearly every token "
                f"chooses the same experts ({first.standing} of them hold "
                f"{percent(first.standing_share)} of layer {first.layer}'s choices). {says}"
            )
        reading = (
            "Each layer's experts in order of load; 1 is the mean load. A curve ends at the last "
            "expert that any token chose. Solid: every choice counts alike. Dotted: choices count "
            "by |w|, the factor of the expert's output. Grey band: 95 % of loads if each head and "
            "token chose k distinct experts uniformly at random."
        )
        alt = "Lines of load by rank: " + "; ".join(
            f"layer {one.layer}, effective {format_count(one.choices.effective)} of "
            f"{one.n_experts:,}, Gini {one.choices.gini:.2f} (random {one.uniform.gini:.2f})"
            for one in loads
        )
        return Words("Load of the experts by rank, over all tokens", says + ".", reading, alt + ".")

    def draw(self) -> go.Figure:
        """Draw load by rank on logarithmic axes, over the band of random choice."""
        fig = new_figure(height=420)
        looks = assign_faces([one.layer for one in self.layers])
        seen: list[float] = []
        bands = {}
        for one in self.layers:
            bands.setdefault((one.n_experts, one.n_heads, one.k, one.tokens), one.ranked)
        for band in bands.values():
            inside = band.high > 0
            low = np.maximum(band.low[inside], band.high[inside] * 1e-3)
            ranks = band.ranks[inside]
            seen += [float(band.low[band.low > 0].min(initial=1.0)), float(band.high.max())]
            fig.add_scatter(
                x=np.concatenate([ranks, ranks[::-1]]),
                y=np.concatenate([band.high[inside], low[::-1]]).astype(np.float32),
                fill="toself",
                mode="lines",
                line={"color": MUTED, "width": 1},
                fillcolor="rgba(128,134,145,0.35)",
                name="random choice",
                legendgroup="random choice",
                showlegend=band is next(iter(bands.values())),
                hoverinfo="skip",
            )
        for one in self.layers:
            face, ranked = looks[one.layer], one.ranked
            for values, dash in ((ranked.choices, "solid"), (ranked.weighted, "dot")):
                if face.symbol is None and dash == "dot":
                    continue
                used = values > 0
                seen += values[used].tolist()
                solid = dash == "solid"
                fig.add_scatter(
                    x=ranked.ranks[used],
                    y=values[used].astype(np.float32),
                    mode="lines+markers" if solid and face.symbol else "lines",
                    line={"color": face.color, "width": 2 if face.symbol else 1, "dash": dash},
                    marker={"symbol": face.symbol, "size": 7, "maxdisplayed": 8},
                    opacity=1 if face.symbol else 0.6,
                    name=f"layer {one.layer}" if solid else "by |w|",
                    legendgroup=f"layer {one.layer}" if solid else "by |w|",
                    showlegend=solid and face.symbol is not None,
                    hovertemplate=f"layer {one.layer}, rank %{{x:,}}: %{{y:.3g}} × mean"
                    "<extra></extra>",
                )
        # One legend entry for all dotted lines, in the colour of no layer.
        fig.add_scatter(
            x=[None],
            y=[None],
            mode="lines",
            line={"color": MUTED, "width": 2, "dash": "dot"},
            name="by |w|",
            legendgroup="by |w|",
        )
        most = max(one.n_experts for one in self.layers)
        low, high = np.log10([min(seen), max(seen)])
        fig.update_xaxes(
            type="log",
            range=[-0.03, math.log10(most) + 0.03],
            dtick=1 if most > 50 else "D2",
            tickformat=",",
            title_text="rank of the expert by load",
        )
        fig.update_yaxes(
            type="log",
            range=[max(low, -3) - 0.1, high + 0.1],
            tickformat="~g",
            dtick="D2" if high - max(low, -3) < 1.5 else 1,
            title_text="load, multiples of the mean",
        )
        return fig.update_layout(margin_t=104 if len(self.layers) > 2 else 84)


def assign_faces(layers: Sequence[int]) -> dict[int, Face]:
    """Assign colours and symbols to at most four of the layers; the others become thin and grey."""
    chosen = set(thin(layers, len(FACES)))
    looks = iter(FACES)
    return {layer: Face(*next(looks)) if layer in chosen else Face(MUTED, None) for layer in layers}


def format_count(count: float) -> str:
    """Return an effective number as text, with one decimal below ten."""
    return f"{count:,.1f}" if count < 9.95 and count != round(count) else f"{count:,.0f}"
