"""Where does each position look? Every mixer's matrix [h t s] on one test row."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import NotApplicableError, Subject, Words
from analysis.figures import style
from analysis.figures.style import percent
from analysis.links import Links, Mass, mass_of_blocks, row_links
from analysis.mixing import Mixer, mixers
from analysis.record import drawn
from lab.laws import MatrixMixer

TITLE = "What each layer mixes, on the first test row"
SIDE = 512
"""Most cells across a figure: with more a cell is below a pixel, and single bright ones vanish."""
CROP = 256
"""Cells across the full-resolution crop that goes with a pooled matrix."""
CIRCLES = 96
"""Most expected cells that are ringed from the start: more would hide what they ring."""
SHOWS = 0.25
"""How far from uniform (0) to all (1) a mass must be for a layer to be said to do something."""


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

    weights: Float[np.ndarray, "h t s"] = drawn()
    pool: int = 1
    first: tuple[int, int] = (0, 0)
    bound: float = 1.0
    signed: bool = False


@dataclass(frozen=True)
class Mixing:
    """A layer's mixing of one row.

    Attributes:
        layer: index of the block.
        mixer: its class.
        form: which matrix this is.
        picture: what is drawn; None when the mixer offers no matrix.
        mass: what the whole matrix does; likewise.
        cropped: whether the picture is the crop of a matrix that is also shown pooled.
        links: the row's.
        tokens: the row's, int [t].
        roles: indices into role_names, int [t].
        role_names: the task's.
    """

    layer: int
    mixer: str
    form: str
    picture: Picture | None
    mass: Mass | None
    cropped: bool
    links: Links
    tokens: Int[np.ndarray, " t"]
    roles: Int[np.ndarray, " t"]
    role_names: tuple[str, ...]


@torch.no_grad()
def measure(subject: Subject) -> list[Mixing]:
    """Return each mixer's matrix on the subject's first row; of a large one also a crop.

    Raises:
        NotApplicableError: for a model without mixers.
    """
    batch = subject.batch[:1]
    links = row_links(batch)
    results = []
    for mixer in mixers(subject.model, batch):
        offered = isinstance(mixer.module, MatrixMixer)
        shown, found = _seen(mixer, links) if offered else (None, None)
        whole = Mixing(
            layer=mixer.layer,
            mixer=mixer.kind,
            form=mixer.form,
            picture=shown,
            mass=found,
            cropped=False,
            links=links,
            tokens=batch.inputs[0].cpu().numpy(),
            roles=batch.roles[0].cpu().numpy(),
            role_names=subject.task.role_names,
        )
        results.append(whole)
        if shown is not None and shown.pool > 1:
            results.append(replace(whole, picture=_crop(mixer, shown, links), cropped=True))
    if not results:
        raise NotApplicableError("no block has a sequence mixer")
    return results


def _seen(mixer: Mixer, links: Links) -> tuple[Picture, Mass]:
    """Return what is drawn of a mixer's matrix on its first row, and where its mass lies.

    The matrix is met by blocks of rows: a long one is never whole in memory.
    """
    seq_len = mixer.x.shape[1]
    pool = pooling(len(mixer.matrix(0, slice(0, 1))), seq_len)
    parts: list[np.ndarray] = []

    def met() -> Iterator[tuple[slice, np.ndarray]]:
        for rows, tensor in mixer.blocks(0, pool):
            block = _below_diagonal(tensor.cpu().numpy(), rows.start)
            parts.append(pooled(block, pool))
            yield rows, block

    found = mass_of_blocks(met(), links)
    return picture(np.concatenate(parts, axis=1), pool), found


def picture(weights: Float[np.ndarray, "h high wide"], pool: int = 1) -> Picture:
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


def pooling(heads: int, seq_len: int) -> int:
    """Return how many entries across a cell stands for: it should not be below a pixel."""
    return math.ceil(seq_len / (SIDE // _across(heads)))


def pooled(matrix: Float[np.ndarray, "h t s"], pool: int) -> Float[np.ndarray, "h high wide"]:
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


def describe(mixing: Mixing) -> Words:
    """Put a layer's matrix in words."""
    title = f"Layer {mixing.layer} · {mixing.mixer}"
    if mixing.picture is None or mixing.mass is None:
        says = f"This layer offers no matrix: {mixing.mixer} has no matrix, values and project."
        return Words(title, says, "", says)
    shown, of_queries = mixing.picture, len(mixing.links.queries)
    heads = len(shown.weights)
    title += f" · {mixing.form}"
    ends = f"±{shown.bound:.2g}" if shown.signed else f"0 and {shown.bound:.2g}"
    reading = f"Mass is an entry's share of its row's magnitudes. Colours end at {ends}."
    reading += " Ticks on the left mark query rows."
    if len(mixing.links.values):
        reading += " Rings mark where a query meets the value it asks for."
        if _expected(mixing)[0].size > CIRCLES:
            reading += " They are many: click their name to see them."
    if mixing.cropped:
        height, width = shown.weights.shape[1:]
        (row, column), inside = shown.first, _expected(mixing)[0].size
        title += ", crop at full resolution"
        says = f"Rows {row} to {row + height - 1}, columns {column} to {column + width - 1}"
        if inside:
            says += f" hold {inside} of the {of_queries} cells where a query meets its value"
        says += ", each cell one entry of the matrix."
    else:
        says = _doing(mixing.mass)
        if shown.pool > 1:
            title += f", signed max over {shown.pool} × {shown.pool}"
    panels = "1 head" if heads == 1 else f"{heads} heads"
    return Words(title, says, reading, f"Heat map of {title}, {panels}, lower triangle. {says}")


def _doing(mass: Mass) -> str:
    """Say what a layer does most, and the numbers behind it."""
    previous = f"{_best(mass.on_previous, mass.uniform_previous)} lies on the token before"
    if not mass.on_value.size:
        return f"Of a row's mass {previous}." if mass.on_previous.size else "A single token."
    recall = f"query rows put {_best(mass.on_value, mass.uniform_value)} of their mass"
    recall += " on the value they ask for"
    write = f"value rows put {_best(mass.written, mass.uniform_written)} on their key"
    if _shows(mass.on_value, mass.uniform_value):
        return f"It recalls: {recall}; {write}."
    if _shows(mass.written, mass.uniform_written):
        return f"It binds each value to its key: {write}; {recall}."
    return f"No recall shows: {recall}; {write}."


def _shows(share: Float[np.ndarray, " h"], uniform: float) -> bool:
    """Whether some head is far enough from uniform."""
    return bool(share.max() >= uniform + SHOWS * (1 - uniform))


def _best(share: Float[np.ndarray, " h"], uniform: float) -> str:
    """Name the head with most, beside what a uniform row would have."""
    head = "" if len(share) == 1 else f"head {share.argmax()}; "
    return f"{percent(float(share.max()))} ({head}uniform: {percent(uniform)})"


def draw(mixing: Mixing) -> go.Figure | None:
    """Draw a heat map a head, row 0 on top, with a gutter on the left for the query rows."""
    shown = mixing.picture
    if shown is None:
        return None
    heads, rows, columns = shown.weights.shape
    across = _across(heads)
    down = math.ceil(heads / across)
    panel = (style.WIDTH - 74) / across
    drawn = make_subplots(
        rows=down,
        cols=across,
        horizontal_spacing=0.035,
        vertical_spacing=0.035 if down > 1 else 0,
        specs=[
            [{} if i * across + j < heads else None for j in range(across)] for i in range(down)
        ],
        figure=style.figure(height=round(84 + down * panel + 96)),
    )
    row, column = shown.first
    gutter = 0.03 * columns * shown.pool
    left, right = column - 0.5, column - 0.5 + columns * shown.pool
    top, bottom = row - 0.5, row - 0.5 + rows * shown.pool
    for head in range(heads):
        i, j = head // across + 1, head % across + 1
        k = "" if head == 0 else str(head + 1)
        drawn.add_heatmap(
            z=shown.weights[head].astype(np.float32),
            x0=left + shown.pool / 2,
            dx=shown.pool,
            y0=top + shown.pool / 2,
            dy=shown.pool,
            coloraxis="coloraxis",
            hoverongaps=False,
            hovertemplate="row %{y}, column %{x}: %{z:.3g}<extra></extra>",
            row=i,
            col=j,
        )
        _mark(drawn, mixing, (i, j), (left - gutter, left), panel / rows)
        drawn.update_xaxes(
            range=[left - gutter, right],
            constrain="domain",
            constraintoward="left",
            showticklabels=i == down,
            title_text="source position, tokens" if i == down else None,
            row=i,
            col=j,
        )
        drawn.update_yaxes(
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
            drawn.add_annotation(
                text=f"head {head}",
                xref=f"x{k} domain",
                yref=f"y{k} domain",
                x=0.97,
                y=0.97,
                xanchor="right",
                yanchor="top",
            )
    drawn.update_xaxes(showgrid=False, showline=False, ticks="")
    drawn.update_yaxes(showgrid=False, showline=False, ticks="")
    return drawn.update_layout(
        margin={"t": 84, "b": 96},
        coloraxis={
            "cmin": -shown.bound if shown.signed else 0,
            "cmax": shown.bound,
            "colorbar": {"nticks": 6},
        },
        meta={
            "tokens": mixing.tokens.tolist(),
            "roles": [mixing.role_names[i] for i in mixing.roles],
            "pool": shown.pool,
        },
    )


def _mark(
    drawn: go.Figure,
    mixing: Mixing,
    place: tuple[int, int],
    gutter: tuple[float, float],
    cell: float,
) -> None:
    """Add ticks beside the query rows, and rings where queries meet their values."""
    assert mixing.picture is not None
    shown = mixing.picture
    top, high = shown.first[0], shown.weights.shape[1] * shown.pool
    queries = mixing.links.queries
    queries = queries[(queries >= top) & (queries < top + high)]
    width = gutter[1] - gutter[0]
    ticks = [gutter[0] + 0.1 * width, gutter[0] + 0.75 * width, None]
    drawn.add_scatter(
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
    rows, columns = _expected(mixing)
    if not len(rows):
        return
    drawn.add_scatter(
        x=columns,
        y=rows,
        mode="markers",
        marker={
            "symbol": "circle-open",
            "size": min(16.0, max(7.0, 1.9 * cell)),
            "color": style.GREEN if shown.signed else style.VERMILLION,
            "line": {"width": 1.3},
        },
        name="the value asked for",
        legendgroup="values",
        showlegend=place == (1, 1),
        visible=True if len(rows) <= CIRCLES else "legendonly",
        hoverinfo="skip",
        row=place[0],
        col=place[1],
    )


def _expected(mixing: Mixing) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the picture's cells where queries meet their values."""
    assert mixing.picture is not None
    if not len(mixing.links.values):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    shown, rows, columns = mixing.picture, mixing.links.queries, mixing.links.values
    high, wide = (side * shown.pool for side in shown.weights.shape[1:])
    inside = _inside(rows, columns, shown.first, (high, wide))
    return rows[inside], columns[inside]


def _inside(
    rows: np.ndarray, columns: np.ndarray, first: tuple[int, int], size: tuple[int, int]
) -> np.ndarray:
    row, column = rows - first[0], columns - first[1]
    return (row >= 0) & (row < size[0]) & (column >= 0) & (column < size[1])


def _crop(mixer: Mixer, whole: Picture, links: Links) -> Picture:
    """Return the window of a mixer's matrix in which most queries meet their value."""
    seq_len = mixer.x.shape[1]
    side = min(seq_len, CROP // _across(len(whole.weights)))
    row, column = _corner(seq_len, side, links)
    rows = slice(row, row + side)
    block = _below_diagonal(mixer.matrix(0, rows).cpu().numpy(), row)
    weights = block[:, :, column : column + side]
    return replace(whole, weights=weights, pool=1, first=(row, column))


def _corner(seq_len: int, side: int, links: Links) -> tuple[int, int]:
    """Return the corner of the window that holds most pairs; without pairs, of the last one."""
    corners = sorted({*range(0, seq_len - side, max(1, side // 4)), seq_len - side}, reverse=True)
    if not len(links.values):
        return seq_len - side, seq_len - side
    return max(
        ((r, c) for r in corners for c in corners),
        key=lambda f: _inside(links.queries, links.values, f, (side, side)).sum(),
    )


def _across(heads: int) -> int:
    """Return how many heads stand side by side."""
    return 2 if heads in (2, 4) else min(heads, 3)


def _below_diagonal(rows: Float[np.ndarray, "h t s"], first: int = 0) -> Float[np.ndarray, "h t s"]:
    """Return a copy of rows first, first + 1, … with NaN where nothing may look."""
    return np.where(np.tri(*rows.shape[1:], k=first, dtype=bool), rows, np.float32(np.nan))
