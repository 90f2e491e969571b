"""The effects of all edges between heads and MLPs, in words and as a heat map."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from analysis.base import Finding, Words
from analysis.plain import figure_only
from analysis.plots import style


@dataclass(frozen=True)
class EdgeEffects(Finding):
    """How the metric of the clean run changes when one edge carries the corrupt run's tensor.

    An edge leads from a sender, which adds to the residual stream, to a receiver, which reads it.
    Senders: "embed", the heads "L0H1" and the state transforms "M0". Receivers: the queries, keys
    and values of attention heads, "L1H0.k"; other mixers as a whole, "L1"; "M1"; and "logits".

    Attributes:
        senders: their names, in the order of the forward pass.
        receivers: theirs.
        effect: metric with the edge patched − clean metric, or an estimate; NaN where the receiver
            comes before the sender.
        clean: the metric of the clean run.
        corrupt: the metric of the corrupt run.
        method: how the effects were found.
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    effect: Float[np.ndarray, "n m"]
    clean: float
    corrupt: float
    method: str = figure_only()

    def list_strongest(self, count: int = 10) -> list[tuple[str, str, float]]:
        """Return (sender, receiver, effect) of the edges whose effects are largest in size."""
        order = np.argsort(-np.nan_to_num(np.abs(self.effect), nan=-1.0), axis=None)
        order = order[: min(count, int(np.isfinite(self.effect).sum()))]
        places = zip(*np.unravel_index(order, self.effect.shape), strict=True)
        return [(self.senders[i], self.receivers[j], float(self.effect[i, j])) for i, j in places]

    def describe(self) -> Words:
        """Name the strongest edge."""
        edges = int(np.isfinite(self.effect).sum())
        sender, receiver, effect = self.list_strongest(1)[0]
        differ = f"where the two runs differ by {self.corrupt - self.clean:.3g}."
        says = f"None of {edges} edges changes the metric, {differ}"
        if effect:
            others = int((np.abs(self.effect) == abs(effect)).sum()) - 1
            alike = f", as {'do' if others > 1 else 'does'} {others} more" if others else ""
            changes = "is estimated to change" if "estimated" in self.method else "changes"
            says = f"Of {edges} edges, {sender} → {receiver} {changes} the metric most{alike}: by "
            says += f"{effect:.3g}, {differ}"
        reading = (
            "A row for each sender, a column for each receiver: the change of the clean run's "
            f"metric when this edge alone carries the corrupt run's tensor, {self.method}."
        )
        return Words("Effects of edges", says, reading, f"A heat map of edges. {says}")

    def draw(self) -> go.Figure:
        """Draw senders against receivers, the first sender on top."""
        bound = float(np.nanmax(np.abs(self.effect))) or 1.0
        fig = style.new_figure(height=190 + 22 * len(self.senders))
        fig.add_heatmap(
            z=self.effect,
            x=list(self.receivers),
            y=list(self.senders),
            coloraxis="coloraxis",
            hoverongaps=False,
            hovertemplate="%{y} → %{x}: %{z:.3g}<extra></extra>",
        )
        fig.update_xaxes(title_text="receiver", type="category", showgrid=False)
        fig.update_yaxes(title_text="sender", type="category", showgrid=False, autorange="reversed")
        return fig.update_layout(
            title_text=self.describe().title,
            margin={"b": 130},
            coloraxis={"cmin": -bound, "cmax": bound, "colorbar": {"title": {"text": "effect"}}},
        )
