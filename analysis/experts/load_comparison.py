"""How far the choice of experts is from random: a few shares of every layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int

from analysis.base import Finding, Words
from analysis.experts.load import Load
from analysis.experts.spread import STANDING
from analysis.plots.lines import name_lines
from analysis.plots.style import BLUE, MUTED, new_figure
from analysis.words import capitalize, percent

ON_STANDING = "load on standing experts"
TIED = "choices decided by a tie"
OVERLAP = "overlap of two heads"
"""Names of shares that the words single out."""
LINES = 6
"""Lines of a share; with more layers they move closer together."""


@dataclass(frozen=True)
class LoadComparison(Finding):
    """A few shares of every layer, next to what they are under uniform random choice.

    Attributes:
        names: of the shares.
        layers: index of each layer's block.
        shares: in [0, 1]; NaN where a layer has no such share.
        uniform: the same under random choice.
        stands_out: whether standing experts hold more of a layer than random choice gives them.
        margins: median margin between the k-th and the next score, in standard deviations of all
            experts' scores; NaN where k is all experts.
    """

    names: tuple[str, ...]
    layers: Int[np.ndarray, " layers"]
    shares: Float[np.ndarray, "names layers"]
    uniform: Float[np.ndarray, "names layers"]
    stands_out: Bool[np.ndarray, " layers"]
    margins: Float[np.ndarray, " layers"]

    def describe(self) -> Words:
        """Say where standing experts, overlapping heads and ties are most frequent."""
        says = f"{self._describe_standing()}; "
        shares, uniform = self._find(OVERLAP)
        if not np.isnan(shares).all():
            layer = int(np.nanargmax(shares))
            says += (
                f"two heads of layer {self.layers[layer]} have {percent(shares[layer])} of their "
                f"experts in common (independent heads: {percent(uniform[layer])}); "
            )
        tied, _ = self._find(TIED)
        layer = int(tied.argmax())
        which = f"{percent(tied[layer])} of layer {self.layers[layer]}'s" if tied[layer] else "no"
        says += f"a tie decides {which} choices."
        if not np.isnan(self.margins).all():
            layer = int(np.nanargmin(self.margins))
            says += (
                f" The last expert chosen leads the next one by {self.margins[layer]:.2g} standard "
                f"deviations of the scores (median, layer {self.layers[layer]})."
            )
        reading = (
            "Filled: measured. Hollow: uniform random choice, independent for each head. A token's "
            "worth of experts are the most loaded ones, as many as one token chooses. Standing "
            f"experts are chosen by at least {round(100 * STANDING)} % of the tokens. Overlap is "
            "|A ∩ B| / |A ∪ B|. A tie is a k-th score that equals the next one up to rounding: the "
            "order of storage decides."
        )
        alt = "Dots of shares next to those of random choice: " + "; ".join(
            f"{name} {_format_shares(self.shares[i])} ({_format_shares(self.uniform[i])})"
            for i, name in enumerate(self.names)
            if not np.isnan(self.shares[i]).all()
        )
        title = "How far the choice of experts is from random, layer by layer"
        return Words(title, capitalize(says), reading, alt + ".")

    def _find(self, name: str) -> tuple[Float[np.ndarray, " layers"], Float[np.ndarray, " layers"]]:
        """Return the share of this name in each layer, and the same under random choice."""
        i = self.names.index(name)
        return self.shares[i], self.uniform[i]

    def _describe_standing(self) -> str:
        standing, uniform = self._find(ON_STANDING)
        if standing.max() == 0:
            return "no layer has standing experts"
        layer = int((standing - uniform + self.stands_out).argmax())
        more = "hold" if self.stands_out[layer] else "hold no more than chance can give,"
        return (
            f"standing experts, each chosen by at least {round(100 * STANDING)} % of the tokens, "
            f"{more} {percent(standing[layer])} of layer {self.layers[layer]}'s choices (random "
            f"choice: {percent(uniform[layer])})"
        )

    def draw(self) -> go.Figure:
        """Draw each share of each layer as a filled dot, and random choice as a hollow one."""
        kept = [i for i in range(len(self.names)) if not np.isnan(self.shares[i]).all()]
        layers = self.layers.tolist()
        # Many layers share the height of a few; then only the first and the last have labels.
        pitch = min(1.0, LINES / len(layers))
        y, ticks, labels, headings, at = [], [], [], [], 0.0
        for i in kept:
            headings.append((at, self.names[i]))
            at += 1
            places = [at + pitch * place for place in range(len(layers))]
            y += places
            ends = places if pitch == 1 else [places[0], places[-1]]
            ticks += ends
            labels += [
                f"layer {layer}" for layer in (layers if pitch == 1 else [layers[0], layers[-1]])
            ]
            at = places[-1] + 1.4
        fig = new_figure(height=round(44 + 40 + 18 * at + 48))
        shares, uniform = (x[kept].ravel() for x in (self.shares, self.uniform))
        lines_x = [x for pair in zip(shares, uniform, strict=True) for x in (*pair, None)]
        lines_y = [x for place in y for x in (place, place, None)]
        fig.add_scatter(
            x=lines_x,
            y=lines_y,
            mode="lines",
            line={"color": MUTED, "width": 1.5},
            showlegend=False,
            hoverinfo="skip",
        )
        for values, name, symbol in (
            (uniform, "random choice", "circle-open"),
            (shares, "measured", "circle"),
        ):
            fig.add_scatter(
                x=values,
                y=y,
                mode="markers",
                name=name,
                marker={
                    "symbol": symbol,
                    "size": 9 if pitch == 1 else 6,
                    "color": MUTED if symbol.endswith("open") else BLUE,
                },
                cliponaxis=False,
                text=[f"layer {layer}" for layer in layers] * len(kept),
                hovertemplate=f"%{{text}}, {name}: %{{x:.2%}}<extra></extra>",
            )
        for place, name in headings:
            fig.add_annotation(
                text=f"<b>{name}</b>", x=0, y=place, xref="x", xanchor="left", yanchor="middle"
            )
        fig.update_xaxes(
            range=[-0.02, 1.02],
            tickformat=".0%",
            title_text="share",
            tickvals=[0, 0.25, 0.5, 0.75, 1],
        )
        name_lines(fig, labels, ticks, showline=False)
        return fig.update_layout(margin_t=84)


def compare_loads(loads: Sequence[Load]) -> LoadComparison:
    """Compare shares of each layer's load with those of random choice."""
    rows = {
        "experts used": [(one.choices.used, one.uniform.used) for one in loads],
        "load on a token's worth of experts": [(one.choices.top, one.uniform.top) for one in loads],
        ON_STANDING: [(one.standing_share, one.standing_uniform) for one in loads],
        "choices repeated by another head": [(one.twice, one.twice_uniform) for one in loads],
        OVERLAP: [(one.overlap, one.overlap_uniform) for one in loads],
        TIED: [(one.tied, 0.0) for one in loads],
    }
    table = np.array(list(rows.values()), dtype=np.float64)
    return LoadComparison(
        names=tuple(rows),
        layers=np.array([one.layer for one in loads]),
        shares=table[..., 0],
        uniform=table[..., 1],
        stands_out=np.array([one.stands_out for one in loads]),
        margins=np.array([one.margin for one in loads]),
    )


def _format_shares(shares: Float[np.ndarray, " layers"]) -> str:
    return ", ".join("–" if math.isnan(share) else percent(float(share)) for share in shares)
