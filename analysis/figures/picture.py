"""A picture of a T × T matrix: pooled to pixels, marked where queries meet their values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int, Shaped
from plotly.subplots import make_subplots

from analysis.base import Subject
from analysis.figures.theme import GREEN, VERMILLION, WIDTH, new_figure
from analysis.links import AnswerLinks, find_links
from analysis.plain import figure_only
from analysis.words import name_head, name_place

SIDE = 512
"""Maximum number of cells across a figure: with more, single bright ones could vanish."""
CIRCLES = 96
"""Maximum number of expected cells ringed from the start: more would hide what they ring."""
GAP, HEAD, FOOT = 0.035, 84, 96
"""Between panels, as a share of all; above the panels, and below them, px."""


@dataclass(frozen=True)
class Picture:
    """The cells of a matrix that are drawn.

    Attributes:
        weights: NaN above the diagonal.
        pool: a cell is the entry of largest magnitude, sign kept, among pool × pool.
        first: row and column of the first cell.
        bound: colours end at ± this value, or at 0 and this one where nothing is negative.
        signed: whether anything is negative.
    """

    weights: Float[np.ndarray, "h t s"] = figure_only()
    pool: int = 1
    first: tuple[int, int] = (0, 0)
    bound: float = 1.0
    signed: bool = False


@dataclass(frozen=True)
class Heatmap:
    """The picture of a matrix, and the row of the batch that it was computed on.

    Attributes:
        roles: indices into role_names, int [t].
        role_names: the task's.
    """

    picture: Picture
    links: AnswerLinks
    tokens: Shaped[np.ndarray, " t"]
    roles: Int[np.ndarray, " t"]
    role_names: tuple[str, ...]

    @classmethod
    def of(cls, subject: Subject, picture: Picture) -> "Heatmap":
        """Return the heat map of a matrix that was computed on a subject's first row."""
        batch, role_names = subject.batch, subject.task.role_names
        tokens, roles = list_tokens(subject), batch.roles[0].cpu().numpy()
        return cls(picture, find_links(batch), tokens, roles, role_names)

    @property
    def meta(self) -> dict[str, Any]:
        """What the page needs to name the tokens of a cell."""
        return {
            "tokens": self.tokens.tolist(),
            "roles": [self.role_names[i] for i in self.roles],
        }


def list_tokens(subject: Subject) -> Shaped[np.ndarray, " t"]:
    """Return the tokens of a subject's first row by number; vectors as they are shown."""
    row = subject.batch.inputs[0].cpu()
    return np.array(subject.task.to_str_tokens(row)) if subject.task.vectors else row.numpy()


def make_picture(weights: Float[np.ndarray, "h high wide"], pool: int = 1) -> Picture:
    """Return what is drawn of a matrix that is pooled already.

    Colours of signed values end at the 99.5 % quantile of magnitudes. Those of attention end
    where nine rows of ten have their largest entry: in a long row most entries are near zero.
    """
    size, signed = np.abs(weights), bool((weights < 0).any())
    if signed:
        bound = float(np.nanquantile(size, 0.995))
    else:
        bound = float(np.quantile(np.nanmax(size, axis=-1), 0.9))
    return Picture(weights, pool, (0, 0), bound or 1.0, signed)


def choose_pool(heads: int, seq_len: int) -> int:
    """Return how many entries across a cell stands for: it should not be below a pixel."""
    return math.ceil(seq_len / (SIDE // count_columns(heads)))


def pool_matrix(matrix: Float[np.ndarray, "h t s"], pool: int) -> Float[np.ndarray, "h high wide"]:
    """Return the entry of largest magnitude, sign kept, of each pool × pool block.

    A mean would erase a single bright cell, which is what recall looks like. NaN counts as
    nothing; the last blocks may be smaller.
    """
    if pool == 1:
        return matrix
    n_heads, rows, columns = matrix.shape
    high, wide = math.ceil(rows / pool), math.ceil(columns / pool)
    padding = ((0, 0), (0, high * pool - rows), (0, wide * pool - columns))
    padded = np.pad(matrix, padding, constant_values=np.nan)
    blocks = padded.reshape(n_heads, high, pool, wide, pool).transpose(0, 1, 3, 2, 4)
    blocks = blocks.reshape(n_heads, high, wide, pool * pool)
    largest = np.nan_to_num(np.abs(blocks), nan=-1.0).argmax(-1)
    return np.take_along_axis(blocks, largest[..., None], -1)[..., 0]


def find_expected(picture: Picture, links: AnswerLinks) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the picture's cells where queries meet their values."""
    sides = picture.weights.shape[1:]
    row, column = (
        (at >= first) & (at < first + side * picture.pool)
        for at, first, side in zip(links.expected, picture.first, sides, strict=True)
    )
    rows, columns = links.expected
    return rows[row & column], columns[row & column]


def count_columns(heads: int) -> int:
    """Return how many heads stand side by side."""
    return 2 if heads in (2, 4) else min(heads, 3)


def draw_heatmap(
    heatmap: Heatmap, layer: int = 0, views: Mapping[str, Heatmap] | None = None
) -> go.Figure:
    """Draw one panel per head of a layer, row 0 on top, with a gutter for the query rows.

    Args:
        views: heat maps of the same size by name, among which a page lets its reader choose; the
            first is this one. All have its colours.
    """
    shown = heatmap.picture
    heads, pool = len(shown.weights), shown.pool
    across = count_columns(heads)
    down = math.ceil(heads / across)
    panel = (WIDTH - 74) / across
    fig = make_subplots(
        rows=down,
        cols=across,
        horizontal_spacing=GAP,
        vertical_spacing=GAP if down > 1 else 0,
        specs=[
            [{} if first + j < heads else None for j in range(across)]
            for first in range(0, heads, across)
        ],
        figure=new_figure(height=round(HEAD + down * panel + FOOT)),
    )
    high, wide = (side * pool for side in shown.weights.shape[1:])
    top, left = (first - 0.5 for first in shown.first)
    gutter, digits = 0.03 * wide, 3 if pool == 1 else 2
    marks = _draw_marks(heatmap, left - gutter, gutter, panel / high)
    for head, weights in enumerate(shown.weights):
        place: Any = {"row": head // across + 1, "col": head % across + 1}
        fig.add_heatmap(
            z=_shorten(weights, digits),
            x0=left + pool / 2,
            dx=pool,
            y0=top + pool / 2,
            dy=pool,
            coloraxis="coloraxis",
            hoverongaps=False,
            hovertemplate=f"row %{{y}}, column %{{x}}: %{{z:.{digits}g}}<extra></extra>",
            **place,
        )
        for mark in marks:
            fig.add_trace(mark.update(showlegend=head == 0), **place)
        fig.update_yaxes(scaleanchor=f"x{head + 1}" if head else "x", **place)
        if heads > 1:
            corner: Any = {"x": 0.97, "y": 0.97, "xanchor": "right", "yanchor": "top"}
            ends = {"xref": "x domain", "yref": "y domain"}
            fig.add_annotation(text=name_head(layer, head), **corner, **ends, **place)
    plain: Any = {
        "showgrid": False,
        "showline": False,
        "showticklabels": False,
        "constrain": "domain",
    }
    fig.update_xaxes(range=[left - gutter, left + wide], constraintoward="left", **plain)
    fig.update_yaxes(range=[top + high, top], constraintoward="top", **plain)
    fig.update_xaxes(showticklabels=True, title_text="source position, tokens", row=down)
    fig.update_yaxes(showticklabels=True, title_text="target position, tokens", col=1)
    low = -shown.bound if shown.signed else 0
    return fig.update_layout(
        margin={"t": HEAD, "b": FOOT},
        coloraxis={"cmin": low, "cmax": shown.bound, "colorbar": {"nticks": 6}},
        meta={
            **heatmap.meta,
            "pool": pool,
            "digits": digits,
            **({"views": [*map(_draw_view, views, views.values())]} if views else {}),
        },
    )


def _draw_view(name: str, heatmap: Heatmap) -> dict[str, Any]:
    """Return what another heat map has in place of a figure's own: data of its traces, tokens."""
    traces: Any = draw_heatmap(heatmap).data
    data = [{"z": t.z} if t.type == "heatmap" else {"x": t.x, "y": t.y} for t in traces]
    return {"name": name, "data": data, **heatmap.meta}


def _shorten(values: Float[np.ndarray, "high wide"], digits: int) -> Float[np.ndarray, "high wide"]:
    """Round to the binary digits that so many decimal ones need; the others do not compress."""
    bits = math.ceil(digits / math.log10(2)) + 1
    fraction, exponent = np.frexp(values.astype(np.float32))
    return np.ldexp(np.round(fraction * 2**bits), exponent - bits)


def _draw_marks(heatmap: Heatmap, left: float, width: float, entry: float) -> list[go.Scatter]:
    """Return ticks beside the query rows, and rings where queries meet their values.

    Args:
        left: where the gutter of the ticks begins.
        entry: height of an entry of the matrix, px.
    """
    shown, queries = heatmap.picture, heatmap.links.queries
    row = queries - shown.first[0]
    queries = queries[(row >= 0) & (row < shown.weights.shape[1] * shown.pool)]
    ticks = go.Scatter(
        x=[left + 0.1 * width, left + 0.75 * width, None] * len(queries),
        y=[y for q in queries.tolist() for y in (q, q, None)],
        mode="lines",
        line={"color": VERMILLION, "width": min(4.0, max(1.0, 0.6 * entry))},
        name="query rows",
        legendgroup="query rows",
        hoverinfo="skip",
    )
    rows, columns = find_expected(shown, heatmap.links)
    if not len(rows):
        return [ticks]
    rings = go.Scatter(
        x=columns,
        y=rows,
        mode="markers",
        marker={
            "symbol": "circle-open",
            "size": min(16.0, max(7.0, 1.9 * entry * shown.pool)),
            "color": GREEN if shown.signed else VERMILLION,
            "line": {"width": 1.3},
        },
        cliponaxis=False,  # a ring on the last row or column is whole
        name=name_place(heatmap.links.read, "the value asked for"),
        legendgroup="values",
        visible=True if len(rows) <= CIRCLES else "legendonly",
        hoverinfo="skip",
    )
    return [ticks, rings]
