"""What is left of recall after an edit of one mixer."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Words
from analysis.links import IN_PLACE, Offsets
from analysis.mechanism.shares import format_share
from analysis.plots.lines import name_lines
from analysis.plots.style import MUTED, make_whiskers, new_figure
from analysis.words import capitalize, name_place, percent

ARMS = ("query → value", "value → key", "values exchanged")
"""The edits: two kinds of edges to block, and an exchange of values."""


@dataclass(frozen=True)
class Edited(Finding):
    """What is left of the margin on the clean rows after an edit of one layer's mixer.

        left = Σ (edited − corrupt) / Σ (clean − corrupt)  of the margin, over queries

    At 1 the edit has no effect; at ½ the model cannot tell the two values apart; at 0 it answers
    the other value.

    Arms: block the edges from the couples' queries to their values; block those from the values to
    their keys; exchange the two values of a couple. Placebos: block an edge to a random earlier
    position that is neither key nor value of the couple; exchange two random positions that belong
    to no couple.

    Attributes:
        layers: blocks whose mixer has a matrix [n].
        left: one row per arm, in the order of `ARMS`.
        interval: 95 % interval of `left` by resampling rows, low and high.
        placebo: like `left`, for the placebos.
        placebo_interval: like `interval`, for the placebos.
        followed: share of answers that become the other value when the two are exchanged [n].
        placebo_followed: likewise, when two random positions are exchanged.
        rows: number of rows measured.
        offsets: how far after a value it is blocked or exchanged, where a convolution moved it.
    """

    layers: Int[np.ndarray, " n"]
    left: Float[np.ndarray, "3 n"]
    interval: Float[np.ndarray, "3 n 2"]
    placebo: Float[np.ndarray, "3 n"]
    placebo_interval: Float[np.ndarray, "3 n 2"]
    followed: Float[np.ndarray, " n"]
    placebo_followed: Float[np.ndarray, " n"]
    rows: int
    offsets: Offsets = IN_PLACE

    def describe(self) -> Words:
        """Say in which layer each edit surely leaves less of the margin than its placebo."""
        title = f"What is left of recall when a mixer is edited, {self.rows} rows"
        parts = []
        for arm in range(2):
            # The layer with the least was chosen afterwards: it is named if its interval ends
            # below its placebo's.
            sure = self.interval[arm, :, 1] < self.placebo_interval[arm, :, 0]
            i = int(np.where(sure | ~sure.any(), self.left[arm], np.inf).argmin())
            share, placebo = self.left[arm, i], self.placebo[arm, i]
            edge = self._name_edge(arm, int(self.layers[i]))
            left = f"{format_share(share)} of the margin (placebo {format_share(placebo)})"
            parts.append(
                f"blocking {edge} surely leaves less than the placebo in layer "
                f"{self.layers[i]}, {left}"
                if sure.any()
                else f"in no layer does blocking {edge} surely leave less than the placebo: "
                f"at least {left}"
            )
        i = int(self.followed.argmax())
        followed, placebo = (
            percent(float(shares[i])) for shares in (self.followed, self.placebo_followed)
        )
        parts.append(
            f"exchanging {name_place(self.offsets.get(int(self.layers[i]))[0], 'two values')} "
            f"moves {followed} of answers with them in layer "
            f"{self.layers[i]} (placebo {placebo})"
        )
        says = f"{'. '.join(map(capitalize, parts))}."
        reading = (
            "At 1 the edit has no effect; at ½ the model cannot tell the two values apart; at 0 it "
            "answers the other value. Crosses are placebos: an edge to a random earlier position, "
            "or two exchanged positions that belong to no pair. Bars are 95 % intervals over rows."
        )
        reading += self.offsets.explain()
        return Words(title, says, reading, f"Dots of what is left, by layer and edit. {says}")

    def _name_edge(self, arm: int, layer: int) -> str:
        """Name the edge that an arm blocks in a layer."""
        offset = self.offsets.get(layer)[arm]
        return ARMS[arm].replace("value", name_place(offset, "the value") if offset else "value")

    def draw(self) -> go.Figure:
        """Draw one line per layer, with a dot for each edit and a cross for its placebo."""
        fig = new_figure(height=150 + 60 * max(2, len(self.layers)))
        for arm, symbol in enumerate(("circle", "square", "diamond")):
            height = np.arange(len(self.layers)) + 0.26 * (arm - 1)
            fig.add_scatter(
                x=self.left[arm],
                y=height,
                mode="markers",
                marker={"symbol": symbol, "size": 9},
                error_x=make_whiskers(self.left[arm], self.interval[arm], 1.2, 4),
                name=ARMS[arm] if arm == 2 else f"{ARMS[arm]} blocked",
                hovertemplate=f"{ARMS[arm]}: %{{x:.2f}} left<extra></extra>",
            )
            fig.add_scatter(
                x=self.placebo[arm],
                y=height,
                mode="markers",
                marker={"symbol": "x-thin-open", "size": 8, "color": MUTED, "line_width": 1.5},
                error_x={
                    **make_whiskers(self.placebo[arm], self.placebo_interval[arm], 1.2, 4),
                    "color": MUTED,
                },
                name="placebo",
                showlegend=arm == 0,
                legendrank=2000,
                hovertemplate=f"placebo of {ARMS[arm]}: %{{x:.2f}} left<extra></extra>",
            )
        fig.update_xaxes(title_text="what is left, share of the margin")
        name_lines(fig, [f"layer {layer}" for layer in self.layers])
        return fig.update_layout(margin_t=96)
