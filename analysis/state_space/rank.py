"""In how many directions does a layer's state carry the past? Rank across a cut of the row.

    M̃[i ≥ m, j < m] = C_i exp(Σ_{m..i} a) · (B_j dt_j exp(Σ_{j+1..m−1} a))ᵀ

This is SSD's; other layers have factors of their own. Everything that later tokens can know of
earlier ones passes through this block; its rank is at most d_state. The effective rank, exp H(σ /
Σσ), is the number of directions that are really used.

Source: Dao and Gu 2024, semiseparable matrices; Roy and Vetterli 2007, effective rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Curves, curves, make_head_lines, name_heads
from analysis.plain import figure_only
from analysis.state_space.recurrence import (
    StateRecurrence,
    choose_rows,
    collect_recurrences,
    index_heads,
    load_initial_model,
)
from analysis.words import format_digits, format_range

__all__ = ["TITLE", "effective_rank", "measure", "rank"]

TITLE = "Rank of the states"
SPLITS = tuple(i / 16 for i in range(1, 16))
"""Where a row is cut in two, as shares of its length."""
LEAST = 1e-8
"""Where the axis of singular values ends at the latest: below is fp32's rounding."""


@dataclass(frozen=True)
class StateSpectrum(Finding):
    """The singular values of what is carried past a cut m, M̃[i ≥ m, j < m], at several cuts.

    Attributes:
        layers, heads: as in `analysis.state_space.StateMemory`.
        splits: m, tokens.
        bound: min(d_state, m, T − m), the largest possible rank.
        rank: numerical rank, at σ_max · max(m, T − m) · ε of fp32; mean over rows.
        effective_rank: exp H(σ / Σσ), mean over rows.
        initial_effective_rank: of the run's initial weights; NaN without a run.
        values: σ / σ_max at the middle split, largest first, geometric mean over rows; 0 beyond
            the number that a head has.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    splits: Int[np.ndarray, " m"]
    bound: Int[np.ndarray, "m h"]
    rank: Float[np.ndarray, "m h"]
    effective_rank: Float[np.ndarray, "m h"]
    initial_effective_rank: Float[np.ndarray, "m h"]
    values: Float[np.ndarray, "h k"] = figure_only()

    title = "Spectrum of what states carry past the middle of a row"
    reading = (
        "Singular values σ of M̃[i ≥ m, j < m] at the middle cut m, as shares of the largest, "
        "geometric mean over rows of the batch: a steep line means that the past is carried in few "
        "directions. At most min(d_state, m, T − m) are not zero. Effective rank is exp H(σ / Σσ); "
        "numerical rank counts σ above σ_max · max(m, T − m) · ε of fp32. The lower panel shows "
        "effective rank by where the row is cut. Of many heads, those of lowest and highest "
        "effective rank are named."
    )

    @property
    def middle(self) -> int:
        """Index of the middle split."""
        return len(self.splits) // 2

    @property
    def extremes(self) -> tuple[int, int]:
        """The heads of lowest and of highest effective rank at the middle split."""
        effective = self.effective_rank[self.middle]
        low, high = np.nan_to_num(effective, nan=np.inf), np.nan_to_num(effective)
        return int(low.argmin()), int(high.argmax())

    @property
    def says(self) -> str:
        """Which effective ranks the heads have in the middle of a row."""
        effective, cut = self.effective_rank[self.middle], f"token {self.splits[self.middle]:,}"
        if np.isnan(effective).all():
            return f"Nothing is carried past {cut}: all entries of the matrix there are 0."
        return (
            f"Effective ranks of what is carried past {cut}: {format_range(effective)} of at most "
            f"{format_range(self.bound[self.middle])}."
        )

    def numbers(self) -> Table:
        """Return the heads of lowest and highest effective rank, and how many have full rank."""
        at, names = self.middle, name_heads(self.layers, self.heads)
        now, start = self.effective_rank[at], self.initial_effective_rank[at]
        rows = [
            (
                f"{end} effective rank",
                names[head],
                format_digits(now[head]),
                format_digits(start[head]),
            )
            for end, head in zip(("lowest", "highest"), self.extremes, strict=True)
        ]
        # A mean over rows below the bound is not full in some row.
        full = int((self.rank[at] > self.bound[at] - 1e-6).sum())
        idle = int(np.isnan(now).sum())
        rows.append(("numerical rank full in every row", f"{full} of {len(now)}", "", ""))
        rows.append(("carry nothing", f"{idle} of {len(now)}", "", ""))
        return Table(("", "heads", "now", "step 0"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw σ / σ_max by index, and effective rank by cut, one line per head."""
        names, index = name_heads(self.layers, self.heads), np.arange(1, self.values.shape[1] + 1)
        # Zeros have no place on a logarithmic axis.
        values = np.where(self.values > 0, self.values, np.nan)
        upper = make_head_lines(names, index, values, self.extremes)
        lower = make_head_lines(names, self.splits, self.effective_rank.T, self.extremes)
        least = np.nanmin(values, initial=1.0, where=values > LEAST)
        sigma = Axis("σ / σ_max", scale="log", ends=(float(least) / 2, 1.6))
        top = 1.08 * float(np.nanmax(self.effective_rank, initial=1.0))
        effective, cut = Axis("effective rank", ends=(0, top)), Axis("cut m, tokens")
        panels = [Curves(upper, sigma), Curves(lower, effective, x=cut, height=160)]
        return curves(panels, Axis("index of the singular value, from 1"))


@torch.no_grad()
def measure(subject: Subject) -> list[StateSpectrum]:
    """Return the spectrum of all layers that hold a state.

    Raises:
        NotApplicableError: for a model without such a layer, or rows of one token.
    """
    batch = choose_rows(subject)
    seq_len = batch.inputs.shape[1]
    splits = sorted({m for share in SPLITS if 0 < (m := round(share * seq_len)) < seq_len})
    if not splits:
        raise NotApplicableError("rows of one token cannot be cut in two")
    initial = load_initial_model(subject)
    start = None
    if initial is not None:
        start = _compute_sigmas(collect_recurrences(initial, batch), splits)
        start = _average([effective_rank(sigma) for sigma in start])
    found = collect_recurrences(subject.model, batch)
    layers, heads = index_heads(found)
    widths = np.repeat([layer.width for layer in found], [layer.n_heads for layer in found])
    sigmas = _compute_sigmas(found, splits)
    effective = _average([effective_rank(sigma) for sigma in sigmas])
    middle = sigmas[len(splits) // 2]
    return [
        StateSpectrum(
            layers=layers,
            heads=heads,
            splits=np.array(splits),
            bound=np.array([np.minimum(widths, min(m, seq_len - m)) for m in splits]),
            rank=_average(
                [rank(sigma, (m, seq_len - m)) for m, sigma in zip(splits, sigmas, strict=True)]
            ),
            effective_rank=effective,
            initial_effective_rank=np.full_like(effective, np.nan) if start is None else start,
            values=(middle / middle[..., :1]).log().mean(0).exp().cpu().numpy(),
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


def _compute_sigmas(
    found: Sequence[StateRecurrence], splits: Sequence[int]
) -> list[Float[Tensor, "b h k"]]:
    """Return the singular values of all heads by split, those of smaller states padded with 0."""
    sigmas = []
    for m in splits:
        layers = [layer.singular_values(m) for layer in found]
        most = max(sigma.shape[-1] for sigma in layers)
        sigmas.append(torch.cat([F.pad(sigma, (0, most - sigma.shape[-1])) for sigma in layers], 1))
    return sigmas


def _average(numbers: Sequence[Shaped[Tensor, "b h"]]) -> Float[np.ndarray, "m h"]:
    """Return the means over rows that have a number."""
    return torch.stack(list(numbers)).double().nanmean(1).cpu().numpy()
