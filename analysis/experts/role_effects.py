"""Which tokens need the experts: deletions at the tokens of one role."""

import html
from dataclasses import dataclass

import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.experts.effects import add_changes
from analysis.experts.layer_knockout import LayerKnockout
from analysis.plots import style
from analysis.plots.lines import name_lines
from analysis.words import join_names

LOOKS = {
    "all experts": ({"color": style.GREEN, "symbol": "square", "size": 9}, True, -0.14),
    "the most loaded": ({"color": style.BLUE, "symbol": "circle", "size": 8}, False, 0.14),
}

NAMED = 3
"""Maximum number of other roles that a sentence names."""


@dataclass(frozen=True)
class RoleEffects(Finding):
    """Which tokens need the experts: `LayerKnockout.by_role` of all layers that were measured.

    Attributes:
        layers: those layers.
    """

    layers: tuple[LayerKnockout, ...]

    def describe(self) -> Words:
        """Say at the tokens of which role deleting all experts raises the loss most."""
        entries = [(layer, entry) for layer in self.layers for entry in layer.by_role]
        layer, worst = max(entries, key=lambda pair: pair[1].everything.loss)
        where = f"{html.escape(worst.role)} tokens in layer {layer.layer}"
        effect = f"deleting all of them there {worst.everything.describe()}"
        if worst.everything.harmful:
            says = f"Experts are needed most at {where}: {effect}."
            others = [pair for pair in entries if pair[1] is not worst]
            # Roles whose effects cannot be told apart are not ranked.
            alike = [
                f"{html.escape(entry.role)} tokens in layer {other.layer}"
                for other, entry in others
                if entry.everything.loss_interval[1] >= worst.everything.loss_interval[0]
            ]
            if alike:
                says = f"Experts are needed at {where}, not surely more than at "
                says += f"{join_names(alike[:NAMED])}: {effect}."
        elif all(entry.everything.negligible for _, entry in entries):
            says = "Experts matter at the tokens of no role"
            says += f"; most at {where}, where {effect}." if worst.everything.loss else "."
        else:
            says = f"No role is seen to need experts; the worst are {where}, where {effect}."
        reading = (
            "Experts are deleted where tokens of one role use them, and kept elsewhere; the change "
            "is over all answers, also those at other tokens. Whiskers are 95 % bootstrap "
            "intervals over rows. One mark is for all experts of the layer together, the other for "
            f"its most loaded one. Layers: {', '.join(str(entry.layer) for entry in self.layers)}."
        )
        alt = f"Dots of the change of loss by layer and role. {says}"
        return Words("Loss without experts at the tokens of one role", says, reading, alt)

    def draw(self) -> go.Figure:
        """Draw the change of loss by layer and role, for all experts and for the most loaded."""
        lines = [(layer, entry) for layer in self.layers for entry in layer.by_role]
        names = [f"layer {layer.layer} · {html.escape(entry.role)}" for layer, entry in lines]
        fig = style.new_figure(84 + 30 * len(lines) + 52)
        fig.add_vline(0, line={"color": style.MUTED, "width": 1}, layer="below")
        for name, (look, everything, shift) in LOOKS.items():
            changes = [entry.everything if everything else entry.one for _, entry in lines]
            notes = [
                f"{label}, {entry.tokens:,} tokens"
                for label, (_, entry) in zip(names, lines, strict=True)
            ]
            add_changes(
                fig,
                [i + shift for i in range(len(lines))],
                changes,
                {"name": name, "marker": look, "customdata": notes},
            )
        name_lines(fig, names)
        fig.update_xaxes(title_text="change of loss over all answers, nats", tickformat="~g")
        return fig.update_layout(margin_t=84)
