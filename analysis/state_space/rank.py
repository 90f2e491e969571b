"""In how many directions does an SSD layer's state carry the past? Rank across a cut of the row.

    M̃[i ≥ m, j < m] = C_i exp(Σ_{m..i} a) · (B_j dt_j exp(Σ_{j+1..m−1} a))ᵀ

Everything that later tokens can know of earlier ones passes through this block; its rank is at most
d_state. The effective rank, exp H(σ / Σσ), is the number of directions that are really used.

Source: Dao and Gu 2024, semiseparable matrices; Roy and Vetterli 2007, effective rank.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import NotApplicableError, Subject, describe, draw
from analysis.state_space.recurrence import (
    Recurrence,
    choose_rows,
    collect_recurrences,
    index_heads,
    load_initial_model,
)
from analysis.state_space.spectrum import StateSpectrum

__all__ = ["TITLE", "describe", "draw", "effective_rank", "measure", "rank"]

TITLE = "Rank of the states"
SPLITS = tuple(i / 16 for i in range(1, 16))
"""Where a row is cut in two, as shares of its length."""


@torch.no_grad()
def measure(subject: Subject) -> list[StateSpectrum]:
    """Return the spectrum of all SSD layers.

    Raises:
        NotApplicableError: for a model without SSD, or rows of one token.
    """
    batch = choose_rows(subject)
    seq_len = batch.inputs.shape[1]
    splits = sorted({m for share in SPLITS if 0 < (m := round(share * seq_len)) < seq_len})
    if not splits:
        raise NotApplicableError("rows of one token cannot be cut in two")
    found = collect_recurrences(subject.model, batch)
    layers, heads = index_heads(found)
    sigmas = _compute_sigmas(found, splits)
    widths = np.repeat([layer.B.shape[-1] for layer in found], [layer.n_heads for layer in found])
    effective = _average(sigmas, lambda sigma, _: effective_rank(sigma))
    at_start = np.full_like(effective, np.nan)
    initial = load_initial_model(subject)
    if initial is not None:
        del found  # memory need not hold the states of both
        start = _compute_sigmas(collect_recurrences(initial, batch), splits)
        at_start = _average(start, lambda sigma, _: effective_rank(sigma))
    return [
        StateSpectrum(
            layers=layers,
            heads=heads,
            splits=np.array(splits),
            bound=np.array([np.minimum(widths, min(m, seq_len - m)) for m in splits]),
            rank=_average(sigmas, lambda sigma, m: rank(sigma, (m, seq_len - m))),
            effective_rank=effective,
            initial_effective_rank=at_start,
            rows=len(batch.inputs),
            values=_scale(sigmas[splits[len(splits) // 2]]),
        )
    ]


def rank(values: Float[Tensor, "... k"], sides: tuple[int, int]) -> Int[Tensor, "..."]:
    """Return how many singular values are above σ_max · max(sides) · ε of fp32, numpy's threshold.

    ε is that of fp32 even for fp64 values, because B, C and the decays are computed in fp32.
    """
    least = values.amax(-1, keepdim=True) * max(sides) * torch.finfo(torch.float32).eps
    return (values > least).sum(-1)


def effective_rank(values: Float[Tensor, "... k"]) -> Float[Tensor, "..."]:
    """Return exp H(σ / Σσ), in [1, k]; NaN where all are 0.

    Source: Roy and Vetterli 2007.
    """
    share = values / values.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def _compute_sigmas(found: Sequence[Recurrence], splits: Sequence[int]) -> dict[int, list[Tensor]]:
    """Return the singular values [b h k] of each layer, by split."""
    return {m: [layer.singular_values(m) for layer in found] for m in splits}


def _average(
    sigmas: dict[int, list[Tensor]], measure: Callable[[Tensor, int], Tensor]
) -> Float[np.ndarray, "m h"]:
    """Return a number of each spectrum: mean over rows that have one."""
    means = [
        torch.cat([measure(sigma, m).double().nanmean(0) for sigma in layers])
        for m, layers in sigmas.items()
    ]
    return torch.stack(means).cpu().numpy()


def _scale(sigmas: Sequence[Tensor]) -> Float[np.ndarray, "h k"]:
    """Return σ / σ_max, geometric mean over rows, NaN beyond the number that a head has."""
    scaled = [(sigma / sigma[..., :1]).log().mean(0).exp().cpu().numpy() for sigma in sigmas]
    most = max(sigma.shape[-1] for sigma in scaled)
    padded = [
        np.pad(sigma, ((0, 0), (0, most - sigma.shape[-1])), constant_values=np.nan)
        for sigma in scaled
    ]
    return np.concatenate(padded)
