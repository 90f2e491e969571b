"""Where in the row the masks keep keys."""

import html
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.dynamic_mask.masks import BANDS, MaskedHead
from analysis.dynamic_mask.positions import pick_most
from analysis.plain import figure_only
from analysis.plots.panels import new_panels, note_panels, pick_smallest, title_lowest_axes
from analysis.plots.style import SEQUENTIAL
from analysis.words import capitalize, percent, percents


@dataclass(frozen=True)
class KeptByPosition(Finding):
    """Where in the row keys are kept: `kept_by_band` of the heads.

    Attributes:
        role_names: the task's.
        bands: first position of each band, then the row's length.
        heads: as in `KeySelection`, where they are recorded.
    """

    role_names: tuple[str, ...]
    bands: tuple[int, ...]
    heads: tuple[MaskedHead, ...] = figure_only()

    def describe(self) -> Words:
        """Describe where the heads that keep fewest keys keep least and most."""
        heads = pick_most(self.heads, lambda head: 1 - head.kept)
        says = f"{capitalize('; '.join(map(self._describe_head, heads)))}."
        return Words(
            title="Share of keys kept, by role and band of positions",
            says=says,
            reading="The share of a role's keys in a band of positions that are kept, over all "
            f"later queries; empty where no key has the role.{note_panels(len(self.heads))}",
            alt=f"Heat maps of the kept share by role and band. {says}",
        )

    def _describe_head(self, head: MaskedHead) -> str:
        low, high = (
            np.unravel_index(place, head.kept_by_band.shape)
            for place in (np.nanargmin(head.kept_by_band), np.nanargmax(head.kept_by_band))
        )
        least, most = (
            f"{percent(float(head.kept_by_band[role, band]))} ({self.role_names[role]} at "
            f"{self.bands[band]}–{self.bands[band + 1] - 1})"
            for role, band in (low, high)
        )
        lowest, highest = (float(end(head.kept_by_band)) for end in (np.nanmin, np.nanmax))
        if len(set(percents(lowest, highest))) == 1:
            return f"{head.name} keeps {percent(highest)} of the keys everywhere"
        return f"{head.name} keeps between {least} and {most}"

    def draw(self) -> go.Figure:
        """Draw the kept share by role and band of positions, a panel per head."""
        heads = [self.heads[i] for i in pick_smallest([head.kept for head in self.heads])]
        labels = [html.escape(name) for name in self.role_names]
        height = 34 * len(labels) + 40
        fig, places = new_panels([head.name for head in heads], height, legend=False, foot=122)
        spans = [
            f"{first}–{after - 1}" if after - 1 > first else f"{first}"
            for first, after in pairwise(self.bands)
        ]
        for head, (row, column) in zip(heads, places, strict=True):
            fig.add_heatmap(
                z=head.kept_by_band.astype(np.float32),
                x=list(range(len(spans))),
                y=labels,
                customdata=[spans] * len(labels),
                coloraxis="coloraxis",
                xgap=1,
                ygap=1,
                hoverongaps=False,
                hovertemplate="%{y} at %{customdata}: %{z:.1%} kept<extra></extra>",
                row=row,
                col=column,
            )
        fig.update_xaxes(showgrid=False, ticks="", tickangle=-45)
        fig.update_xaxes(tickvals=list(range(len(spans))), ticktext=spans)
        fig.update_yaxes(showgrid=False, ticks="", autorange="reversed")
        fig.update_yaxes(automargin="left", col=1)
        fig.update_yaxes(showticklabels=False, col=2)
        title_lowest_axes(fig, places, "position of the key, tokens")
        return fig.update_layout(
            coloraxis={
                "colorscale": SEQUENTIAL,
                "cmin": 0,
                "cmax": 1,
                "colorbar": {"nticks": 6, "tickformat": ".0%"},
            }
        )


def split_bands(seq_len: int) -> tuple[int, ...]:
    """Return the first position of each band of positions, then the length."""
    return tuple(-(-band * seq_len // BANDS) for band in range(BANDS + 1))
