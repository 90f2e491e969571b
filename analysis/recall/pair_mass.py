"""How much of their mass queries put on the pair they ask for, and values on their key."""

import html
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Words
from analysis.links import IN_PLACE, Offsets
from analysis.matrices.layer_matrix import SHOWS
from analysis.plots.lines import name_lines
from analysis.plots.style import MUTED, make_whiskers, new_figure
from analysis.words import name_head, name_layers, name_place, percent

LINES = 32
"""Maximum number of lines of the figure; with more heads, each layer shows its highest."""
QUANTITIES = ("query → value", "query → key", "value → key")


@dataclass(frozen=True)
class PairMass(Finding):
    """Where queries look and what values gather: shares of Σ_j |M_ij|, means over pairs.

    Attributes:
        layers: block of each head [n].
        heads: its number in the block [n].
        mixers: its mixer's class, n of them.
        share: mean share in [0, 1] of query → value, query → key and value → key, one row per head.
        interval: 95 % by resampling the rows of the batch, low and high; NaN for a single row.
        chance: what rows of equal entries would give: mean 1/(q + 1), 1/(q + 1), 1/(v + 1).
        rows: how many rows of the batch were read.
        without: layers whose mixer offers no matrix.
        offsets: how far after a value it is found, where a convolution moved it.
    """

    layers: Int[np.ndarray, " n"]
    heads: Int[np.ndarray, " n"]
    mixers: tuple[str, ...]
    share: Float[np.ndarray, "n 3"]
    interval: Float[np.ndarray, "n 3 2"]
    chance: Float[np.ndarray, " 3"]
    rows: int
    without: tuple[int, ...]
    offsets: Offsets = IN_PLACE

    def describe(self) -> Words:
        """Name the heads with the largest shares, and say whether any of them stands out."""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        title = f"Mass from queries and values to their pair, means over {rows}"
        best = [self._name_highest(i) for i in range(3)]
        shows = [
            self.interval[:, i, 0].max() >= chance + SHOWS * (1 - chance)
            for i, chance in enumerate(self.chance)
        ]
        opening = "Heads look at their pair" if any(shows) else "No head clearly looks at its pair"
        reader, writer = (int(self.layers[self.share[:, i].argmax()]) for i in (0, 2))
        value = name_place(self.offsets.get(reader)[0], "the value they ask for")
        written = self.offsets.get(writer)[1]
        write = f"value rows put {best[2]} on their key"
        if written:
            # A uniform row has less there than at the value, so chance is left out.
            most = f"{percent(float(self.share[:, 2].max()))} (layer {writer})"
            write = f"{name_place(written, 'a value')} puts {most} on its key"
        says = (
            f"{opening}: at most, query rows put {best[0]} of their mass on {value} "
            f"and {best[1]} on its key; {write}."
        )
        reading = (
            "A dot is a head's mean share of Σ_j |M_ij|, the bar its 95 % interval over rows. The "
            "grey upright tick is what a uniform row would give."
        )
        reading += self.offsets.explain()
        if self.without:
            reading += f" The mixers of {name_layers(self.without)} offer no matrix."
        gist = f"Queries put up to {best[0]} of their mass on {value}."
        gist = gist if shows[0] else ""
        alt = f"Dots, a line for each of {len(self.heads)} heads, of three shares of mass. {says}"
        return Words(title, says, reading, alt, gist=gist)

    def _name_highest(self, quantity: int) -> str:
        """Return the largest share of a quantity, its head, and chance."""
        i = int(self.share[:, quantity].argmax())
        share, chance = (
            percent(float(s)) for s in (self.share[i, quantity], self.chance[quantity])
        )
        return f"{share} ({self._name(i)}; uniform: {chance})"

    def _name(self, i: int) -> str:
        """Name a head: by its layer alone if that has no other head."""
        alone = (self.layers == self.layers[i]).sum() == 1
        return f"layer {self.layers[i]}" if alone else name_head(self.layers[i], self.heads[i])

    def draw(self) -> go.Figure:
        """Draw one line per head, with a dot for each quantity and a tick where chance is."""
        lines = self._group_lines()
        names = [html.escape(self._name(int(line[0]))) for line in lines]
        if len(lines) < len(self.heads):
            names = [f"layer {self.layers[line[0]]}, highest head" for line in lines]
        fig = new_figure(height=130 + max(2, len(lines)) * 54)
        for quantity, symbol in enumerate(("circle", "square", "diamond")):
            best = [int(line[self.share[line, quantity].argmax()]) for line in lines]
            share, ends = self.share[best, quantity], self.interval[best, quantity]
            height = np.arange(len(lines)) + 0.24 * (quantity - 1)
            fig.add_scatter(
                x=share,
                y=height,
                mode="markers",
                marker={"symbol": symbol, "size": 9},
                error_x=make_whiskers(share, ends, width=4),
                cliponaxis=False,
                name=QUANTITIES[quantity],
                customdata=names,
                hovertemplate=f"%{{customdata}}, {QUANTITIES[quantity]}: %{{x:.2%}}<extra></extra>",
            )
            fig.add_scatter(
                x=np.full(len(lines), self.chance[quantity]),
                y=height,
                mode="markers",
                marker={
                    "symbol": "line-ns-open",
                    "size": 13,
                    "color": MUTED,
                    "line": {"width": 2},
                },
                cliponaxis=False,
                name="a uniform row",
                showlegend=quantity == 0,
                legendrank=2000,
                hovertemplate=f"uniform, {QUANTITIES[quantity]}: %{{x:.2%}}<extra></extra>",
            )
        fig.update_xaxes(
            title_text="share of the row's mass", tickformat=".0%", range=[-0.02, 1.02]
        )
        name_lines(fig, names)
        return fig.update_layout(margin_t=84)

    def _group_lines(self) -> list[Int[np.ndarray, " heads"]]:
        """Return the heads of each line: one head, or all of a layer where there are many."""
        if len(self.heads) <= LINES:
            return [np.array([i]) for i in range(len(self.heads))]
        return [np.flatnonzero(self.layers == layer) for layer in np.unique(self.layers)]
