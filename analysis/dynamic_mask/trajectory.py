"""The values of the masks over training, by position."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Words
from analysis.dynamic_mask.history import MaskHistory
from analysis.dynamic_mask.masks import BANDS, name_key_head
from analysis.dynamic_mask.positions import find_width, sum_neighbours
from analysis.plain import figure_only
from analysis.plots.panels import new_panels, note_panels, pick_smallest, title_lowest_axes
from analysis.plots.style import SEQUENTIAL
from analysis.statistics.estimates import thin
from analysis.words import capitalize, read_alike


@dataclass(frozen=True)
class MaskTrajectory(Finding):
    """The masks' values over training, as in `MaskHistory`, by marks and bands of positions.

    Attributes:
        names: of the heads.
        table: whether the values are entries of a table l, otherwise they are mean biases.
        steps: of the run.
        by_band: mean value in each of `BANDS` equal bands of positions.
        width: positions per cell of the figure.
        values: mean value per cell.
    """

    names: tuple[str, ...]
    table: bool
    steps: Int[np.ndarray, " steps"]
    by_band: Float[np.ndarray, "steps n bands"]
    width: int
    values: Float[np.ndarray, "steps n bins"] = figure_only()

    def describe(self) -> Words:
        """Describe the head whose values move most."""
        quantity = "table l" if self.table else "mean bias"
        title = f"Masks over training: {quantity} by step and position"
        if self.width > 1:
            title += f", means of {self.width} positions"
        says = self._summarize()
        reading = (
            "Each row is a step whose weights the run kept, the first at the bottom. Steps are "
            "closer together around a jump. "
            + ("A literal or straight-through mask hides keys with l < ½." if self.table else "")
            + note_panels(len(self.names))
        )
        return Words(title, says, reading, f"Heat map of {quantity} by training step. {says}")

    def _summarize(self) -> str:
        moved = np.ptp(self.values, axis=0).max(-1)
        i = int(moved.argmax())
        if moved[i] == 0:
            return "No value ever changes."
        of_head = self.values[:, i]
        far = int(np.ptp(of_head, axis=1).argmax())
        ranges = " and ".join(
            f"at step {self.steps[at]:,} its values range from {of_head[at].min():.3g} to "
            f"{of_head[at].max():.3g}"
            for at in dict.fromkeys((far, len(self.steps) - 1))
        )
        bands = self.by_band[-1, i]
        span = f"range from {bands.min():.3g} (band {bands.argmin() + 1}) to {bands.max():.3g} "
        span += f"(band {bands.argmax() + 1})"
        if read_alike(bands.min(), bands.max()):
            span = f"are all {bands.max():.3g}"
        others = int((moved == moved[i]).sum()) - 1
        most = f", as far as {others} more" if others else ""
        return (
            f"{capitalize(self.names[i])} moves most{most}: {ranges}; at the end the means of its "
            f"{len(bands)} equal bands of positions {span}."
        )

    def draw(self) -> go.Figure:
        """Draw the values by position and, upwards, step, a panel per head."""
        shown = pick_smallest((-np.ptp(self.values, axis=(0, 2))).tolist())
        quantity = "l" if self.table else "bias, nats"
        fig, places = new_panels([self.names[i] for i in shown], 220, legend=False, foot=104)
        labels = [f"{step:,}" for step in self.steps]
        ticks = thin(range(len(labels)), 8)
        for i, (row, column) in zip(shown, places, strict=True):
            values = self.values[:, i]
            fig.add_heatmap(
                z=values.astype(np.float32),
                x0=(self.width - 1) / 2,
                dx=self.width,
                y=list(range(len(labels))),
                text=np.broadcast_to(np.array(labels)[:, None], values.shape).tolist()
                if values.size < 20_000
                else None,
                coloraxis="coloraxis",
                hovertemplate=f"step %{{text}}, position %{{x:.0f}}: {quantity} = %{{z:.3g}}"
                "<extra></extra>",
                row=row,
                col=column,
            )
        fig.update_xaxes(showgrid=False)
        fig.update_yaxes(showgrid=False, tickvals=ticks, ticktext=[labels[i] for i in ticks])
        fig.update_yaxes(title_text="training step", title_standoff=2, col=1)
        title_lowest_axes(fig, places, "position of the key, tokens")
        coloraxis = {"colorscale": SEQUENTIAL, "colorbar": {"nticks": 6}}
        return fig.update_layout(coloraxis=coloraxis, margin_l=70)


def extract_trajectories(history: MaskHistory) -> list[MaskTrajectory]:
    """Return the values of the masks that learn a table, and those of the other masks that learn.

    Either is left out if there is no such mask.
    """
    seq_len = history.values.shape[2]
    width = find_width(seq_len)
    counts = sum_neighbours(np.ones(seq_len), width)
    bands = np.arange(seq_len) * BANDS // seq_len
    names = [
        name_key_head(layer, head, n_heads)
        for layer, n_heads in zip(history.layers, history.n_heads, strict=True)
        for head in range(n_heads)
    ]
    in_table = np.repeat(history.tables, history.n_heads)
    learns = np.repeat(~np.isnan(history.gradients[0]), history.n_heads)
    found = []
    for table in (True, False):
        mine = learns & (in_table == table)
        if not mine.any():
            continue
        values = history.values[:, mine]
        by_band = [values[..., bands == band].mean(-1) for band in np.unique(bands)]
        found.append(
            MaskTrajectory(
                names=tuple(name for name, one in zip(names, mine, strict=True) if one),
                table=table,
                steps=history.steps,
                by_band=np.stack(by_band, -1),
                width=width,
                values=sum_neighbours(values, width) / counts,
            )
        )
    return found
