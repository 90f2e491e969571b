"""Where does each position look? Every mixer's matrix [h t s] on one test row."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float

from analysis.base import NotApplicableError, Subject, Words
from analysis.links import AnswerLinks, Mass, find_links, measure_mass_by_blocks
from analysis.mixing import Mixer, collect_mixers
from analysis.plots.heatmaps import (
    CIRCLES,
    Mixing,
    Picture,
    choose_pool,
    count_columns,
    find_expected,
    lie_inside,
    make_picture,
    pool_matrix,
)
from analysis.plots.heatmaps import (
    draw as draw,
)
from analysis.words import percent
from lab.laws import MatrixMixer

TITLE = "What each layer mixes, on the first test row"
CROP = 256
"""Cells across the full-resolution crop that goes with a pooled matrix."""
SHOWS = 0.25
"""How far from uniform (0) to all (1) a mass must be for a layer to be said to do something."""


@torch.no_grad()
def measure(subject: Subject) -> list[Mixing]:
    """Return each mixer's matrix on the subject's first row; of a large one also a crop.

    Raises:
        NotApplicableError: for a model without mixers.
    """
    batch = subject.batch[:1]
    links = find_links(batch)
    results = []
    for mixer in collect_mixers(subject.model, batch):
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


def _seen(mixer: Mixer, links: AnswerLinks) -> tuple[Picture, Mass]:
    """Return what is drawn of a mixer's matrix on its first row, and where its mass lies.

    The matrix is met by blocks of rows: a long one is never whole in memory.
    """
    seq_len = mixer.x.shape[1]
    pool = choose_pool(len(mixer.matrix(0, slice(0, 1))), seq_len)
    parts: list[np.ndarray] = []

    def met() -> Iterator[tuple[slice, np.ndarray]]:
        for rows, tensor in mixer.blocks(0, pool):
            block = _below_diagonal(tensor.cpu().numpy(), rows.start)
            parts.append(pool_matrix(block, pool))
            yield rows, block

    found = measure_mass_by_blocks(met(), links)
    return make_picture(np.concatenate(parts, axis=1), pool), found


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
        if find_expected(mixing)[0].size > CIRCLES:
            reading += " They are many: click their name to see them."
    if mixing.cropped:
        height, width = shown.weights.shape[1:]
        (row, column), held = shown.first, find_expected(mixing)[0].size
        title += ", crop at full resolution"
        says = f"Rows {row} to {row + height - 1}, columns {column} to {column + width - 1}"
        if held:
            says += f" hold {held} of the {of_queries} cells where a query meets its value"
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


def _crop(mixer: Mixer, whole: Picture, links: AnswerLinks) -> Picture:
    """Return the window of a mixer's matrix in which most queries meet their value."""
    seq_len = mixer.x.shape[1]
    side = min(seq_len, CROP // count_columns(len(whole.weights)))
    row, column = _corner(seq_len, side, links)
    rows = slice(row, row + side)
    block = _below_diagonal(mixer.matrix(0, rows).cpu().numpy(), row)
    weights = block[:, :, column : column + side]
    return replace(whole, weights=weights, pool=1, first=(row, column))


def _corner(seq_len: int, side: int, links: AnswerLinks) -> tuple[int, int]:
    """Return the corner of the window that holds most pairs; without pairs, of the last one."""
    corners = sorted({*range(0, seq_len - side, max(1, side // 4)), seq_len - side}, reverse=True)
    if not len(links.values):
        return seq_len - side, seq_len - side
    return max(
        ((r, c) for r in corners for c in corners),
        key=lambda f: lie_inside(links.queries, links.values, f, (side, side)).sum(),
    )


def _below_diagonal(rows: Float[np.ndarray, "h t s"], first: int = 0) -> Float[np.ndarray, "h t s"]:
    """Return a copy of rows first, first + 1, … with NaN where nothing may look."""
    return np.where(np.tri(*rows.shape[1:], k=first, dtype=bool), rows, np.float32(np.nan))
