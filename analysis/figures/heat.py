"""Heat maps: small matrices with names, one or many on one scale of colours."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Shaped

from analysis.figures.axes import FORMATS, LETTER, Axis, Unit, new_canvas
from analysis.figures.theme import SEQUENTIAL

ROW = 26
"""Height of a row of cells, px."""
BAR = 56
"""Height of the scale of colours below a figure, px."""
FEW = 32
"""Maximum number of columns that have a label each."""
NARROW = 330
"""Width of the panels on a phone, px: labels that do not fit beside one another are turned."""


@dataclass(frozen=True)
class Colors:
    """What colours stand for.

    Attributes:
        unit: how values are written.
        ends: of the scale, which is diverging if they are opposite; None: what is there, symmetric
            if anything is negative.
        ticks: labels of the scale by value; None: plotly chooses.
    """

    title: str = ""
    unit: Unit = "number"
    ends: tuple[float, float] | None = None
    ticks: Mapping[float, str] | None = None


@dataclass(frozen=True)
class Map:
    """A matrix with named rows and columns.

    Attributes:
        values: NaN for an empty cell.
        rows: names of the rows, from the top; or an array of their places, which ascend upwards.
        columns: the same of the columns.
        title: above it; "" for none.
        texts: written in the cells; None: none.
        notes: for the hover text of each cell; None: row and column.
    """

    values: Float[np.ndarray, "rows columns"]
    rows: Sequence[str] | Shaped[np.ndarray, " rows"]
    columns: Sequence[str] | Shaped[np.ndarray, " columns"]
    title: str = ""
    texts: Sequence[Sequence[str]] | None = None
    notes: Sequence[Sequence[str]] | None = None


def heat(
    maps: Sequence[Map],
    colors: Colors,
    x: Axis,
    y: Axis,
    *,
    across: int = 1,
    row: float = ROW,
    numbers: bool = False,
) -> go.Figure:
    """Draw maps on one scale, the first row on top.

    Args:
        row: height of a row of cells, px.
        numbers: whether each cell shows its value.
    """
    heights = [
        max(40.0, row * max(len(one.rows) for one in maps[i : i + across]))
        for i in range(0, len(maps), across)
    ]
    titled = any(one.title for one in maps)
    foot = 52 + BAR + _measure_turned_labels(maps, across)
    canvas = new_canvas(
        [one.title for one in maps],
        heights,
        across=across,
        gap=76 if titled else 50,
        foot=foot,
    )
    plain, hover = FORMATS[colors.unit]
    seen = np.concatenate([one.values[np.isfinite(one.values)] for one in maps])
    for i, one in enumerate(maps):
        place: dict[str, Any] = dict(zip(("row", "col"), canvas.places[i], strict=True))
        named = [[html.escape(str(n)) for n in part] for part in (one.rows, one.columns)]
        notes = one.notes or [[f"{r}, {c}" for c in named[1]] for r in named[0]]
        texts = one.texts
        by_place = [isinstance(part, np.ndarray) for part in (one.columns, one.rows)]
        canvas.fig.add_heatmap(
            z=one.values.astype(np.float32),
            x=x.place(np.asarray(one.columns)) if by_place[0] else list(range(len(named[1]))),
            y=y.place(np.asarray(one.rows)) if by_place[1] else list(range(len(named[0]))),
            customdata=notes,
            text=texts,
            texttemplate="%{text}" if texts else f"%{{z:{plain or hover}}}" if numbers else None,
            coloraxis="coloraxis",
            xgap=0 if by_place[0] else 1,
            ygap=0 if by_place[1] else 1,
            hoverongaps=False,
            hovertemplate=f"%{{customdata}}: %{{z:{hover}}}<extra></extra>",
            **place,
        )
        ends = [
            part.tolist() if isinstance(part, np.ndarray) else ()
            for part in (one.columns, one.rows)
        ]
        canvas.finish(x, y, i, (ends[0], ends[1]))
        if not by_place[0]:
            step = -(-len(named[1]) // FEW)
            canvas.fig.update_xaxes(
                tickvals=list(range(0, len(named[1]), step)), ticktext=named[1][::step], **place
            )
        if not by_place[1]:
            canvas.fig.update_yaxes(
                tickvals=list(range(len(named[0]))),
                ticktext=named[0],
                range=[len(named[0]) - 0.5, -0.5],
                # The map to the left has the same names.
                showticklabels=i % across == 0 or list(one.rows) != list(maps[i - 1].rows),
                **place,
            )
    # Turned names end at their column: one that begins at the last column has no room.
    canvas.fig.update_xaxes(showgrid=False, ticks="", autotickangles=[0, -30, -90])
    canvas.fig.update_yaxes(showgrid=False, ticks="", automargin="left")
    low, high = colors.ends or _find_ends(seen)
    bar: dict[str, object] = {"nticks": 6, "tickformat": plain}
    if colors.ticks is not None:
        bar |= {"tickvals": list(colors.ticks), "ticktext": list(colors.ticks.values())}
    axis: dict[str, object] = {"cmin": low, "cmax": high, "colorbar": bar}
    if low != -high:
        axis["colorscale"] = SEQUENTIAL
    if colors.title:
        canvas.fig.add_annotation(
            text=colors.title,
            xref="paper",
            yref="paper",
            x=0.5,
            y=0,
            yanchor="top",
            yshift=-(foot - BAR) + 4,
        )
    return canvas.fig.update_layout(coloraxis=axis, showlegend=False)


def _measure_turned_labels(maps: Sequence[Map], across: int) -> int:
    """Return how far turned labels of columns reach below level ones, px; 0 where all fit."""
    named = [[str(c) for c in one.columns] for one in maps if isinstance(one.columns, Sequence)]
    widths = [(min(len(names), FEW), LETTER * max(map(len, names))) for names in named if names]
    turned = [width for count, width in widths if count * (width + 6) > NARROW / across]
    return max(0, round(max(turned, default=0) - 14))


def _find_ends(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Return the ends of the scale, 0 in the middle if anything is negative."""
    if not values.size:
        return 0.0, 1.0
    if values.min() < 0:
        bound = float(np.quantile(np.abs(values), 0.995)) or 1.0
        return -bound, bound
    return 0.0, float(np.quantile(values, 0.995)) or 1.0
