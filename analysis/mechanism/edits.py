"""What editing one mixer leaves of recall."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Words
from analysis.mechanism.shares import format_share, make_bars
from analysis.plots.style import MUTED, new_figure
from analysis.words import capitalize, percent

ARMS = ("query → value", "value → key", "values exchanged")
"""What is done inside a mixer."""


@dataclass(frozen=True)
class Edited(Finding):
    """What is left of the margin on clean rows when one layer's mixer is edited.

        left = Σ (edited − corrupt) / Σ (clean − corrupt)  of the margin, over queries

    1: nothing happened; ½: the two values cannot be told apart; 0: the other value is answered.

    Arms: the edges from the couples' queries to their values blocked; those from values to their
    keys; the two values of a couple exchanged. Placebos: an edge to a random earlier position
    that is neither key nor value of the couple; two random positions of no couple exchanged.

    Attributes:
        layers: blocks whose mixer has a matrix [n].
        left: a row an arm, in the order of `ARMS`.
        interval: 95 % by resampling rows, low and high.
        placebo: likewise, of the placebo.
        placebo_interval: likewise.
        followed: share of answers that become the other value when both are exchanged [n].
        placebo_followed: when two other positions are.
        rows: of the batch.
    """

    layers: Int[np.ndarray, " n"]
    left: Float[np.ndarray, "3 n"]
    interval: Float[np.ndarray, "3 n 2"]
    placebo: Float[np.ndarray, "3 n"]
    placebo_interval: Float[np.ndarray, "3 n 2"]
    followed: Float[np.ndarray, " n"]
    placebo_followed: Float[np.ndarray, " n"]
    rows: int

    def describe(self) -> Words:
        """Say which edit leaves least of the margin, and in which layer."""
        title = f"What is left of recall when a mixer is edited, {self.rows} rows"
        parts = []
        for arm in range(2):
            i = int(self.left[arm].argmin())
            parts.append(
                f"blocking {ARMS[arm]} leaves least in layer {self.layers[i]}, "
                f"{format_share(self.left[arm, i])} of the margin (placebo "
                f"{format_share(self.placebo[arm, i])})"
            )
        i = int(self.followed.argmax())
        followed, placebo = (
            percent(float(shares[i])) for shares in (self.followed, self.placebo_followed)
        )
        parts.append(
            f"exchanging two values moves {followed} of answers with them in layer "
            f"{self.layers[i]} "
            f"(placebo {placebo})"
        )
        says = "; ".join(parts)
        says = f"{capitalize(says)}."
        reading = (
            "1: nothing happened; ½: the two values cannot be told apart; 0: the other value is "
            "answered. Crosses are placebos: a random earlier position in place of value "
            "or key, or "
            "two positions of no pair exchanged. Bars are 95 % over rows."
        )
        return Words(title, says, reading, f"Dots of what is left, by layer and edit. {says}")

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
                error_x=make_bars(self.left[arm], self.interval[arm]),
                name=ARMS[arm] if arm == 2 else f"{ARMS[arm]} blocked",
                hovertemplate=f"{ARMS[arm]}: %{{x:.2f}} left<extra></extra>",
            )
            fig.add_scatter(
                x=self.placebo[arm],
                y=height,
                mode="markers",
                marker={"symbol": "x-thin-open", "size": 8, "color": MUTED, "line_width": 1.5},
                error_x=make_bars(self.placebo[arm], self.placebo_interval[arm]) | {"color": MUTED},
                name="placebo",
                showlegend=arm == 0,
                legendrank=2000,
                hovertemplate=f"placebo of {ARMS[arm]}: %{{x:.2f}} left<extra></extra>",
            )
        fig.update_xaxes(title_text="what is left, share of the margin")
        fig.update_yaxes(
            tickvals=np.arange(len(self.layers)),
            ticktext=[f"layer {layer}" for layer in self.layers],
            range=[len(self.layers) - 0.5, -0.5],
            showgrid=False,
            automargin="left",
        )
        return fig.update_layout(margin_t=96)
