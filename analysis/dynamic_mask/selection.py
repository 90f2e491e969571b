"""Which keys the masks keep, by role."""

import html
import math
from dataclasses import dataclass

import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.dynamic_mask.masks import LIGHT, MaskedHead, StoredPairs
from analysis.dynamic_mask.positions import pick_most
from analysis.plots.panels import new_panels, note_panels, pick_smallest
from analysis.plots.style import COLORS, MUTED, YELLOW
from analysis.words import capitalize, format_ends, percent, round_percent


@dataclass(frozen=True)
class KeySelection(Finding):
    """Which keys each head keeps, by role."""

    heads: tuple[MaskedHead, ...]
    role_names: tuple[str, ...]

    def describe(self) -> Words:
        """Describe the heads that keep fewest keys."""
        heads = pick_most(self.heads, lambda head: 1 - head.kept)
        says = f"{capitalize('; '.join(map(_describe_head, heads)))}."
        reading = (
            f"A key counts as masked for a query if its weight is below {round_percent(LIGHT)} of "
            "the weight of the most favoured key, or if it is outside the window. Bars: share "
            "kept, over all queries and the keys before them. Diamonds: mean weight relative to "
            "the most favoured key, which a soft mask can lower without masking. Precision, recall "
            "and AUROC (chance 0.5) compare the kept keys with the stored pairs, at the scored "
            "queries; their intervals come from resampling rows and have no width where all rows "
            "are alike."
            f"{note_panels(len(self.heads))}"
        )
        alt = f"Bars of the kept share by role of the key. {says}"
        return Words("Share of keys kept, by role", says, reading, alt)

    def draw(self) -> go.Figure:
        """Draw share kept and mean weight by role, a panel per head, and the share of all keys."""
        heads = [self.heads[i] for i in pick_smallest([head.kept for head in self.heads])]
        fig, places = new_panels([f"{head.name} · {head.reading} mask" for head in heads], 180)
        labels = [html.escape(name) for name in self.role_names]
        for head, (row, column) in zip(heads, places, strict=True):
            panel = {"row": row, "col": column}
            in_legend = head is heads[0]
            fig.add_bar(
                x=labels,
                y=head.kept_by_role,
                marker={"color": [COLORS[i % len(COLORS)] for i in range(len(labels))]},
                text=["" if math.isnan(k) else f"{100 * k:.0f} %" for k in head.kept_by_role],
                textposition="outside",
                cliponaxis=False,
                hovertemplate="%{x}: %{y:.1%}<extra></extra>",
                showlegend=False,
                **panel,
            )
            fig.add_scatter(
                x=labels,
                y=head.weight_by_role,
                mode="markers",
                marker={
                    "symbol": "diamond",
                    "size": 9,
                    "color": YELLOW,
                    "line": {"width": 1, "color": MUTED},
                },
                name="mean weight",
                legendgroup="weight",
                showlegend=in_legend,
                hovertemplate="%{x}, mean weight: %{y:.3g}<extra></extra>",
                **panel,
            )
            fig.add_scatter(
                x=labels,
                y=[head.kept] * len(labels),
                mode="lines",
                line={"color": MUTED, "width": 1.5, "dash": "dash"},
                name="share kept of all keys",
                legendgroup="overall",
                showlegend=in_legend,
                hovertemplate="of all keys: %{y:.1%}<extra></extra>",
                **panel,
            )
        fig.update_yaxes(range=[0, 1.2], tickvals=[0, 0.5, 1], tickformat=".0%")
        fig.update_yaxes(title_text="share kept", col=1)
        fig.update_xaxes(showgrid=False, tickangle=0)
        return fig.update_layout(bargap=0.35)


def _describe_head(head: MaskedHead) -> str:
    """Describe what a head keeps, and how well that agrees with the stored pairs."""
    text = f"{head.name} keeps {percent(head.kept)} of the keys"
    return text if head.pairs is None else text + _describe_pairs(head.pairs, head.kept < 1)


def _describe_pairs(pairs: StoredPairs, masks_any: bool) -> str:
    """Describe how well kept keys and biases agree with the stored pairs."""
    text = ""
    if masks_any:
        text = (
            f", and {percent(pairs.recall.value)} of the stored ones (chance "
            f"{percent(pairs.recall.chance)}); {percent(pairs.precision.value)} of the keys that "
            f"it keeps are stored (chance {percent(pairs.precision.chance)})"
        )
    ranking = pairs.auroc
    text += f"; the AUROC of its bias is {ranking.value:.3f} "
    text += format_ends(ranking.low, ranking.high, "{:.3f}".format)
    return text + (", no better than chance" if ranking.low <= 0.5 <= ranking.high else "")
