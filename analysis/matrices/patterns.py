"""Positions that a kind of head looks at, as a 0/1 matrix P, and what a uniform head puts there."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

PATTERNS = ("previous token", "duplicate token", "induction", "first token")
"""Where a head may look from position i: at i − 1; at earlier positions of the same token; at the
positions after those; at position 0, from all others."""


def sum_on_patterns(
    size: Float[Tensor, "h t s"],
    tokens: Int[Tensor, " s"],
    targets: Int[Tensor, " t"],
    offset: int = 0,
) -> tuple[Float[Tensor, "h p"], Float[Tensor, "h p"]]:
    """Return ⟨|M|, P⟩ for each of `PATTERNS`, and Σ|M| over rows in which P has a position.

    Args:
        size: |M|, or some of its rows.
        tokens: of the whole row of the batch.
        targets: the rows' positions.
        offset: how far after the positions of "induction" to look, up to i.

    Source: TransformerLens's `head_detector`, error measure "mul", except for the first token.
    """
    earlier = torch.arange(tokens.shape[0], device=tokens.device) < targets[:, None]
    same = ((tokens[targets, None] == tokens) & earlier).to(size.dtype)
    later = targets > 0
    place = torch.arange(len(targets), device=targets.device)
    on = [
        size[:, place, (targets - 1).clamp(min=0)] * later,
        torch.einsum("hts,ts->ht", size, same),
        # The position after an earlier occurrence: the last may be the target's own.
        torch.einsum("hts,ts->ht", size[..., 1 + offset :], same[:, : -1 - offset]),
        size[..., 0] * later,
    ]
    repeated = same.any(-1)
    where = torch.stack([later, repeated, repeated, later], dim=-1).to(size.dtype)
    return torch.stack(on, -1).sum(1), size.sum(-1) @ where


def compute_uniform_shares(
    tokens: Int[Tensor, " s"],
) -> tuple[Float[Tensor, " p"], Float[Tensor, " p"]]:
    """Return what a uniform causal matrix U has: ⟨U, P⟩ / ΣU over all rows, and over rows with P.

    The second is NaN where no row has a position of the pattern.
    """
    place = torch.arange(len(tokens), device=tokens.device)
    earlier = (place < place[:, None]) & (tokens[:, None] == tokens)
    counts = torch.stack([place > 0, earlier.sum(-1), earlier.sum(-1), place > 0], dim=-1).double()
    share = (counts / (place[:, None] + 1)).sum(0)
    return share / len(tokens), share / (counts > 0).sum(0)
