"""The singular values of what an SSD layer carries past a cut of the row."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import Finding, Words
from analysis.plain import figure_only
from analysis.plots.heads import NAMED, add_head_lines, name_heads
from analysis.plots.style import new_figure

LEAST = 1e-8
"""Where the axis of singular values ends at the latest: below is fp32's rounding."""


@dataclass(frozen=True)
class StateSpectrum(Finding):
    """The singular values of what is carried past a cut m, M̃[i ≥ m, j < m], at several cuts.

    Attributes:
        layers, heads, rows: as in `analysis.state_space.memory.StateMemory`.
        splits: m, tokens.
        bound: min(d_state, m, T − m), the largest possible rank.
        rank: numerical rank, at σ_max · max(m, T − m) · ε of fp32; mean over rows.
        effective_rank: exp H(σ / Σσ), mean over rows.
        initial_effective_rank: of the run's initial weights; NaN without a run.
        values: σ / σ_max at the middle split, largest first, geometric mean over rows; NaN beyond
            the number that a head has.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    splits: Int[np.ndarray, " m"]
    bound: Int[np.ndarray, "m h"]
    rank: Float[np.ndarray, "m h"]
    effective_rank: Float[np.ndarray, "m h"]
    initial_effective_rank: Float[np.ndarray, "m h"]
    rows: int
    values: Float[np.ndarray, "h k"] = figure_only()

    @property
    def middle(self) -> int:
        """Index of the middle split."""
        return len(self.splits) // 2

    @property
    def extremes(self) -> tuple[int, int]:
        """The heads of lowest and of highest effective rank at the middle split."""
        effective = self.effective_rank[self.middle]
        if np.isnan(effective).all():
            return 0, 0
        return int(np.nanargmin(effective)), int(np.nanargmax(effective))

    def describe(self) -> Words:
        """Say which effective and numerical ranks the heads have in the middle of a row."""
        m, says = int(self.splits[self.middle]), self._summarize()
        reading = (
            f"Singular values σ of M̃[i ≥ m, j < m] at m = {m}, as shares of the largest, geometric "
            f"mean over {self.rows} rows of the batch: a steep line means that the past is carried "
            "in few directions. At most min(d_state, m, T − m) are not zero. Effective rank is "
            "exp H(σ / Σσ); numerical rank counts σ above σ_max · max(m, T − m) · ε of fp32. The "
            "lower panel shows effective rank by where the row is cut."
        )
        if len(self.layers) > NAMED:
            reading += " The heads of lowest and highest effective rank are named; others are grey."
        title = f"Spectrum of what SSD carries past token {m}"
        return Words(title, says, reading, f"Lines of falling singular values. {says}")

    def _summarize(self) -> str:
        numerical, bound = self.rank[self.middle], self.bound[self.middle]
        cut = f"Across the middle of a row, token {self.splits[self.middle]},"
        idle = int(np.isnan(self.effective_rank[self.middle]).sum())
        if idle == len(numerical):
            return f"{cut} nothing is carried: all entries of the matrix there are 0."
        if len(numerical) == 1:
            return (
                f"{cut} the head's block has effective rank {self._format_rank(0)}; its numerical "
                f"rank is {numerical[0]:.3g}."
            )
        names, (low, high) = name_heads(self.layers, self.heads), self.extremes
        # A mean over rows below the bound is not full in some row.
        full = int((numerical > bound - 1e-6).sum())
        ranks = f"effective ranks go from {self._format_rank(low)} (head {names[low]}) to "
        ranks += f"{self._format_rank(high)} (head {names[high]})"
        if self._format_rank(low) == self._format_rank(high):
            ranks = f"the effective rank of every head is {self._format_rank(low)}"
        if idle:
            ranks += f", without {idle} {'head that carries' if idle == 1 else 'heads that carry'} "
            ranks += "nothing"
        return (
            f"{cut} {ranks}; the numerical rank is full in {full} of {len(numerical)} heads in "
            "every row."
        )

    def _format_rank(self, head: int) -> str:
        """Return an effective rank as text, with its bound and its value at step 0."""
        middle = self.middle
        text = f"{self.effective_rank[middle, head]:.3g} of at most {self.bound[middle, head]}"
        before = self.initial_effective_rank[middle, head]
        return text if np.isnan(before) else f"{text}, {before:.3g} at step 0"

    def draw(self) -> go.Figure:
        """Draw σ / σ_max by index, and effective rank by cut, one line per head."""
        fig = make_subplots(
            rows=2, cols=1, vertical_spacing=0.2, row_heights=[0.6, 0.4], figure=new_figure(560)
        )
        names = name_heads(self.layers, self.heads)
        spectra = [values[~np.isnan(values)] for values in self.values]
        add_head_lines(
            fig,
            names,
            [np.arange(1, len(values) + 1) for values in spectra],
            # Zeros have no place on a logarithmic axis.
            [np.where(values > 0, values, np.nan) for values in spectra],
            self.extremes,
            "σ %{x}: %{y:.2g}",
            row=1,
        )
        add_head_lines(
            fig,
            names,
            [self.splits] * len(names),
            list(self.effective_rank.T),
            self.extremes,
            "cut at %{x}: effective rank %{y:.3g}",
            legend=False,
            row=2,
        )
        visible = self.values[np.isfinite(self.values) & (self.values > LEAST)]
        least = max(LEAST, float(visible.min()) if visible.size else LEAST)
        title = "index of the singular value, from 1"
        fig.update_xaxes(title_text=title, showgrid=False, row=1, col=1)
        ends = [0, int(self.splits[0] + self.splits[-1])]
        fig.update_xaxes(title_text="cut m, tokens", range=ends, row=2, col=1)
        fig.update_yaxes(
            title_text="σ / σ_max",
            type="log",
            range=[np.log10(least) - 0.3, 0.2],
            exponentformat="power",
            dtick=1,
            row=1,
            col=1,
        )
        top = 1.08 * float(np.nanmax(self.effective_rank, initial=1.0))
        fig.update_yaxes(title_text="effective rank", range=[0, top], nticks=5, row=2, col=1)
        return fig.update_layout(margin_t=96)
