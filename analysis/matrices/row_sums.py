"""Sums over one head's matrix on one row: mass on patterns, entropy, distance."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.matrices.moves import Moves
from analysis.matrices.patterns import sum_on_patterns
from analysis.mixing import Mixer


@dataclass(frozen=True)
class RowSums:
    """Sums over the entries of one mixer's matrix M on one row of the batch, per head.

    Attributes:
        mass: Σ|M|.
        on_patterns: ⟨|M|, P⟩ for each of `PATTERNS`.
        with_patterns: Σ|M| over the rows of M in which the pattern has a position.
        moved_on_patterns: `on_patterns` with entries weighted by the norm of what they move; NaN
            where project is not linear.
        moved_with_patterns: likewise.
        entropy: of |M| normalised, nats; mean over rows of M that have any mass.
        effective_keys: mean of e^H over the same rows.
        distance: Σ|M|(i − j) / Σ|M|, tokens.
    """

    mass: Float[Tensor, " h"]
    on_patterns: Float[Tensor, "h p"]
    with_patterns: Float[Tensor, "h p"]
    moved_on_patterns: Float[Tensor, "h p"]
    moved_with_patterns: Float[Tensor, "h p"]
    entropy: Float[Tensor, " h"]
    effective_keys: Float[Tensor, " h"]
    distance: Float[Tensor, " h"]


def sum_row(
    mixer: Mixer, row: int, tokens: Int[Tensor, " s"], rng: np.random.Generator, offset: int = 0
) -> RowSums:
    """Measure a mixer's matrix on one row of the batch, block by block.

    `offset` says how far after its positions the pattern of induction lies.

    Raises:
        RunError: when a mixer that is not the lab's own raises.
    """
    moves = Moves.of(mixer, row, rng)
    total: dict[str, Tensor] = {}
    filled = torch.zeros(())

    def add(name: str, part: Tensor) -> None:
        total[name] = total[name] + part if name in total else part

    for rows, matrix in mixer.blocks(row):
        size = matrix.abs()
        targets = torch.arange(rows.start, rows.stop, device=size.device)
        mass = size.sum(-1)
        entropy = compute_entropy(size, mass)
        add("mass", mass.sum(-1))
        add("entropy", entropy.sum(-1))
        add("effective_keys", torch.where(mass > 0, entropy.exp(), 0.0).sum(-1))
        filled = filled + (mass > 0).sum(-1)
        back = targets * mass - size @ torch.arange(size.shape[-1], device=size.device).float()
        add("distance", back.sum(-1))
        on, within = sum_on_patterns(size, tokens, targets, offset)
        add("on_patterns", on)
        add("with_patterns", within)
        chosen, norms = moves.compute_norms(targets)
        moved = size[:, chosen] * norms
        on, within = sum_on_patterns(moved, tokens, targets[chosen], offset)
        add("moved_on_patterns", on)
        add("moved_with_patterns", within)
    for name in ("entropy", "effective_keys"):
        total[name] = total[name] / filled
    total["distance"] = total["distance"] / total["mass"]
    return RowSums(**total)


def compute_entropy(
    size: Float[Tensor, "h t s"], mass: Float[Tensor, "h t"]
) -> Float[Tensor, "h t"]:
    """Return H = −Σ p ln p of p = |M| / Σ|M|, nats, from |M| and its row sums; 0 for a row of 0."""
    least = torch.finfo(size.dtype).tiny
    spread = torch.special.entr(size).sum(-1) / mass.clamp(min=least)
    # Rounding may take the entropy of a single entry below 0.
    return torch.where(mass > 0, spread + mass.clamp(min=least).log(), 0.0).clamp(min=0)
