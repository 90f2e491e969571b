"""What does each head look at, and how widely? Any mixer, attention and SSD alike, by its matrix.

    score        ⟨|M|, P⟩ / Σ|M|, P a 0/1 matrix of where a kind of head would look
    spread       H of |M| normalised, row by row, and e^H keys
    distance     Σ|M|(i − j) / Σ|M|

M is the matrix that the layer applies. It is signed for SSD, with D on its diagonal; here |M|.
"""

import numpy as np
import torch
from jaxtyping import Float

from analysis.base import NotApplicableError, Subject, describe, draw
from analysis.links import find_offsets
from analysis.matrices.head_reach import HeadReach
from analysis.matrices.head_scores import HeadScores
from analysis.matrices.moves import GATED_TARGETS, is_gated
from analysis.matrices.patterns import PATTERNS, compute_uniform_shares
from analysis.matrices.row_sums import RowSums, sum_row
from analysis.mixing import collect_mixers
from lab.intervals import Z95
from lab.laws import MatrixMixer

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "What each head looks at"
ENTRIES = 2**27
"""Matrix entries that are read in all; they decide how many rows of the batch are used."""


@torch.no_grad()
def measure(subject: Subject) -> list[HeadScores | HeadReach]:
    """Return the heads' scores, and their reach.

    Raises:
        NotApplicableError: where no block's mixer offers a matrix.
        RunError: when a mixer that is not the lab's own raises.
    """
    found = [
        mixer
        for mixer in collect_mixers(subject.model, subject.batch)
        if isinstance(mixer.module, MatrixMixer)
    ]
    if not found:
        raise NotApplicableError("no block has a mixer that offers a matrix")
    seq_len = subject.batch.inputs.shape[1]
    n_heads = [len(mixer.matrix(0, slice(0, 1))) for mixer in found]
    rows = min(len(subject.batch.inputs), max(1, ENTRIES // (sum(n_heads) * seq_len**2)))
    rng, offsets = np.random.default_rng(subject.seed), find_offsets(subject)
    by_row: list[list[RowSums]] = [
        [
            sum_row(mixer, row, subject.batch.inputs[row], rng, offsets.get(mixer.layer)[0])
            for row in range(rows)
        ]
        for mixer in found
    ]

    def gather(name: str) -> np.ndarray:
        """Return a quantity of all heads, [row h …]."""
        layers = [torch.stack([getattr(row, name) for row in layer]) for layer in by_row]
        return torch.cat(layers, dim=1).double().cpu().numpy()

    layers = np.repeat([mixer.layer for mixer in found], n_heads)
    heads = np.concatenate([np.arange(n) for n in n_heads])
    kinds = tuple(np.repeat([mixer.kind for mixer in found], n_heads).tolist())
    uniform = [compute_uniform_shares(subject.batch.inputs[row]) for row in range(rows)]
    score_chance, chance = (torch.stack(part).cpu().numpy() for part in zip(*uniform, strict=True))
    on, mass = gather("on_patterns"), gather("mass")
    shares = _divide(on, gather("with_patterns"))
    moved = _divide(gather("moved_on_patterns"), gather("moved_with_patterns"))
    # A row of the batch in which no token repeats says nothing about duplicates.
    shares, moved = (np.where(np.isnan(chance)[:, None], np.nan, z) for z in (shares, moved))
    place = np.arange(seq_len)
    return [
        HeadScores(
            layers=layers,
            heads=heads,
            mixers=kinds,
            patterns=PATTERNS,
            scores=_average(_divide(on, mass[..., None])),
            score_chance=_average(score_chance),
            shares=_average(shares),
            chance=_average(chance),
            half_widths=_compute_half_widths(shares),
            moved_shares=_average(moved),
            sampled=seq_len > GATED_TARGETS and any(is_gated(mixer.module) for mixer in found),
            rows=rows,
            offsets=offsets,
        ),
        HeadReach(
            layers=layers,
            heads=heads,
            mixers=kinds,
            entropy=_average(gather("entropy")),
            effective_keys=_average(gather("effective_keys")),
            distance=_average(gather("distance")),
            uniform_entropy=float(np.log(place + 1).mean()),
            uniform_keys=float((place + 1).mean()),
            uniform_distance=float((place / 2).mean()),
            rows=rows,
        ),
    ]


def _divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, NaN where whole is not positive."""
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)


def _average(values: Float[np.ndarray, "n ..."]) -> Float[np.ndarray, "..."]:
    """Return the mean over rows of the batch that have a value, NaN where none has."""
    known = ~np.isnan(values)
    return _divide(np.where(known, values, 0.0).sum(0), known.sum(0).astype(float))


def _compute_half_widths(values: Float[np.ndarray, "n ..."]) -> Float[np.ndarray, "..."]:
    """Return half the width of that mean's 95 % interval, NaN for fewer than two rows."""
    count = (~np.isnan(values)).sum(0).astype(float)
    square = _average((values - _average(values)) ** 2)
    return Z95 * np.sqrt(_divide(square, np.maximum(count - 1, 0)))
