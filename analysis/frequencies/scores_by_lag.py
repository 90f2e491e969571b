"""Mean scores by lag, of all pairs of tokens and of the edges that recall can use."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.frequencies.comparisons import format_range, join_parts, name_comparison
from analysis.frequencies.edges import ANSWERS
from analysis.frequencies.lag_curves import FEWEST, PREFERS, TOO_FEW, LagCurves, new_lag_panels
from analysis.plots.style import GREEN, MUTED, ORANGE
from analysis.words import capitalize

COLOR = dict(zip(ANSWERS, (GREEN, ORANGE), strict=True))
SYMBOL = dict(zip(ANSWERS, ("circle", "diamond"), strict=True))
"""Colours and marks of the curves of answer edges."""


@dataclass(frozen=True)
class ScoresByLag(Finding):
    """How scores depend on the lag, in all rotary mixers.

    Attributes:
        layers: curves by layer.
        seq_len: tokens per row.
    """

    layers: tuple[LagCurves, ...]
    seq_len: int

    def describe(self) -> Words:
        """Describe the lags that stand out, and how far decay reaches."""
        parts = []
        for layer in self.layers:
            at, c = np.unravel_index(int(layer.height.argmax()), layer.height.shape)
            rise = float(layer.rise[at, c])
            if not np.isfinite(layer.height[at, c]) or abs(rise) < PREFERS:
                continue
            place = name_comparison(layer.layer, layer.sides, int(c), layer.rise.shape[1])
            parts.append(
                f"the mean score of {place} at lag {layer.lags[at]:,} is {rise:+.1f} standard "
                "deviations from its average"
            )
        none = "no layer's mean score prefers a lag"
        if not any((layer.pairs >= FEWEST).any() for layer in self.layers):
            none = TOO_FEW
        says = capitalize(join_parts(parts) or none) + "."
        fading = [layer for layer in self.layers if layer.sides == "C/B"]
        halves = [layer.half_life for layer in fading if layer.half_life is not None]
        if fading:
            says += f" Decay halves the scores within the row in {len(halves)} of {len(fading)} "
            says += "C/B layers" + (f", by lag {format_range(halves)}." if halves else ".")
        title = "Score by lag, mean over all pairs of tokens, decay on top"
        reading = (
            "Grey: the mean over all pairs of tokens at a lag. Coloured: the mean score of answer "
            "edges if their queries and keys stood at another lag, where only the rotation "
            "differs. Dashed: the same with the decay exp Σa. Scores are logits of attention "
            "before any mask, or inner products C·B. Of several heads, the one whose score depends "
            "most on the lag is drawn."
        )
        return Words(title, says, reading, f"Lines of {title.lower()}, a panel per layer. {says}")

    def draw(self) -> go.Figure:
        """Draw scores by lag, a panel per layer."""
        fig, places, height = new_lag_panels(self.layers, panel=210, gap=50, around=124 + 48)
        units = {"score, logits" if layer.sides == "Q/K" else "score C·B" for layer in self.layers}
        unit = units.pop() if len(units) == 1 else "score, logits or C·B"
        in_legend: set[str] = set()
        for layer, (row, col) in zip(self.layers, places, strict=True):
            c, head = layer.telling, layer.slowest
            lines = {"all pairs": (layer.score[:, c], layer.decayed[:, head], MUTED)}
            for name, carried in layer.carried.items():
                lines[name] = (carried[:, c], carried[:, c] * layer.decay[:, head], COLOR[name])
            for name, (score, decayed, color) in lines.items():
                forms = {"": (score, "solid")}
                if layer.sides == "C/B":
                    forms[", with decay"] = (decayed, "dash")
                for suffix, (values, dash) in forms.items():
                    # One entry tells what dashes mean.
                    label = "with decay" if suffix else name
                    fig.add_scatter(
                        x=layer.lags,
                        y=values.astype(np.float32),
                        mode="lines+markers" if name in SYMBOL else "lines",
                        marker={"symbol": SYMBOL.get(name), "size": 6, "maxdisplayed": 8},
                        name=label,
                        legendgroup=name,
                        showlegend=label not in in_legend,
                        line={"color": color, "width": 1.8, "dash": dash},
                        hovertemplate=f"lag %{{x}}: %{{y:.3~g}} ({name}{suffix})<extra></extra>",
                        row=row,
                        col=col,
                    )
                    in_legend.add(label)
            fig.update_yaxes(title_text=unit if col == 1 else None, row=row, col=col)
            fig.update_yaxes(zeroline=True, zerolinecolor=MUTED, row=row, col=col)
        fig.update_annotations(font_size=11)
        return fig.update_layout(margin={"t": 124}, legend={"y": 1 + 22 / height})
