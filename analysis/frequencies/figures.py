"""Figures of the atlas of rotary frequencies."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots

from analysis.frequencies.atlas import ANSWERS, FEWEST, Curves, Spectrum, Use, half_life
from analysis.frequencies.bands import Bands
from analysis.plots import style

ROW = 18
"""Height of a row of a heat map, px."""
DOUBLINGS = 3
"""Where the colours of energies end: eight times a uniform share, or an eighth."""
COLOR = dict(zip(ANSWERS, (style.GREEN, style.ORANGE), strict=True))
SYMBOL = dict(zip(ANSWERS, ("circle", "diamond"), strict=True))
"""Colour and mark of the curves of answer edges."""


def energies(layers: Sequence[Spectrum], seq_len: int) -> go.Figure:
    """Draw the spectra, a row a comparison, wavelength to the right."""
    rows = sum(len(layer.share) for layer in layers)
    fig = style.new_figure(height=_height(rows))
    labels: list[str] = []
    for layer in layers:
        ratio = layer.share * layer.share.shape[1]
        first = len(labels)
        labels += _labels(layer, len(ratio))
        fig.add_heatmap(
            x=edges_of(layer.wavelengths),
            y0=first,
            dy=1,
            z=np.log2(np.maximum(ratio, 2.0**-10)).astype(np.float32),
            text=_hover(layer, [f"{z:.2f} × uniform" for z in ratio.ravel()]),
            coloraxis="coloraxis",
            hovertemplate="%{text}<extra></extra>",
        )
    ticks = list(range(-DOUBLINGS, DOUBLINGS + 1))
    fig.update_layout(
        coloraxis={
            "cmin": -DOUBLINGS,
            "cmax": DOUBLINGS,
            "colorbar": {
                "tickvals": ticks,
                "ticktext": ["⅛", "¼", "½", "1", "2", "4", "8"],
            },
        },
    )
    _axes(fig, layers, seq_len, [labels], "share, as a multiple of a uniform spectrum's")
    return fig.update_layout(margin={"l": 84, "t": 78, "b": 126})


def uses(layers: Sequence[Use], seq_len: int) -> go.Figure:
    """Draw what answer edges get from each frequency, a panel a kind, a row a comparison."""
    kinds = list(dict.fromkeys(layer.edge for layer in layers))
    heights = [sum(len(u.effect) for u in layers if u.edge == kind) for kind in kinds]
    gap = 56
    plot = sum(ROW * max(2, rows) for rows in heights) + gap * (len(kinds) - 1)
    fig = make_subplots(
        rows=len(kinds),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=gap / plot,
        row_heights=[float(max(2, rows)) for rows in heights],
        figure=style.new_figure(height=78 + plot + 126),
    )
    spread = {id(u): u.advantage / np.where(u.effect == 0, 1, u.effect) for u in layers}
    parts = [u.by_pair / np.where(spread[id(u)] == 0, 1, spread[id(u)])[:, None] for u in layers]
    bound = float(np.quantile(np.abs(np.concatenate([p.ravel() for p in parts])), 0.995)) or 1.0
    labels: list[list[str]] = [[] for _ in kinds]
    for layer, part in zip(layers, parts, strict=True):
        panel = kinds.index(layer.edge)
        axis = "" if panel == 0 else str(panel + 1)
        first = len(labels[panel])
        labels[panel] += _labels(layer, len(part))
        fig.add_heatmap(
            x=edges_of(layer.wavelengths),
            y0=first,
            dy=1,
            z=part.astype(np.float32),
            text=_hover(layer, [f"{z:+.3f} standard deviations" for z in part.ravel()]),
            coloraxis="coloraxis",
            hovertemplate="%{text}<extra></extra>",
            row=panel + 1,
            col=1,
        )
        for y, effect in enumerate(layer.effect.tolist(), first):
            fig.add_annotation(
                text=f"{effect:+.2f}",
                x=1,
                xref=f"x{axis} domain",
                xanchor="left",
                xshift=4,
                y=y,
                yref=f"y{axis}",
            )
    fig.update_layout(
        coloraxis={
            "cmin": -bound,
            "cmax": bound,
            "colorbar": {"nticks": 7},
        },
    )
    _axes(fig, layers, seq_len, labels, "added to the score, standard deviations")
    for panel, kind in enumerate(kinds):
        axis = "" if panel == 0 else str(panel + 1)
        for text, side, shift in ((f"<b>{kind}</b>", "right", 0), ("sum", "left", 4)):
            fig.add_annotation(
                text=text,
                x=1,
                xref=f"x{axis} domain",
                xanchor=side,
                xshift=shift,
                y=1,
                yref=f"y{axis} domain",
                yanchor="bottom",
                yshift=2,
            )
    return fig.update_layout(margin={"l": 84, "r": 52, "t": 78, "b": 126})


def lags(layers: Sequence[Curves]) -> go.Figure:
    """Draw scores by lag, a panel a layer."""
    across = _across(layers)
    fig, plot = _panels_by_lag(layers, panel=210, gap=50, around=124 + 48)
    units = {"score, logits" if layer.sides == "Q/K" else "score C·B" for layer in layers}
    unit = units.pop() if len(units) == 1 else "score, logits or C·B"
    named: set[str] = set()
    for i, layer in enumerate(layers):
        c, head = layer.telling, layer.slowest
        row, col = i // across + 1, i % across + 1
        lines = {"all pairs": (layer.score[:, c], layer.decayed[:, head], style.MUTED)}
        for name, carried in layer.carried.items():
            lines[name] = (carried[:, c], carried[:, c] * layer.decay[:, head], COLOR[name])
        for name, (score, decayed, color) in lines.items():
            forms = {"": (score, "solid")}
            if layer.sides == "C/B":
                forms[", with decay"] = (decayed, "dash")
            for with_decay, (values, dash) in forms.items():
                # One entry says what dashes are.
                label = "with decay" if with_decay else name
                fig.add_scatter(
                    x=layer.lags,
                    y=values.astype(np.float32),
                    mode="lines+markers" if name in SYMBOL else "lines",
                    marker={"symbol": SYMBOL.get(name), "size": 6, "maxdisplayed": 8},
                    name=label,
                    legendgroup=name,
                    showlegend=label not in named,
                    line={"color": color, "width": 1.8, "dash": dash},
                    hovertemplate=f"lag %{{x}}: %{{y:.3~g}} ({name}{with_decay})<extra></extra>",
                    row=row,
                    col=col,
                )
                named.add(label)
        fig.update_yaxes(title_text=unit if col == 1 else None, row=row, col=col)
        fig.update_yaxes(zeroline=True, zerolinecolor=style.MUTED, row=row, col=col)
    fig.update_annotations(font_size=11)
    return fig.update_layout(margin={"t": 124}, legend={"y": 1 + 22 / plot})


def _across(layers: Sequence[Curves]) -> int:
    """Return how many panels stand side by side."""
    return min(2, len(layers))


def _panels_by_lag(
    layers: Sequence[Curves], *, panel: int, gap: int, around: int
) -> tuple[go.Figure, int]:
    """Return empty panels with an axis of lags, one a layer, and the height they take together.

    Args:
        layers: whose names the panels bear.
        panel: height of one, px.
        gap: between two below each other, px.
        around: what the figure has above and below the panels, px.
    """
    across = _across(layers)
    down = math.ceil(len(layers) / across)
    plot = down * panel + (down - 1) * gap
    fig = make_subplots(
        rows=down,
        cols=across,
        horizontal_spacing=0.13,
        vertical_spacing=gap / plot if down > 1 else 0,
        subplot_titles=[_panel_title(layer) for layer in layers],
        figure=style.new_figure(height=around + plot),
    )
    for i in range(len(layers)):
        fig.update_xaxes(
            type="log",
            title_text="lag, tokens" if i >= len(layers) - across else None,
            tickvals=[4**k for k in range(12)],
            showgrid=False,
            row=i // across + 1,
            col=i % across + 1,
        )
    return fig, plot


def pairs_by_lag(layers: Sequence[Curves]) -> go.Figure | None:
    """Draw what each frequency adds to the score by lag, a panel a layer.

    None where no lag has pairs enough; of one batch all layers have equally many.
    """
    if not all((layer.pairs >= FEWEST).any() for layer in layers):
        return None
    across = _across(layers)
    fig, _ = _panels_by_lag(layers, panel=220, gap=56, around=78 + 126)
    enough = [layer.by_pair[layer.pairs >= FEWEST] for layer in layers]
    bound = float(np.quantile(np.abs(np.concatenate([z.ravel() for z in enough])), 0.995)) or 1.0
    for i, layer in enumerate(layers):
        row, col = i // across + 1, i % across + 1
        shown = layer.pairs >= FEWEST
        fig.add_heatmap(
            x=edges_of(layer.lags[shown].astype(np.float64)),
            y=edges_of(layer.wavelengths),
            z=layer.by_pair[shown].T,
            coloraxis="coloraxis",
            hovertemplate="lag %{x:,.0f}, wavelength %{y:,.0f}: %{z:+.3f}<extra></extra>",
            row=row,
            col=col,
        )
        half = half_life(layer)
        if half is not None:
            # On a logarithmic axis lines stand at logarithms only in annotations.
            axis = "" if i == 0 else str(i + 1)
            fig.add_shape(
                type="line",
                x0=half,
                x1=half,
                y0=0,
                y1=1,
                xref=f"x{axis}",
                yref=f"y{axis} domain",
                line={"color": style.GREEN, "width": 2},
            )
            fig.add_annotation(
                text="decay ½",
                x=math.log10(half),
                xref=f"x{axis}",
                xanchor="left",
                xshift=3,
                y=1,
                yref=f"y{axis} domain",
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
    fig.update_layout(
        coloraxis={"cmin": -bound, "cmax": bound, "colorbar": {"nticks": 7}},
    )
    fig.update_annotations(font_size=11)
    fig.add_annotation(
        text="added to the mean score at the lag, standard deviations",
        x=0.5,
        xref="paper",
        y=0,
        yref="paper",
        yshift=-74,
    )
    return fig.update_layout(margin={"t": 78, "b": 126})


def bands(result: Bands) -> go.Figure:
    """Draw the change of accuracy by band, placebo beside it."""
    shown = result.bands
    rows = [f"{b.layer} · {b.sides} {b.name}" for b in shown]
    fig = style.new_figure(height=92 + 24 * len(rows) + 48)
    fig.add_scatter(
        x=np.concatenate([100 * band.placebo for band in shown]),
        y=np.repeat(rows, [len(band.placebo) for band in shown]),
        mode="markers",
        name="as many at random",
        marker={"symbol": "diamond-open", "size": 7, "color": style.MUTED},
        hovertemplate="%{y}, random pairs: %{x:+.1f} points<extra></extra>",
    )
    change = 100 * np.array([band.change for band in shown])
    ends = 100 * np.array([band.interval for band in shown]).reshape(-1, 2)
    fig.add_scatter(
        x=change,
        y=rows,
        mode="markers",
        name="the band",
        marker={"size": 8, "color": style.VERMILLION},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": ends[:, 1] - change,
            "arrayminus": change - ends[:, 0],
            "thickness": 1.4,
            "width": 4,
        },
        customdata=[_waves(band.wavelengths) for band in shown],
        hovertemplate="%{y}, %{customdata}: %{x:+.1f} points<extra></extra>",
    )
    fig.add_vline(0, line={"color": style.MUTED, "width": 1}, layer="below")
    fig.update_xaxes(title_text="change of accuracy, percentage points")
    fig.update_yaxes(
        categoryorder="array", categoryarray=rows[::-1], showgrid=False, automargin="left", ticks=""
    )
    return fig.update_layout(margin={"t": 92})


def edges_of(wavelengths: Float[np.ndarray, " m"]) -> Float[np.ndarray, " n"]:
    """Return where the cells of wavelengths end, midway on a logarithmic axis."""
    log = np.log(wavelengths)
    step = np.diff(log) if len(log) > 1 else np.ones(1)
    middle = log[:-1] + np.diff(log) / 2
    return np.exp(np.concatenate([[log[0] - step[0] / 2], middle, [log[-1] + step[-1] / 2]]))


def _panel_title(layer: Curves) -> str:
    many = layer.score.shape[1] > 1 or len(layer.groups) > 1
    return f"layer {layer.layer} · {layer.sides}" + (f", head {layer.slowest}" if many else "")


def _labels(layer: Spectrum | Use, count: int) -> list[str]:
    """Name the rows of a layer."""
    place = f"{layer.layer} · {layer.sides}"
    return [place] if count == 1 else [f"{place} {c}" for c in range(count)]


def _hover(layer: Spectrum | Use, values: list[str]) -> list[list[str]]:
    """Return what is said of each cell: [c m] texts."""
    waves = layer.wavelengths.tolist()
    labels = _labels(layer, len(values) // len(waves))
    said = iter(values)
    return [
        [f"layer {label}, wavelength {wave:,.1f} tokens: {next(said)}" for wave in waves]
        for label in labels
    ]


def _axes(
    fig: go.Figure,
    layers: Sequence[Spectrum | Use],
    seq_len: int,
    labels: list[list[str]],
    colors: str,
) -> None:
    """Lay out the axes of heat maps of frequencies, with a mark at the row's length."""
    ends = np.concatenate([edges_of(layer.wavelengths) for layer in layers])
    fig.update_xaxes(
        type="log",
        range=np.log10([ends.min(), ends.max()]).tolist(),
        showgrid=False,
        tickvals=[10**k for k in range(1, 10)],
        tickformat="~s",
    )
    fig.update_yaxes(showgrid=False, ticks="", title_text="layer")
    for panel, names in enumerate(labels):
        axis = "" if panel == 0 else str(panel + 1)
        bottom = panel == len(labels) - 1
        fig.update_layout(
            {
                f"xaxis{axis}": {"title": {"text": "wavelength 2π/θ, tokens" if bottom else None}},
                f"yaxis{axis}": {
                    "range": [len(names) - 0.5, -0.5],
                    "tickvals": list(range(len(names))),
                    "ticktext": names,
                },
            }
        )
        fig.add_shape(
            type="line",
            x0=seq_len,
            x1=seq_len,
            y0=0,
            y1=1,
            xref=f"x{axis}",
            yref=f"y{axis} domain",
            line={"color": style.GREEN, "width": 2},
        )
    fig.add_annotation(text=colors, x=0.5, xref="paper", y=0, yref="paper", yshift=-74)
    fig.add_annotation(
        text=f"row: {seq_len:,} tokens",
        x=math.log10(seq_len),
        xref="x",
        y=1,
        yref="y domain",
        yanchor="bottom",
        yshift=2,
    )


def _height(rows: int) -> int:
    return 78 + ROW * max(3, rows) + 126


def _waves(wavelengths: tuple[float, float]) -> str:
    return f"wavelengths {wavelengths[0]:,.0f} to {wavelengths[1]:,.0f} tokens"
