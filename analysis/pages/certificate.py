"""The page of a certificate of `lab certify`: one mark per law, and each law's evidence."""

import html
import math
import textwrap
from pathlib import Path

import plotly.graph_objects as go

from analysis.base import Words
from analysis.pages import export
from analysis.pages.page import fill_template, show_figure
from analysis.plots.style import BLUE, GREEN, MUTED, VERMILLION, add_title, new_figure
from analysis.words import capitalize
from lab.certification import OUTCOMES, SIGNS, Certificate, count_outcomes
from lab.files import write

ROW, REST = 32, 176
"""Height of a law's row, and of everything else, px."""
FAINTEST, STRONGEST = -4.0, 1.0
"""Decades around the bound that the axis always shows."""
MARGIN = 0.05
"""Distance of the outermost ticks (0 and ∞) from the ends of the axis, as a share of it."""
REASON, LINES = 38, 2
"""Characters per line, and lines, of a reason: as many as fit on a phone."""
NAME = 16
"""Characters per line of a law's name, for which the margin has room."""
HOVER = 60
TICKS = 5

MARKS = {
    "holds": {"symbol": "circle", "color": GREEN, "size": 11},
    "fails": {"symbol": "x", "color": VERMILLION, "size": 11},
    "not applicable": {
        "symbol": "circle-open",
        "color": MUTED,
        "size": 10,
        "line": {"width": 2},
    },
    "not decided": {"symbol": "diamond-open", "color": BLUE, "size": 11, "line": {"width": 2}},
}


def describe(certificate: Certificate) -> Words:
    """Put a certificate in words."""
    failing = [law for law in certificate["laws"] if law["verdict"] == "fails"]
    says = f"Of {len(certificate['laws'])} laws {count_outcomes(certificate)}."
    for law in failing:
        says += f" {capitalize(law['law'])} fails: {law['counterexample'] or law['evidence']}."
    return Words(
        title=f"Laws of {certificate['target']}",
        says=says,
        reading=(
            "A mark is the measured number divided by the allowed one, in powers of ten: beyond "
            "the line at 1 a law fails. The left end is 0, the right end is infinite. Hollow marks "
            "have no such number; the text beside them says why."
        ),
        alt=f"One row per law with a mark at measured over allowed. {says}",
    )


def draw(certificate: Certificate) -> go.Figure:
    """Draw a row per law, the first on top: measured over allowed, or why there is no number."""
    laws = certificate["laws"]
    decades = [_count_decades(law) for law in laws]
    finite = [d for d in decades if d is not None and math.isfinite(d)]
    low = math.floor(min([FAINTEST, *finite]))
    high = math.ceil(max([STRONGEST, *finite]))
    room = MARGIN * (high - low)
    ends = (low - 2 * room, high + 2 * room)
    fig = new_figure(height=ROW * len(laws) + REST)
    fig.add_scatter(
        x=[0] * 3 * len(laws),
        y=[end for i, d in enumerate(decades) for end in _draw_bound(i, d is None)],
        mode="lines",
        line={"color": MUTED, "width": 1.5, "dash": "dash"},
        hoverinfo="skip",
        showlegend=False,
    )
    for outcome, mark in MARKS.items():
        rows = [i for i, law in enumerate(laws) if law["verdict"] == outcome]
        if not rows:
            continue
        fig.add_scatter(
            x=[_clip(decades[i], ends[0] + room, ends[1] - room) for i in rows],
            y=rows,
            mode="markers",
            marker=mark,
            name=OUTCOMES[outcome][0],
            cliponaxis=False,
            text=[_format_hover(laws[i]) for i in rows],
            hovertemplate="%{text}<extra></extra>",
        )
    for i, law in enumerate(laws):
        if decades[i] is None:
            _add_reason(fig, ends[0] + 2 * room, i, law["evidence"])
    fig.add_annotation(
        text="allowed ↔ fails", x=0, y=-0.5, yanchor="bottom", yshift=2, xanchor="center"
    )
    ticks = {decade: _format_power(decade) for decade in _choose_ticks(low, high)}
    if -math.inf in decades:
        ticks = {ends[0] + room: "0", **{k: v for k, v in ticks.items() if k > low}}
    if math.inf in decades:
        # Apart from its neighbour on a phone too.
        near = high - (high - low) / 10
        ticks = {**{k: v for k, v in ticks.items() if k < near}, ends[1] - room: "∞"}
    fig.update_xaxes(
        range=list(ends),
        tickvals=list(ticks),
        ticktext=list(ticks.values()),
        title_text="measured / allowed",
        fixedrange=True,
    )
    fig.update_yaxes(
        range=[len(laws) - 0.5, -0.5],
        tickvals=list(range(len(laws))),
        ticktext=["<br>".join(textwrap.wrap(html.escape(law["law"]), NAME)) for law in laws],
        showgrid=False,
        showline=False,
        ticks="",
        fixedrange=True,
    )
    return fig.update_layout(
        margin={"l": 96, "r": 12, "t": 84, "b": 92},
        legend={"y": 0, "yref": "container", "yanchor": "bottom"},
    )


def render(certificate: Certificate) -> str:
    """Return a certificate as HTML: the figure, every law's evidence, programs of failures."""
    words = describe(certificate)
    return fill_template(
        "certificate.html.j2",
        certificate=certificate,
        counts=count_outcomes(certificate),
        signs=SIGNS,
        result=show_figure(words, draw(certificate), _make_stamp(certificate)),
    )


def save(certificate: Certificate, path: Path) -> None:
    """Write a certificate's page as .html, its figure as .png or .svg.

    Raises:
        ValueError: for another suffix.
        BrowserError: for an image without a Chromium that can draw it.
        OSError: when the file cannot be written.
    """
    if path.suffix.lower() == ".html":
        write(path, render(certificate))
        return
    title = describe(certificate).title
    export.save(add_title(draw(certificate), title, _make_stamp(certificate)), path)


def _make_stamp(certificate: Certificate) -> str:
    lengths = ", ".join(map(str, certificate["lengths"]))
    return f"{count_outcomes(certificate)} · width {certificate['d_model']} · lengths {lengths}"


def _count_decades(law: Certificate) -> float | None:
    """Return how many powers of ten a law's number is above its bound; None where it has none."""
    measured, allowed = law["measured"], law["allowed"]
    if measured is None or allowed is None or law["verdict"] not in ("holds", "fails"):
        return None
    measured, allowed = float(measured), float(allowed)
    if measured == 0:
        return -math.inf
    if not math.isfinite(measured) or allowed == 0:
        return math.inf
    return math.log10(measured / allowed)


def _clip(decades: float | None, low: float, high: float) -> float:
    return low if decades is None else min(max(decades, low), high)


def _draw_bound(row: int, interrupted: bool) -> tuple[float | None, float | None, float | None]:
    """Return the ends of a row's part of the line, and a gap; no line where a reason stands."""
    return (None, None, None) if interrupted else (row - 0.5, row + 0.5, None)


def _choose_ticks(low: int, high: int) -> list[int]:
    """Choose whole decades, the bound among them, few enough for a phone."""
    step = math.ceil((high - low) / TICKS)
    return [decade for decade in range(low, high + 1) if decade % step == 0]


def _format_power(decade: int) -> str:
    return "1" if decade == 0 else f"10<sup>{decade}</sup>".replace("-", "−")


def _format_hover(law: Certificate) -> str:
    lines = [f"<b>{html.escape(law['law'])}</b>: {law['verdict']}"]
    for text in filter(None, (law["evidence"], law["counterexample"])):
        lines += map(html.escape, textwrap.wrap(text, HOVER))
    return "<br>".join(lines)


def _add_reason(fig: go.Figure, x: float, row: int, text: str) -> None:
    lines = textwrap.wrap(text, REASON, max_lines=LINES, placeholder=" …")
    fig.add_annotation(
        text="<br>".join(map(html.escape, lines)),
        x=x,
        y=row,
        xanchor="left",
        yanchor="middle",
        align="left",
        xshift=6,
    )
