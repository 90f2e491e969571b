"""Positions of a row that belong together, and how much mass a matrix puts on them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.base import IGNORE, Batch

PAIR_LINKS = ("query_pos", "key_pos", "value_pos")
"""The links of a task that stores pairs of keys and values."""


@dataclass(frozen=True)
class AnswerLinks:
    """Positions of one row that belong together.

    Attributes:
        queries: the scored positions q.
        keys: where each query's key was stored; empty if the task stores no pairs.
        values: where each query's value was stored; likewise.
    """

    queries: Int[np.ndarray, " q"]
    keys: Int[np.ndarray, " pairs"]
    values: Int[np.ndarray, " pairs"]


@dataclass(frozen=True)
class Mass:
    """Where the mass |M_ij| / Σ_j |M_ij| of a matrix lies: per head, the mean over rows of M.

    Attributes:
        on_value: from queries to their value; empty if the task stores no pairs.
        on_key: from queries to their key; likewise.
        written: from values to their key; likewise.
        on_previous: from every position to the one before it.
        uniform_value: `on_value` if every row were uniform: the mean of 1/(q + 1).
        uniform_written: likewise for `written`.
        uniform_previous: likewise for `on_previous`.
    """

    on_value: Float[np.ndarray, " asked"]
    on_key: Float[np.ndarray, " asked"]
    written: Float[np.ndarray, " asked"]
    on_previous: Float[np.ndarray, " heads"]
    uniform_value: float
    uniform_written: float
    uniform_previous: float


def find_links(batch: Batch, row: int = 0) -> AnswerLinks:
    """Return which positions of a row of a batch belong together, without padding."""
    if not has_pairs(batch):
        scored = (batch.targets[row] != IGNORE).nonzero()[:, 0].cpu().numpy()
        return AnswerLinks(scored, scored[:0], scored[:0])
    query, key, value = (link[0].cpu().numpy() for link in find_pairs(batch[row : row + 1]))
    real = query >= 0
    return AnswerLinks(query[real], key[real], value[real])


def measure_mass(matrix: Float[np.ndarray, "h t s"], links: AnswerLinks) -> Mass:
    """Measure where the mass of a matrix lies; rows of zeros count as 0."""
    return measure_mass_by_blocks([(slice(0, matrix.shape[1]), matrix)], links)


def measure_mass_by_blocks(
    blocks: Iterable[tuple[slice, Float[np.ndarray, "h _ s"]]], links: AnswerLinks
) -> Mass:
    """Measure where the mass of a matrix lies, given by blocks of rows."""
    paired = links.queries if len(links.values) else links.queries[:0]
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("value", "key", "write", "before")}
    seq_len = 0
    for rows, block in blocks:
        size = np.abs(np.nan_to_num(block))
        share = size / np.maximum(size.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
        later = np.arange(max(1, rows.start), rows.stop)
        seq_len = rows.stop
        for name, targets, sources in (
            ("value", paired, links.values),
            ("key", paired, links.keys),
            ("write", links.values, links.keys),
            ("before", later, later - 1),
        ):
            here = (targets >= rows.start) & (targets < rows.stop)
            found[name].append(share[:, targets[here] - rows.start, sources[here]])

    def mean(name: str) -> np.ndarray:
        cells = np.concatenate(found[name], axis=-1)
        return cells.mean(-1) if cells.size else np.zeros(0, cells.dtype)

    def uniform(rows: np.ndarray) -> float:
        return float((1 / (rows + 1)).mean()) if rows.size else math.nan

    return Mass(
        on_value=mean("value"),
        on_key=mean("key"),
        written=mean("write"),
        on_previous=mean("before"),
        uniform_value=uniform(links.queries),
        uniform_written=uniform(links.values),
        uniform_previous=uniform(np.arange(1, seq_len)),
    )


def has_pairs(batch: Batch) -> bool:
    """Whether the task's links name where a query's key and value were stored."""
    return set(PAIR_LINKS) <= batch.links.keys()


def find_pairs(
    batch: Batch,
) -> tuple[Int[Tensor, "b pairs"], Int[Tensor, "b pairs"], Int[Tensor, "b pairs"]]:
    """Return the positions of queries, their keys and their values: the pairs first, then −1.

    Where one of the three is missing, as for the first token of a copied string, there is no pair.
    """
    links = torch.stack([batch.links[name] for name in PAIR_LINKS])
    whole = (links >= 0).all(0)
    order = (~whole).long().argsort(dim=1, stable=True)
    query, key, value = links.masked_fill(~whole, -1).gather(2, order.expand_as(links))
    return query, key, value
