"""Which rotary frequencies make the score stand out at which lag."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.frequencies.axes import (
    BOTTOM,
    TOP,
    add_color_title,
    add_line,
    find_cell_edges,
    name_axis,
)
from analysis.frequencies.comparisons import format_range, join_parts, name_comparison
from analysis.frequencies.lag_curves import FEWEST, PREFERS, TOO_FEW, LagCurves, new_lag_panels
from analysis.plain import figure_only
from analysis.words import capitalize


@dataclass(frozen=True)
class Peak:
    """The lag at which a layer's most telling comparison stands out, and by which frequencies.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        comparison: index of the layer's comparison.
        lag: tokens.
        rise: the mean score there above its average, standard deviations of the scores.
        wavelengths: shortest and longest of the frequencies that together add half of the rise,
            the fewest that do, tokens.
        count: number of those frequencies.
        of: number of all frequencies.
    """

    layer: int
    sides: str
    comparison: int
    lag: int
    rise: float
    wavelengths: tuple[float, float]
    count: int
    of: int


@dataclass(frozen=True)
class FrequenciesByLag(Finding):
    """What each frequency adds to the score by lag, in all rotary mixers.

    Attributes:
        layers: curves by layer; the comparison `telling` of each is shown.
        peaks: for each layer that prefers a lag, that lag and the frequencies behind it.
    """

    layers: tuple[LagCurves, ...] = figure_only()
    peaks: tuple[Peak, ...] = ()

    def describe(self) -> Words:
        """Describe the frequencies behind each preferred lag."""
        counts = {layer.layer: layer.rise.shape[1] for layer in self.layers}
        parts = []
        for peak in self.peaks:
            place = name_comparison(peak.layer, peak.sides, peak.comparison, counts[peak.layer])
            parts.append(
                f"{place} at lag {peak.lag:,} ({peak.rise:+.1f} standard deviations): half of that "
                f"comes from {peak.count} of {peak.of} frequencies, wavelengths "
                f"{format_range([round(w) for w in peak.wavelengths])}"
            )
        none = "no layer's mean score prefers a lag, so there are no frequencies behind one"
        if not any((layer.pairs >= FEWEST).any() for layer in self.layers):
            none = TOO_FEW
        says = capitalize(join_parts(parts) or none) + "."
        reading = (
            "A cell is what a pair of channels adds to the mean score at a lag, less what it adds "
            "on average, in standard deviations of the scores. The sum of a column says how far "
            f"the lag stands out. Lags of fewer than {FEWEST} pairs of tokens are left out. Of "
            "several heads, the one whose score depends most on the lag is drawn."
        )
        if any(layer.sides == "C/B" for layer in self.layers):
            reading += " C/B is shown before decay, which leaves less than half right of the green"
            reading += " line."
        return Words(
            title="What each rotary frequency adds to the score, by lag",
            says=says,
            reading=reading,
            alt=f"Heat maps, a panel per layer. {says}",
        )

    def draw(self) -> go.Figure | None:
        """Draw what each frequency adds to the score by lag, a panel per layer.

        None where no lag has enough pairs; all layers of a batch have equally many.
        """
        if not all((layer.pairs >= FEWEST).any() for layer in self.layers):
            return None
        fig, places, _ = new_lag_panels(self.layers, panel=220, gap=56, around=TOP + BOTTOM)
        cells = [layer.by_pair[layer.pairs >= FEWEST] for layer in self.layers]
        sizes = np.abs(np.concatenate([z.ravel() for z in cells]))
        bound = float(np.quantile(sizes, 0.995)) or 1.0
        for i, (layer, (row, col)) in enumerate(zip(self.layers, places, strict=True)):
            fig.add_heatmap(
                x=find_cell_edges(layer.lags[layer.pairs >= FEWEST].astype(np.float64)),
                y=find_cell_edges(layer.wavelengths),
                z=cells[i].T,
                coloraxis="coloraxis",
                hovertemplate="lag %{x:,.0f}, wavelength %{y:,.0f}: %{z:+.3f}<extra></extra>",
                row=row,
                col=col,
            )
            if layer.half_life is not None:
                add_line(fig, i, layer.half_life)
                # On a logarithmic axis, annotations stand at logarithms; lines do not.
                fig.add_annotation(
                    text="decay ½",
                    x=math.log10(layer.half_life),
                    xref=f"x{name_axis(i)}",
                    xanchor="left",
                    xshift=3,
                    y=1,
                    yref=f"y{name_axis(i)} domain",
                    yanchor="top",
                )
            fig.update_yaxes(
                type="log",
                title_text="wavelength 2π/θ, tokens" if col == 1 else None,
                tickvals=[10**k for k in range(1, 10)],
                tickformat="~s",
                showgrid=False,
                row=row,
                col=col,
            )
        fig.update_annotations(font_size=11)
        add_color_title(fig, "added to the mean score at the lag, standard deviations")
        return fig.update_layout(
            coloraxis={"cmin": -bound, "cmax": bound, "colorbar": {"nticks": 7}},
            margin={"t": TOP, "b": BOTTOM},
        )


def find_peak(layer: LagCurves) -> Peak | None:
    """Return where a layer's most telling comparison stands out; None if no lag is preferred."""
    c = layer.telling
    rise, height = layer.rise[:, c], layer.height[:, c]
    at = int(height.argmax())
    if height[at] < PREFERS:
        return None
    added = np.sign(rise[at]) * layer.by_pair[at].astype(np.float64)
    order = np.argsort(-added)
    count = int((added[order].cumsum() < np.abs(rise[at]) / 2).sum()) + 1
    waves = layer.wavelengths[order[:count]]
    return Peak(
        layer=layer.layer,
        sides=layer.sides,
        comparison=c,
        lag=int(layer.lags[at]),
        rise=float(rise[at]),
        wavelengths=(float(waves.min()), float(waves.max())),
        count=count,
        of=len(layer.wavelengths),
    )
