"""Rows of a task laid out to be drawn: lines of cells, what stands in each, what is right there."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from analysis.record import figure_only
from tasks.base import IGNORE, Batch, Task

MOST_ROWS = 8
LINES = 32
"""Most lines of cells, fewest rows apart; a row longer than all of them is cut to its end."""
WIDTHS = ((256, 64), (1024, 128), (math.inf, 256))
"""Up to which length of rows a line has so many cells."""


@dataclass(frozen=True)
class Rows:
    """Rows of a task, laid out.

    Attributes:
        task: its name.
        seq_len: positions of a row.
        rows: of the batch, all of which are counted.
        role_names: the task's.
        a_row: positions of each role, mean over the rows of the batch.
        scored: scored positions of a row, mean over the batch.
        scored_roles: those of each role.
        first: the first position that is shown; 0 unless rows are longer than there is room for.
        width: cells of a line.
        roles: of the rows that are shown, indices into role_names.
        tokens: what stands there, as text.
        answers: what is right there, as text; empty where nothing is scored.
    """

    task: str
    seq_len: int
    rows: int
    role_names: tuple[str, ...]
    a_row: Float[np.ndarray, " roles"]
    scored: float
    scored_roles: Float[np.ndarray, " roles"]
    first: int
    width: int
    roles: Int[np.ndarray, "n t"] = figure_only()
    tokens: tuple[tuple[str, ...], ...] = figure_only()
    answers: tuple[tuple[str, ...], ...] = figure_only()


def laid_out(task: Task, batch: Batch) -> Rows:
    """Lay out the first rows of a batch, and count the roles of all."""
    targets, roles = batch.targets.cpu().numpy(), batch.roles.cpu().numpy()
    seq_len = targets.shape[1]
    width = min(seq_len, next(width for most, width in WIDTHS if seq_len <= most))
    lines = math.ceil(seq_len / width)
    shown = slice(0, min(MOST_ROWS, max(1, LINES // lines)))
    asked = targets != IGNORE
    end = seq_len
    if lines > LINES:
        # Where rows are cut, nothing of what is asked should be.
        end = max(LINES * width, int(asked[shown].any(0).nonzero()[0].max(initial=0)) + 1)
    window = slice(max(0, end - LINES * width), end)
    names = range(len(task.role_names))

    parts = task.parts_of(batch[shown])

    def texts(tokens: Tensor) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple("" if token == IGNORE else part.text(token) for token in row)
            for part, row in zip(parts, tokens[shown, window].tolist(), strict=True)
        )

    return Rows(
        task=task.name,
        seq_len=seq_len,
        rows=len(targets),
        role_names=task.role_names,
        a_row=np.array([(roles == i).sum(1).mean() for i in names]),
        scored=float(asked.sum(1).mean()),
        scored_roles=np.array([((roles == i) & asked).sum(1).mean() for i in names]),
        first=window.start,
        width=width,
        roles=roles[shown, window],
        tokens=texts(batch.inputs),
        answers=texts(batch.targets),
    )
