"""Which expert holds which answer, in words and drawn; a part of `expert_knockout`."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.base import Words
from analysis.experts.answers_held import HALVED, LEAD, Answers, Holder
from analysis.plots import style
from analysis.words import percent
from lab.intervals import wilson

FLOOR = 1e-4
"""Least effect that the axes reach down to, nats; what is below lies on the edge."""
FULL = 4
"""Experts from which on there is room for the long name of their axis."""
FEW = 0.01
"""Share of the answers that single experts must surely hold: a few may be right by luck."""


def describe(found: Answers) -> Words:
    """Put in words which expert holds which answer."""
    title = f"Layer {found.layer} · {found.kind} · which expert holds which answer"
    count = f"{found.held:,} of {found.asked:,} answers"
    whole = f"without all experts {found.lost:,} are half as likely or less"
    if wilson(found.held / found.asked, found.asked)[0] <= FEW:
        says = (
            f"No single expert matters: one holds {count} in layer {found.layer}; without one "
            f"expert the loss rises by {_nats(found.effect[0])} nats in the median and "
            f"{_nats(found.effect[1])} at the 90 % quantile, and {whole}."
        )
    else:
        first = found.top[0]
        says = (
            f"One expert holds {count} ({percent(found.held / found.asked)}) in layer "
            f"{found.layer}: without it alone they are half as likely or less, and without the "
            f"runner-up {found.rivals:,} of all are; {whole}. Experts that hold any: "
            f"{found.holders:,}, most of all {first.place} with {first.answers:,}"
        )
        if not np.isnan(found.same):
            says += (
                f"; two held answers that are the same {found.kind_of} have the same expert in "
                f"{percent(found.same)} (any two: {percent(found.any_two)})"
            )
        says += "."
    reading = (
        f"Each dot is an answer, {found.asked:,} drawn from {found.rows} rows. An expert holds it "
        "if it is right, and without that expert in its row the loss rises by log 2 at least, "
        f"{LEAD} times as much as without any other that was tried, and by half of what it rises "
        "without all of the "
        "layer's experts. Experts tried are those with the largest effect to first order; every "
        "effect is of a rerun. Below, the experts that hold most, with the tokens that are the "
        "answers and how often each."
    )
    held = "; ".join(f"{one.place}: {_tokens(one)}" for one in found.top)
    alt = f"Scatter of the effect of one expert and of the runner-up. {says}"
    return Words(title, says, reading, f"{alt} Answers held: {held}." if held else alt)


def draw(found: Answers) -> go.Figure:
    """Draw each answer's two largest effects, and the experts that hold most answers."""
    bars = [*reversed(found.top)]
    above, below = 300, 24 * len(bars) + 8
    margins = {"t": 84, "b": 48}
    if not bars:
        fig = style.new_figure(above + margins["t"] + margins["b"])
        panel = {}
    else:
        gap = 72
        fig = make_subplots(
            rows=2,
            cols=1,
            row_heights=[above, below],
            vertical_spacing=gap / (above + gap + below),
            figure=style.new_figure(above + gap + below + margins["t"] + margins["b"]),
        )
        panel = {"row": 1, "col": 1}
    top = 1.5 * max(float(found.effects.max()), 2 * HALVED)
    # Below the dashed line the runner-up comes too near, below the dotted one the effect is small.
    for line, name, dash in (
        (([FLOOR, top / LEAD], [LEAD * FLOOR, top]), f"{LEAD} × the runner-up", "dash"),
        (([FLOOR, top], [HALVED, HALVED]), "half as likely", "dot"),
    ):
        fig.add_scatter(
            x=line[0],
            y=line[1],
            mode="lines",
            line={"color": style.MUTED, "width": 1.3, "dash": dash},
            name=name,
            hoverinfo="skip",
            **panel,
        )
    for by_one, name, look in (
        (False, "no one expert", {"color": style.VERMILLION, "symbol": "x-thin-open", "size": 5}),
        (True, "held by one", {"color": style.BLUE, "symbol": "circle", "size": 6}),
    ):
        kept = found.by_one == by_one
        if kept.any():
            fig.add_scatter(
                x=np.maximum(found.seconds[kept], FLOOR).astype(np.float32),
                y=np.maximum(found.effects[kept], FLOOR).astype(np.float32),
                mode="markers",
                marker=look,
                opacity=0.7,
                name=name,
                hovertemplate="%{y:.3g} nats, runner-up %{x:.3g}<extra></extra>",
                **panel,
            )
    axis = {"type": "log", "tickformat": "~g", "dtick": 1}
    ends = [np.log10(FLOOR) - 0.1, np.log10(top)]
    fig.update_xaxes(**axis, range=ends, title_text="loss without the runner-up, rise in nats")
    fig.update_yaxes(**axis, range=ends, title_text="without the expert that matters most")
    if bars:
        fig.add_bar(
            x=[one.answers for one in bars],
            y=[str(one.place) for one in bars],
            orientation="h",
            marker={"color": style.BLUE},
            showlegend=False,
            hovertext=[f"{one.answers} answers, median {one.effect:.2f} nats" for one in bars],
            hoverinfo="text",
            row=2,
            col=1,
        )
        most = bars[-1].answers
        for one in bars:
            fig.add_annotation(
                text=f"{one.answers}: {_tokens(one)}",
                x=one.answers,
                y=str(one.place),
                xshift=4,
                xanchor="left",
                row=2,
                col=1,
            )
        fig.update_xaxes(
            type="linear",
            range=[0, 2.2 * most],
            dtick=max(1, round(most / 2)),
            tickformat=",d",
            title_text="answers held: their tokens",
            row=2,
            col=1,
        )
        fig.update_yaxes(
            type="category",
            range=[-0.6, len(bars) - 0.4],
            dtick=None,
            title_text="expert (row, column)" if len(bars) > FULL else "expert",
            showgrid=False,
            row=2,
            col=1,
        )
    return fig.update_layout(margin={**margins, "l": 74})


def _tokens(one: Holder) -> str:
    """Return an expert's answers as text."""
    named = ", ".join(f"{token} × {times}" for token, times in one.targets)
    return named if one.answers == sum(times for _, times in one.targets) else f"{named}, …"


def _nats(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
