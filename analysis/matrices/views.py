"""What is drawn of a mixer's matrix: all of it, pooled, or a crop at full resolution."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from analysis.links import AnswerLinks, Mass, measure_mass_by_blocks
from analysis.mixing import Mixer
from analysis.plots.heatmaps import (
    Picture,
    choose_pool,
    count_columns,
    lie_inside,
    make_picture,
    pool_matrix,
)

CROP = 256
"""Cells across the crop, all panels together."""


def view_whole(mixer: Mixer, links: AnswerLinks) -> tuple[Picture, Mass]:
    """Return the pooled picture of a mixer's matrix on its first row, and where its mass lies.

    The matrix is computed by blocks of rows: a long one is never whole in memory.
    """
    seq_len = mixer.x.shape[1]
    pool = choose_pool(len(mixer.matrix(0, slice(0, 1))), seq_len)
    parts: list[np.ndarray] = []

    def keep_pooled() -> Iterator[tuple[slice, np.ndarray]]:
        for rows, tensor in mixer.blocks(0, pool):
            block = _blank_future(tensor.cpu().numpy(), rows.start)
            parts.append(pool_matrix(block, pool))
            yield rows, block

    mass = measure_mass_by_blocks(keep_pooled(), links)
    return make_picture(np.concatenate(parts, axis=1), pool), mass


def view_crop(mixer: Mixer, whole: Picture, links: AnswerLinks) -> Picture:
    """Return the window of a mixer's matrix in which most queries meet their value."""
    seq_len = mixer.x.shape[1]
    side = min(seq_len, CROP // count_columns(len(whole.weights)))
    row, column = _find_corner(seq_len, side, links)
    block = _blank_future(mixer.matrix(0, slice(row, row + side)).cpu().numpy(), row)
    weights = block[:, :, column : column + side]
    return replace(whole, weights=weights, pool=1, first=(row, column))


def _find_corner(seq_len: int, side: int, links: AnswerLinks) -> tuple[int, int]:
    """Return the corner of the window with most pairs; without pairs, of the last window."""
    corners = sorted({*range(0, seq_len - side, max(1, side // 4)), seq_len - side}, reverse=True)
    if not len(links.values):
        return seq_len - side, seq_len - side
    return max(
        ((r, c) for r in corners for c in corners),
        key=lambda f: lie_inside(*links.expected, f, (side, side)).sum(),
    )


def _blank_future(rows: Float[np.ndarray, "h t s"], first: int) -> Float[np.ndarray, "h t s"]:
    """Return a copy of rows first, first + 1, … with NaN at later positions than the row's own."""
    return np.where(np.tri(*rows.shape[1:], k=first, dtype=bool), rows, np.float32(np.nan))
