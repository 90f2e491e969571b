"""The style of figures: one plotly template for light pages and one for dark.

The colours are Okabe and Ito's, distinct under all common kinds of colour blindness, and no figure
relies on colour alone. A figure that names no colour takes the template's, and so follows the page.
"""

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import hex_to_rgb, sequential

from lab.palette import BLUE, GREEN, MUTED, ORANGE, PURPLE, SKY, VERMILLION, YELLOW

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
"""Markers that go with the colours, so that no figure relies on colour alone."""

COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Colours and dashes of lines, in this order."""

SEQUENTIAL = [[i / (len(sequential.Cividis) - 1), c] for i, c in enumerate(sequential.Cividis)]
"""Colour scale of shares and table entries; readable on light pages and on dark."""

WIDTH = 600
"""Nominal width of a figure, px; the page keeps the ratio of width to height."""

HEAD = 44
"""Height of title and stamp in the top margin, px; a page cuts it off and shows text instead."""

LABEL = {"templateitemname": "label", "visible": True}
"""Settings of an annotation that lines may cross: it gets a ground in the colour of the page."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def _template(
    *, paper: str, ink: str, soft: str, faint: str, colorway: list[str], diverging: list[str]
) -> go.layout.Template:
    axis = {
        "showgrid": True,
        "gridcolor": faint,
        "gridwidth": 1,
        "zeroline": False,
        "showline": True,
        "linecolor": MUTED,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": MUTED,
        "title": {"standoff": 8, "font": {"size": 11}},
        "automargin": False,
    }
    label = {"font": {"size": 11, "color": soft}, "showarrow": False}
    # A curve below a label can still be made out.
    ground = "rgba({}, {}, {}, 0.85)".format(*hex_to_rgb(paper))
    steps = [[i / (len(diverging) - 1), color] for i, color in enumerate(diverging)]
    return go.layout.Template(
        layout={
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "font": {"family": FONT, "size": 11, "color": ink},
            "title": {
                "x": 0,
                "xref": "container",
                "xanchor": "left",
                "y": 1,
                "yref": "container",
                "yanchor": "top",
                "pad": {"t": 6, "l": 2},
                "font": {"size": 14},
                "subtitle": {"font": {"size": 11, "color": soft}},
            },
            "margin": {"l": 60, "r": 14, "t": 64, "b": 48},
            "colorway": colorway,
            "colorscale": {"sequential": SEQUENTIAL, "diverging": steps},
            "coloraxis": {
                "colorbar": {
                    "orientation": "h",
                    "yref": "container",
                    "y": 0,
                    "yanchor": "bottom",
                    "thickness": 8,
                    "outlinewidth": 0,
                    "ticklen": 3,
                    "ticks": "outside",
                    "tickcolor": MUTED,
                }
            },
            "xaxis": axis,
            "yaxis": axis,
            "annotationdefaults": label,
            # The defaults do not reach annotations that are given by their name.
            "annotations": [{**label, "name": "label", "visible": False, "bgcolor": ground}],
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.01,
                "yanchor": "bottom",
                "font": {"size": 11},
                "itemwidth": 30,
            },
            "hoverlabel": {
                "bgcolor": paper,
                "bordercolor": MUTED,
                "font": {"family": FONT, "size": 12, "color": ink},
            },
            "hovermode": "closest",
            "dragmode": False,
        }
    )


LIGHT = _template(
    paper="#ffffff",
    ink="#1c1f24",
    soft="#5a616c",
    faint="#eceef1",
    colorway=[BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY],
    diverging=["#053061", "#2f79b5", "#a9cfe4", "#f7f7f7", "#f6b799", "#c13639", "#67001f"],
)
DARK = _template(
    paper="#14161a",
    ink="#e4e6ea",
    soft="#9da4af",
    faint="#262a31",
    colorway=[SKY, ORANGE, GREEN, PURPLE, VERMILLION, YELLOW],
    diverging=["#bfe3ff", "#4a9fd8", "#1d4f77", "#1d2026", "#7c3420", "#e0703c", "#ffd9c2"],
)
"""Light and dark templates. The diverging scale's middle is close to the page's background."""


def new_figure(height: int) -> go.Figure:
    """Return an empty figure in the light template, `WIDTH` × `height` px."""
    return go.Figure(layout={"template": LIGHT, "width": WIDTH, "height": height})


def make_whiskers(
    values: Float[np.ndarray, " n"],
    ends: Float[np.ndarray, "n 2"],
    thickness: float = 1.5,
    width: float = 5,
) -> dict[str, Any]:
    """Return plotly's settings of error bars from values to the ends of their intervals.

    Args:
        thickness: of the line, px.
        width: of the caps, px.
    """
    return {
        "type": "data",
        "symmetric": False,
        "array": np.nan_to_num(np.maximum(0, ends[:, 1] - values)),
        "arrayminus": np.nan_to_num(np.maximum(0, values - ends[:, 0])),
        "thickness": thickness,
        "width": width,
    }


def add_title(fig: go.Figure, title: str, stamp: str) -> go.Figure:
    """Add a title, and a stamp of the figure's origin below it; text from users is escaped."""
    return fig.update_layout(title_text=html.escape(title), title_subtitle_text=html.escape(stamp))
