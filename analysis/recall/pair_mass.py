"""How much of their mass queries put on the pair they ask for, and values on their key."""

import html
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from analysis.base import Subject, Words
from analysis.links import find_pairs
from analysis.matrices.layer_matrix import SHOWS
from analysis.mixing import Mixer, collect_mixers
from analysis.plots import style
from analysis.statistics.intervals import bootstrap
from analysis.words import percent
from lab.laws import MatrixMixer
from tasks.base import count_rows

MASS_TOKENS = 16_384
"""Tokens of the rows whose matrices are read: they are quadratic, and rows are much alike."""
MASS_ROWS = 64
"""Most of those rows, however short."""
LINES = 32
"""Most lines of the figure; with more heads, each layer shows its highest."""
QUANTITIES = ("query → value", "query → key", "value → key")


@dataclass(frozen=True)
class Masses:
    """Where queries look and what values gather: shares of Σ_j |M_ij|, means over pairs.

    Attributes:
        layers: block of each head [n].
        heads: its number in the block [n].
        mixers: its mixer's class, n of them.
        share: mean share in [0, 1] of query → value, query → key and value → key, a row a head.
        interval: 95 % by resampling the rows of the batch, low and high; NaN for a single row.
        chance: what rows of equal entries would give: mean 1/(q + 1), 1/(q + 1), 1/(v + 1).
        rows: how many rows of the batch were read.
        without: layers whose mixer offers no matrix.
    """

    layers: Int[np.ndarray, " n"]
    heads: Int[np.ndarray, " n"]
    mixers: tuple[str, ...]
    share: Float[np.ndarray, "n 3"]
    interval: Float[np.ndarray, "n 3 2"]
    chance: Float[np.ndarray, " 3"]
    rows: int
    without: tuple[int, ...]


@torch.no_grad()
def masses(subject: Subject) -> Masses | None:
    """Measure every head's masses; None where no mixer offers a matrix."""
    given, seq_len = subject.batch.inputs.shape
    rows = min(given, count_rows(MASS_TOKENS, seq_len, fewest=2, most=MASS_ROWS))
    batch = subject.batch[slice(0, rows)]
    query, key, value = (link.cpu().numpy() for link in find_pairs(batch))
    rng = np.random.default_rng(subject.seed)
    layers, heads, names, shares, intervals, without = [], [], [], [], [], []
    for mixer in collect_mixers(subject.model, batch):
        if not isinstance(mixer.module, MatrixMixer):
            without.append(mixer.layer)
            continue
        # [b 3 h]: means over a row's pairs, the rows being what an interval resamples.
        by_row = np.stack(
            [_row_shares(mixer, row, query[row], key[row], value[row]) for row in range(rows)]
        )
        for head in range(by_row.shape[2]):
            layers.append(mixer.layer)
            heads.append(head)
            names.append(mixer.kind)
            shares.append(by_row[:, :, head].mean(0))
            intervals.append([bootstrap(by_row[:, i, head], rng) for i in range(3)])
    if not layers:
        return None
    real = query >= 0
    on_asked, on_stored = (
        float(np.mean([(1 / (p[row, real[row]] + 1)).mean() for row in range(rows)]))
        for p in (query, value)
    )
    return Masses(
        layers=np.array(layers),
        heads=np.array(heads),
        mixers=tuple(names),
        share=np.array(shares, dtype=np.float64),
        interval=np.array(intervals, dtype=np.float64),
        chance=np.array([on_asked, on_asked, on_stored]),
        rows=rows,
        without=tuple(without),
    )


def _row_shares(
    mixer: Mixer,
    row: int,
    query: Int[np.ndarray, " pairs"],
    key: Int[np.ndarray, " pairs"],
    value: Int[np.ndarray, " pairs"],
) -> Float[np.ndarray, "3 h"]:
    """Return the mean shares of one row of the batch, by blocks of its matrix."""
    real = query >= 0
    query, key, value = query[real], key[real], value[real]
    targets = torch.from_numpy(np.concatenate([query, query, value]))
    sources = torch.from_numpy(np.concatenate([value, key, key]))
    found: torch.Tensor | None = None
    for rows, matrix in mixer.blocks(row):
        inside = (targets >= rows.start) & (targets < rows.stop)
        if found is None:
            found = torch.zeros(len(matrix), len(targets), dtype=torch.float64)
        if not inside.any():
            continue
        local, column = (targets[inside] - rows.start).to(matrix.device), sources[inside]
        total = matrix.abs().sum(-1, dtype=torch.float64)[:, local]
        entry = matrix[:, local, column.to(matrix.device)].abs().double()
        tiny = torch.finfo(torch.float32).tiny
        found[:, inside] = (entry / total.clamp(min=tiny)).cpu()
    assert found is not None
    return found.unflatten(1, (3, -1)).mean(2).T.numpy()


def rows_of(rows: int) -> str:
    """Return how many rows, in words."""
    return "1 row" if rows == 1 else f"{rows} rows"


def in_words(found: Masses) -> Words:
    """Put masses in words."""
    title = f"Mass from queries and values to their pair, means over {rows_of(found.rows)}"
    best = [_highest(found, i) for i in range(3)]
    shows = [
        found.interval[:, i, 0].max() >= chance + SHOWS * (1 - chance)
        for i, chance in enumerate(found.chance)
    ]
    look = (
        f"query rows put {best[0]} of their mass on the value they ask for and {best[1]} on its key"
    )
    write = f"value rows put {best[2]} on their key"
    opening = "Pairs are met" if any(shows) else "No head surely stands out"
    says = f"{opening}: at most, {look}; {write}."
    reading = (
        "A dot is a head's mean share of Σ_j |M_ij|, the bar its 95 % interval over rows, the "
        "upright tick of the same colour what a uniform row would give."
    )
    if found.without:
        layers = ", ".join(map(str, found.without))
        reading += f" No matrix is offered by the mixer of layer {layers}."
    alt = f"Dots, a line for each of {len(found.heads)} heads, of three shares of mass. {says}"
    return Words(title, says, reading, alt)


def _highest(found: Masses, quantity: int) -> str:
    """Name the head with most of a quantity, beside chance."""
    i = int(found.share[:, quantity].argmax())
    share, chance = (percent(float(s)) for s in (found.share[i, quantity], found.chance[quantity]))
    return f"{share} ({_head(found, i)}; uniform: {chance})"


def _head(found: Masses, i: int) -> str:
    """Name a head: by its layer alone where that has no other."""
    alone = (found.layers == found.layers[i]).sum() == 1
    return f"layer {found.layers[i]}" if alone else f"layer {found.layers[i]} head {found.heads[i]}"


def drawing(found: Masses) -> go.Figure:
    """Draw a line a head; on it a dot for each quantity, and a tick where chance is."""
    lines = _lines(found)
    names = [html.escape(_head(found, int(line[0]))) for line in lines]
    if len(lines) < len(found.heads):
        names = [f"layer {found.layers[line[0]]}, highest head" for line in lines]
    fig = style.new_figure(height=130 + max(2, len(lines)) * 54)
    for quantity, symbol in enumerate(("circle", "square", "diamond")):
        best = [int(line[found.share[line, quantity].argmax()]) for line in lines]
        share, ends = found.share[best, quantity], found.interval[best, quantity]
        height = np.arange(len(lines)) + 0.24 * (quantity - 1)
        fig.add_scatter(
            x=share,
            y=height,
            mode="markers",
            marker={"symbol": symbol, "size": 9},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": np.nan_to_num(np.maximum(0, ends[:, 1] - share)),
                "arrayminus": np.nan_to_num(np.maximum(0, share - ends[:, 0])),
                "thickness": 1.5,
                "width": 4,
            },
            cliponaxis=False,
            name=QUANTITIES[quantity],
            customdata=names,
            hovertemplate=f"%{{customdata}}, {QUANTITIES[quantity]}: %{{x:.2%}}<extra></extra>",
        )
        fig.add_scatter(
            x=np.full(len(lines), found.chance[quantity]),
            y=height,
            mode="markers",
            marker={
                "symbol": "line-ns-open",
                "size": 13,
                "color": style.MUTED,
                "line": {"width": 2},
            },
            cliponaxis=False,
            name="a uniform row",
            showlegend=quantity == 0,
            legendrank=2000,
            hovertemplate=f"uniform, {QUANTITIES[quantity]}: %{{x:.2%}}<extra></extra>",
        )
    fig.update_xaxes(title_text="share of the row's mass", tickformat=".0%", range=[-0.02, 1.02])
    fig.update_yaxes(
        tickvals=np.arange(len(lines)),
        ticktext=names,
        range=[len(lines) - 0.5, -0.5],
        showgrid=False,
        automargin="left",
    )
    return fig.update_layout(margin_t=84)


def _lines(found: Masses) -> list[Int[np.ndarray, " heads"]]:
    """Return the heads that share a line: one, or a layer's where there are too many."""
    if len(found.heads) <= LINES:
        return [np.array([i]) for i in range(len(found.heads))]
    return [np.flatnonzero(found.layers == layer) for layer in np.unique(found.layers)]
