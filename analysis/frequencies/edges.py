"""Edges between a target and an earlier source, and what each frequency adds to their scores.

Axis letters as in `analysis.frequencies.rotation`, and e edge (row, t, s).
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from analysis.frequencies.rotation import RotatedSides
from analysis.links import has_pairs
from tasks.base import Batch

EDGES = 4096
"""Maximum number of edges of a kind that are measured."""
ANSWERS = {
    "query → value": ("query_pos", "value_pos"),
    "value → key": ("value_pos", "key_pos"),
}
"""The kinds of edges that recall can use, with the links that they join."""
ROUNDING = 1e-5
"""Spread of scores, relative to their size, below which edges have equal scores."""


@dataclass(frozen=True)
class Edges:
    """Pairs of a target and an earlier source.

    Attributes:
        rows: row of the batch.
        targets: position of the target.
        sources: position of the source, ≤ target.
    """

    rows: Int[Tensor, " e"]
    targets: Int[Tensor, " e"]
    sources: Int[Tensor, " e"]

    @property
    def lags(self) -> Int[Tensor, " e"]:
        """Target less source."""
        return self.targets - self.sources


def multiply_sides(sides: RotatedSides, edges: Edges) -> Complex[Tensor, "e c m"]:
    """Return q̄k of each edge; the score is the sum of Re(q̄k · `sides.turn(lag)`)."""
    q = sides.q[edges.rows, edges.targets]
    return q.conj() * sides.k[edges.rows, edges.sources]


def link_edges(batch: Batch, target: str, source: str) -> Edges:
    """Return the edges between two links of a batch, without padding."""
    targets, sources = batch.links[target], batch.links[source]
    real = (targets >= 0) & (sources >= 0)
    return Edges(real.nonzero()[:, 0], targets[real], sources[real])


def sample_placebo(edges: Edges, seq_len: int, rng: np.random.Generator) -> Edges:
    """Return a placebo of some edges: for each, a random one of equal lag in the same row."""
    lags = edges.lags.cpu().numpy()
    targets = torch.from_numpy(rng.integers(lags, seq_len)).to(edges.rows.device)
    return Edges(edges.rows, targets, targets - edges.lags)


def sample_edges(batch: Batch, count: int, rng: np.random.Generator) -> Edges:
    """Return edges drawn uniformly from all causal ones."""
    n_rows, seq_len = batch.inputs.shape
    rows = rng.integers(0, n_rows, count)
    # The lower triangle in the order of its rows: target t starts at entry t(t + 1)/2.
    entry = rng.integers(0, seq_len * (seq_len + 1) // 2, count)
    starts = np.arange(seq_len) * (np.arange(seq_len) + 1) // 2
    targets = np.searchsorted(starts, entry, side="right") - 1
    parts = (rows, targets, entry - starts[targets])
    return Edges(*(torch.from_numpy(part).to(batch.inputs.device) for part in parts))


def score_edges(sides: RotatedSides, edges: Edges) -> Float[np.ndarray, "e c m"]:
    """Return what each frequency adds to the score of each edge."""
    turned = multiply_sides(sides, edges) * sides.turn(edges.lags)[:, None]
    return turned.real.double().cpu().numpy()


def measure_score_spread(scores: Float[np.ndarray, "e c m"]) -> Float[np.ndarray, " c"]:
    """Return the standard deviation of the scores; infinite where they differ by rounding alone."""
    spread = scores.sum(-1).std(0)
    return np.where(spread > ROUNDING * np.abs(scores).sum(-1).mean(0), spread, np.inf)


def sample_answers(batch: Batch, rng: np.random.Generator) -> dict[str, Edges]:
    """Return at most `EDGES` random edges of each kind that recall can use; none without pairs."""
    if not has_pairs(batch):
        return {}
    kinds = {}
    for name, links in ANSWERS.items():
        edges = link_edges(batch, *links)
        chosen = torch.from_numpy(np.sort(rng.permutation(len(edges.rows))[:EDGES]))
        kinds[name] = Edges(*(z[chosen.to(z.device)] for z in vars(edges).values()))
    return kinds
