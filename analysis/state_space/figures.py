"""How SSD's states are drawn: heads as dots, contexts as lines, magnitudes as a heat map."""

import numpy as np
import plotly.graph_objects as go

from analysis.plots import heatmaps as pictures
from analysis.plots import style
from analysis.plots.heads import Panel, add_head_lines, choose_log_ticks, draw_dots
from analysis.state_space.results import Contexts, Magnitudes, Memory, Roles


def draw_memory(memory: Memory) -> go.Figure:
    """Draw half-life, effective context and decay's share as dots, a line a head."""
    sources = [memory] if memory.initial is None else [memory, memory.initial]
    panels = []
    half_lives = tuple(
        np.where(np.isinf(source.half_life), np.nan, source.half_life) for source in sources
    )
    if not np.isnan(half_lives).all():
        panels.append(Panel("half-life,\ntokens", half_lives, _decades(*half_lives), log=True))
    contexts = tuple(source.context for source in sources)
    ends = _decades(*contexts, np.array([memory.uniform_context]))
    chance = memory.uniform_context
    panels.append(Panel("context,\ntokens", contexts, ends, chance=chance, log=True))
    shares = tuple(100 * source.decay for source in sources)
    ends = (-5.0, 1.05 * max(100.0, float(np.nanmax(shares))))
    panels.append(Panel("var log|M|\nby decay, %", shares, ends))
    series = ("now", "step 0")[: len(sources)]
    return draw_dots(memory.layers, memory.heads, panels, series, "uniform")


def draw_contexts(contexts: Contexts) -> go.Figure:
    """Draw effective context by position, a line a head, on logarithmic axes."""
    figure = style.new_figure(height=380)
    places = contexts.positions + 1
    heads = zip(contexts.layers, contexts.heads, strict=True)
    labels = [f"{layer}.{head}" for layer, head in heads]
    last = contexts.context_at[:, -1]
    add_head_lines(
        figure,
        labels,
        [places] * len(labels),
        list(contexts.context_at),
        [int(last.argmin()), int(last.argmax())],
        "row of %{x} tokens: %{y:.3g}",
    )
    figure.add_scatter(
        x=places,
        y=contexts.uniform_at,
        mode="lines",
        line={"color": style.MUTED, "width": 1.5, "dash": "dot"},
        name="uniform",
        hovertemplate="uniform: %{y:.3g}<extra></extra>",
    )
    ends = (1.0, float(max(2, places[-1])))
    for axis in (figure.update_xaxes, figure.update_yaxes):
        ticks = choose_log_ticks(*ends)
        axis(
            type="log",
            range=[-0.05, np.log10(1.15 * ends[1])],
            tickvals=list(ticks),
            ticktext=list(ticks.values()),
        )
    figure.update_xaxes(title_text="tokens up to the position, i + 1")
    figure.update_yaxes(title_text="effective context, tokens")
    return figure.update_layout(margin_t=96)


def draw_roles(roles: Roles) -> go.Figure:
    """Draw the four quantities by role as dots, a line a head."""
    titles = ("step\ndt", "forgotten\n1 − e^a", "written\n‖dt·B⊗x‖", "read\n‖h C‖")
    dt, kept, write, read = roles.means
    panels = [
        # Kept is next to 1 in heads that remember, which only 1 − e^a can tell apart.
        Panel(title, tuple(np.where(means > 0, means, np.nan)), _decades(means), log=True)
        for title, means in zip(titles, (dt, 1 - kept, write, read), strict=True)
        if (means > 0).any()
    ]
    return draw_dots(roles.layers, roles.heads, panels, roles.role_names, "")


def _decades(*values: np.ndarray) -> tuple[float, float]:
    """Return ends of a logarithmic axis that has some air on both sides."""
    everything = np.concatenate([np.ravel(v) for v in values])
    seen = everything[np.isfinite(everything) & (everything > 0)]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (1.0, 1.0)
    air = max(1.15, (high / low) ** 0.08)
    return low / air, high * air


def draw_magnitudes(found: Magnitudes) -> go.Figure:
    """Draw a heat map a head, of logarithms."""
    figure = pictures.draw_heatmap(found.shown)
    ticks = np.arange(np.ceil(found.floor), np.floor(found.largest) + 1)
    figure.update_traces(
        hovertemplate="row %{y}, column %{x}: log₁₀|M̃| = %{z:.2f}<extra></extra>",
        selector={"type": "heatmap"},
    )
    return figure.update_layout(
        meta={**figure.to_dict()["layout"]["meta"], "value": "log₁₀|M̃|"},
        coloraxis={
            # By itself plotly would take the diverging scale: logarithms have both signs.
            "autocolorscale": False,
            "colorscale": "cividis",
            "cmin": found.floor,
            "cmax": found.largest,
            "colorbar": {
                "tickvals": ticks.tolist(),
                "ticktext": [f"10<sup>{tick:.0f}</sup>" for tick in ticks],
            },
        },
    )
