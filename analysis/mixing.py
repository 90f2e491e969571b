"""A mixer seen as one matrix: read off a model on one row, and where its mass lies."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lab.files import RunError
from lab.hooks import HookPoint
from lab.laws import MatrixMixer
from lab.models import Block, LanguageModel
from lab.train import score
from tasks.base import IGNORE, Batch


@dataclass(frozen=True)
class Links:
    """Positions of one row that belong together.

    Attributes:
        queries: the scored positions q.
        keys: where each query's key was stored; empty when the task names no pairs.
        values: where its value was; likewise.
    """

    queries: Int[np.ndarray, " q"]
    keys: Int[np.ndarray, " pairs"]
    values: Int[np.ndarray, " pairs"]


@dataclass(frozen=True)
class Mass:
    """Where the mass |M_ij| / Σ_j |M_ij| of a matrix lies: means over rows, one a head.

    Attributes:
        on_value: from queries to their value; empty when the task names no pairs.
        on_key: from queries to their key; likewise.
        written: from values to their key; likewise.
        on_previous: from every position to the one before it.
        uniform_value: what `on_value` would be if every row were uniform: the mean 1/(q + 1).
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


@torch.no_grad()
def layer_matrices(
    model: LanguageModel, batch: Batch
) -> list[tuple[int, nn.Module, Float[np.ndarray, "h t s"] | None]]:
    """Return (block, mixer, matrix or None) of each block with a mixer, on a batch of one row.

    The mixer's input is the normed residual stream, met on its way; no layer is changed.
    """
    found: list[tuple[int, nn.Module, Float[np.ndarray, "h t s"] | None]] = []

    def look(residual: Tensor, point: HookPoint) -> None:
        layer = int(point.name.split(".")[1])
        block = model.blocks[layer]
        assert isinstance(block, Block)
        if isinstance(block.mixer, MatrixMixer) and block.norm_mixer is not None:
            try:
                matrix = block.mixer.matrix(block.norm_mixer(residual))[0]
            # A user's mixer may raise anything.
            except Exception as error:
                where = f"{type(block.mixer).__name__}.matrix"
                raise RunError(f"{where} raised {type(error).__name__}: {error}") from error
            found.append((layer, block.mixer, _below_diagonal(matrix.float().numpy())))
        elif block.mixer is not None:
            found.append((layer, block.mixer, None))

    with model.hooks([(lambda name: name.endswith("hook_resid_pre"), look)]):
        score(model, batch, "fp32")
    return found


def row_links(batch: Batch) -> Links:
    """Return the links of a batch's first row, without padding."""
    names = ("query_pos", "key_pos", "value_pos")
    if not set(names) <= batch.links.keys():
        scored = (batch.targets[0] != IGNORE).nonzero()[:, 0].numpy()
        return Links(scored, scored[:0], scored[:0])
    query, key, value = (batch.links[name][0].numpy() for name in names)
    real = query >= 0
    return Links(query[real], key[real], value[real])


def mass(matrix: Float[np.ndarray, "h t s"], links: Links) -> Mass:
    """Measure where the mass of a matrix lies; a row without any counts as zero."""
    size = np.abs(np.nan_to_num(matrix))
    share = size / np.maximum(size.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
    later = np.arange(1, matrix.shape[1])
    queries = links.queries if len(links.values) else links.queries[:0]

    def mean(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        chosen = share[:, rows, columns]
        return chosen.mean(-1) if chosen.size else np.zeros(0, share.dtype)

    def uniform(rows: np.ndarray) -> float:
        return float((1 / (rows + 1)).mean()) if rows.size else math.nan

    return Mass(
        on_value=mean(queries, links.values),
        on_key=mean(queries, links.keys),
        written=mean(links.values, links.keys),
        on_previous=mean(later, later - 1),
        uniform_value=uniform(links.queries),
        uniform_written=uniform(links.values),
        uniform_previous=uniform(later),
    )


def _below_diagonal(matrix: Float[np.ndarray, "h t s"]) -> Float[np.ndarray, "h t s"]:
    """Return a copy with NaN above the diagonal, where nothing may look."""
    rows, columns = matrix.shape[1:]
    return np.where(np.tri(rows, columns, dtype=bool), matrix, np.float32(np.nan))
