"""A figure of rows: a line of cells for so many positions, a colour a role."""

import html
import math

import numpy as np
import plotly.graph_objects as go

from analysis.plots import style
from analysis.rows.results import Rows
from lab.palette import color_roles

LINE = 19
"""Height of a line, px."""
FIELD = 430
"""Width of the cells, px."""
LETTER = 6.6
"""Width of a letter in a cell, px, about."""
MARK = {"color": style.MUTED, "width": 2.5}
"""Under a scored position."""
SAID = 12
"""Letters of the right answers beside a row."""


def draw(found: Rows) -> go.Figure:
    """Draw a line of cells for so many positions, a row below the other."""
    n, seen = found.roles.shape
    lines = math.ceil(seen / found.width)
    many = lines > 1
    # A row's lines, and an empty one before the next row.
    pitch = lines + (1 if many else 0)
    high = n * pitch - (1 if many else 0)
    fig = style.new_figure(height=84 + LINE * high + 64)
    cell = FIELD / found.width
    z = np.full((high, found.width), np.nan, np.float32)
    notes = np.full((high, found.width), "", object)
    short = np.full((high, found.width), "", object)
    marks: tuple[list[float | None], list[float | None]] = ([], [])
    for row in range(n):
        for i in range(seen):
            line, column = row * pitch + i // found.width, i % found.width
            z[line, column] = found.roles[row, i]
            token, answer = html.escape(found.tokens[row][i]), html.escape(found.answers[row][i])
            # One character is no markup, and plotly would count an entity's letters.
            alone = found.tokens[row][i]
            short[line, column] = alone if len(alone) == 1 else token
            notes[line, column] = (
                f"row {row}, position {found.first + i}: {token}, "
                f"{html.escape(found.role_names[found.roles[row, i]])}"
                + (f"; right: {answer}" if answer else "")
            )
            if answer:
                marks[0].extend((column - 0.4, column + 0.4, None))
                marks[1].extend((line + 0.48, line + 0.48, None))
    # A longer token among short ones is drawn smaller.
    letters = np.median([len(token) for tokens in found.tokens for token in tokens])
    fig.add_heatmap(
        z=z,
        customdata=notes,
        text=short if letters * LETTER <= cell else None,
        texttemplate="%{text}" if letters * LETTER <= cell else None,
        zmin=-0.5,
        zmax=len(found.role_names) - 0.5,
        colorscale=_scale(len(found.role_names)),
        showscale=False,
        hoverongaps=False,
        xgap=1 if cell >= 4 else 0,
        ygap=6,
        hovertemplate="%{customdata}<extra></extra>",
    )
    for role, name in enumerate(found.role_names):
        if found.a_row[role] > 0:
            fig.add_scatter(
                x=[None],
                y=[None],
                mode="markers",
                marker={
                    "symbol": "square",
                    "size": 10,
                    "color": color_roles(found.role_names)[role],
                },
                name=html.escape(name),
            )
    fig.add_scatter(
        x=marks[0], y=marks[1], mode="lines", line=MARK, name="scored", hoverinfo="skip"
    )
    for row in range(n):
        fig.add_annotation(
            text=html.escape(_beside(found.answers[row])),
            x=1,
            xref="paper",
            xanchor="left",
            xshift=6,
            y=row * pitch + (lines - 1) / 2,
        )
    fig.add_annotation(
        text="right answers", x=1, xref="paper", xanchor="left", xshift=6, y=1, yref="paper",
        yanchor="bottom",
    )  # fmt: skip
    fig.update_xaxes(
        range=[-0.5, found.width - 0.5],
        showgrid=False,
        showline=False,
        title_text=f"position{', of each line' if many else ''}",
    )
    starts = [row * pitch for row in range(n)]
    fig.update_yaxes(
        range=[high - 0.4, -0.6],
        tickvals=starts,
        ticktext=[f"row {row}" for row in range(n)],
        showgrid=False,
        showline=False,
        ticks="",
    )
    return fig.update_layout(margin={"l": 48, "r": 110, "t": 84, "b": 48})


def _beside(answers: tuple[str, ...]) -> str:
    """Return a row's right answers as far as there is room."""
    said = ""
    for answer in filter(None, answers):
        if said and len(said) + 1 + len(answer) > SAID:
            return f"{said} …"
        said = f"{said} {answer}".strip()
    return said


def _scale(roles: int) -> list[list[float | str]]:
    """Return a colour scale of plateaus, one a role."""
    names = ("",) * roles
    return [
        [(role + side) / roles, color_roles(names)[role]]
        for role in range(roles)
        for side in (0, 1)
    ]
