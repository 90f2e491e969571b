"""A matrix as a heat map: pooled until its cells are pixels, marked where queries meet values."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import Subject
from analysis.links import AnswerLinks, find_links
from analysis.plain import figure_only
from analysis.plots import style
from analysis.words import name_head, name_place

SIDE = 512
"""Maximum number of cells across a figure: with more, single bright ones could vanish."""
CIRCLES = 96
"""Maximum number of expected cells ringed from the start: more would hide what they ring."""


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
        picture: the cells.
        links: the row's.
        tokens: the row's, int [t].
        roles: indices into role_names, int [t].
        role_names: the task's.
    """

    picture: Picture
    links: AnswerLinks
    tokens: Int[np.ndarray, " t"]
    roles: Int[np.ndarray, " t"]
    role_names: tuple[str, ...]

    @classmethod
    def of(cls, subject: Subject, picture: Picture) -> "Heatmap":
        """Return the heat map of a matrix that was computed on a subject's first row."""
        batch, role_names = subject.batch, subject.task.role_names
        tokens, roles = (part[0].cpu().numpy() for part in (batch.inputs, batch.roles))
        return cls(picture, find_links(batch), tokens, roles, role_names)


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


def draw_heatmap(heatmap: Heatmap, layer: int = 0) -> go.Figure:
    """Draw one panel per head of a layer, row 0 on top, with a gutter for the query rows."""
    shown = heatmap.picture
    heads, rows, columns = shown.weights.shape
    side_by_side = count_columns(heads)
    down = math.ceil(heads / side_by_side)
    panel = (style.WIDTH - 74) / side_by_side
    fig = make_subplots(
        rows=down,
        cols=side_by_side,
        horizontal_spacing=0.035,
        vertical_spacing=0.035 if down > 1 else 0,
        specs=[
            [{} if i * side_by_side + j < heads else None for j in range(side_by_side)]
            for i in range(down)
        ],
        figure=style.new_figure(height=round(84 + down * panel + 96)),
    )
    row, column = shown.first
    gutter = 0.03 * columns * shown.pool
    digits = 3 if shown.pool == 1 else 2
    left, right = column - 0.5, column - 0.5 + columns * shown.pool
    top, bottom = row - 0.5, row - 0.5 + rows * shown.pool
    for head in range(heads):
        i, j = head // side_by_side + 1, head % side_by_side + 1
        k = "" if head == 0 else str(head + 1)
        fig.add_heatmap(
            z=_shorten(shown.weights[head], digits),
            x0=left + shown.pool / 2,
            dx=shown.pool,
            y0=top + shown.pool / 2,
            dy=shown.pool,
            coloraxis="coloraxis",
            hoverongaps=False,
            hovertemplate=f"row %{{y}}, column %{{x}}: %{{z:.{digits}g}}<extra></extra>",
            row=i,
            col=j,
        )
        _mark(fig, heatmap, (i, j), (left - gutter, left), panel / rows)
        fig.update_xaxes(
            range=[left - gutter, right],
            constrain="domain",
            constraintoward="left",
            showticklabels=i == down,
            title_text="source position, tokens" if i == down else None,
            row=i,
            col=j,
        )
        fig.update_yaxes(
            range=[bottom, top],
            scaleanchor=f"x{k}",
            constrain="domain",
            constraintoward="top",
            showticklabels=j == 1,
            title_text="target position, tokens" if j == 1 else None,
            row=i,
            col=j,
        )
        if heads > 1:
            fig.add_annotation(
                text=name_head(layer, head),
                xref=f"x{k} domain",
                yref=f"y{k} domain",
                x=0.97,
                y=0.97,
                xanchor="right",
                yanchor="top",
            )
    fig.update_xaxes(showgrid=False, showline=False)
    fig.update_yaxes(showgrid=False, showline=False)
    return fig.update_layout(
        margin={"t": 84, "b": 96},
        coloraxis={
            "cmin": -shown.bound if shown.signed else 0,
            "cmax": shown.bound,
            "colorbar": {"nticks": 6},
        },
        meta={
            "tokens": heatmap.tokens.tolist(),
            "roles": [heatmap.role_names[i] for i in heatmap.roles],
            "pool": shown.pool,
            "digits": digits,
        },
    )


def _shorten(values: Float[np.ndarray, "high wide"], digits: int) -> Float[np.ndarray, "high wide"]:
    """Round to the binary digits that so many decimal ones need; the others do not compress."""
    bits = math.ceil(digits / math.log10(2)) + 1
    fraction, exponent = np.frexp(values.astype(np.float32))
    return np.ldexp(np.round(fraction * 2**bits), exponent - bits)


def _mark(
    fig: go.Figure,
    heatmap: Heatmap,
    place: tuple[int, int],
    gutter: tuple[float, float],
    cell: float,
) -> None:
    """Add ticks beside the query rows, and rings where queries meet their values."""
    shown = heatmap.picture
    top, high = shown.first[0], shown.weights.shape[1] * shown.pool
    queries = heatmap.links.queries
    queries = queries[(queries >= top) & (queries < top + high)]
    width = gutter[1] - gutter[0]
    ticks = [gutter[0] + 0.1 * width, gutter[0] + 0.75 * width, None]
    fig.add_scatter(
        x=ticks * len(queries),
        y=[y for q in queries.tolist() for y in (q, q, None)],
        mode="lines",
        line={"color": style.VERMILLION, "width": min(4.0, max(1.0, 0.6 * cell / shown.pool))},
        name="query rows",
        legendgroup="query rows",
        showlegend=place == (1, 1),
        hoverinfo="skip",
        row=place[0],
        col=place[1],
    )
    rows, columns = find_expected(heatmap)
    if not len(rows):
        return
    fig.add_scatter(
        x=columns,
        y=rows,
        mode="markers",
        marker={
            "symbol": "circle-open",
            "size": min(16.0, max(7.0, 1.9 * cell)),
            "color": style.GREEN if shown.signed else style.VERMILLION,
            "line": {"width": 1.3},
        },
        cliponaxis=False,  # a ring on the last row or column is whole
        name=name_place(heatmap.links.read, "the value asked for"),
        legendgroup="values",
        showlegend=place == (1, 1),
        visible=True if len(rows) <= CIRCLES else "legendonly",
        hoverinfo="skip",
        row=place[0],
        col=place[1],
    )


def find_expected(heatmap: Heatmap) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the picture's cells where queries meet their values."""
    shown, (rows, columns) = heatmap.picture, heatmap.links.expected
    high, wide = (side * shown.pool for side in shown.weights.shape[1:])
    met = lie_inside(rows, columns, shown.first, (high, wide))
    return rows[met], columns[met]


def lie_inside(
    rows: np.ndarray, columns: np.ndarray, first: tuple[int, int], size: tuple[int, int]
) -> np.ndarray:
    """Return which cells lie in the window with this corner and size."""
    row, column = rows - first[0], columns - first[1]
    return (row >= 0) & (row < size[0]) & (column >= 0) & (column < size[1])


def count_columns(heads: int) -> int:
    """Return how many heads stand side by side."""
    return 2 if heads in (2, 4) else min(heads, 3)
