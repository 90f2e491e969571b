"""How wide each SSD head's effective context is by position."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Words
from analysis.plots.heads import NAMED, add_head_lines, choose_log_ticks, name_heads
from analysis.plots.style import MUTED, new_figure
from analysis.state_space.recurrence import HELD
from analysis.words import read_alike


@dataclass(frozen=True)
class Contexts(Finding):
    """How wide each head's effective context is by position.

    Attributes:
        layers, heads, rows: as in `analysis.state_space.memory.StateMemory`.
        positions: i, about powers of √2 less one, and the last.
        context_at: effective context there, tokens in [1, i + 1]: mean over rows.
        uniform_at: of a uniform causal matrix.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    positions: Int[np.ndarray, " i"]
    context_at: Float[np.ndarray, "h i"]
    uniform_at: Float[np.ndarray, " i"]
    rows: int

    def describe(self) -> Words:
        """Name the narrowest and the widest context at the last position."""
        names, last = name_heads(self.layers, self.heads), self.context_at[:, -1]
        short, long = int(last.argmin()), int(last.argmax())
        says = f"At the last position, {self.positions[-1]:,}, {100 * HELD:.0f} % of a row's "
        says += "magnitudes lie in "
        if read_alike(last[short], last[long]):
            says += f"the latest {last[0]:.3g} tokens{', in every head' * (len(names) > 1)}"
        else:
            says += (
                f"the latest {last[short]:.3g} (head {names[short]}) to {last[long]:.3g} tokens "
            )
            says += f"(head {names[long]})"
        says += f", compared with {self.uniform_at[-1]:.3g} for a uniform matrix."
        reading = (
            f"Effective context by position, mean over {self.rows} rows of the batch. A head whose "
            "line levels off has a window of its own. A head that follows the dotted line, a "
            "uniform matrix, looks back over the whole row."
        )
        if len(names) > NAMED:
            reading += " The heads of narrowest and widest context at the end are named."
        alt = f"Lines of effective context by position, {len(names)} heads. {says}"
        return Words("Effective context of the SSD heads by position", says, reading, alt)

    def draw(self) -> go.Figure:
        """Draw effective context by position, one line per head, on logarithmic axes."""
        fig = new_figure(height=380)
        places = self.positions + 1
        names = name_heads(self.layers, self.heads)
        last = self.context_at[:, -1]
        add_head_lines(
            fig,
            names,
            [places] * len(names),
            list(self.context_at),
            [int(last.argmin()), int(last.argmax())],
            "row of %{x} tokens: %{y:.3g}",
        )
        fig.add_scatter(
            x=places,
            y=self.uniform_at,
            mode="lines",
            line={"color": MUTED, "width": 1.5, "dash": "dot"},
            name="uniform",
            hovertemplate="uniform: %{y:.3g}<extra></extra>",
        )
        end = float(max(2, places[-1]))
        ticks = choose_log_ticks(1.0, end)
        for update in (fig.update_xaxes, fig.update_yaxes):
            update(
                type="log",
                range=[-0.05, np.log10(1.15 * end)],
                tickvals=list(ticks),
                ticktext=list(ticks.values()),
            )
        fig.update_xaxes(title_text="tokens up to the position, i + 1")
        fig.update_yaxes(title_text="effective context, tokens")
        return fig.update_layout(margin_t=96)
