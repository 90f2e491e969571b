"""In how many directions does an SSD layer's state carry the past? Rank across a cut of the row.

    M̃[i ≥ m, j < m] = C_i exp(Σ_{m..i} a) · (B_j dt_j exp(Σ_{j+1..m−1} a))ᵀ

All that later tokens can know of earlier ones goes through this block; its rank is at most d_state.
The effective rank, exp H(σ / Σσ), says in how many directions it really goes.

Source: Dao and Gu 2024, semiseparable matrices; Roy and Vetterli 2007, effective rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from analysis.base import NotApplicableError, Subject, Words
from analysis.plots import style
from analysis.plots.heads import NAMED, add_head_lines
from analysis.record import figure_only
from analysis.state_space.recurrence import Recurrence, effective_rank, names, rank, recurrences

TITLE = "Rank of the states"
SPLITS = tuple(i / 16 for i in range(1, 16))
"""Where a row is cut in two, as shares of its length."""
LEAST = 1e-8
"""Where the axis of singular values ends at the latest: below is fp32's rounding."""


@dataclass(frozen=True)
class Spectrum:
    """The singular values of what is carried past a cut m, M̃[i ≥ m, j < m], at several cuts.

    Attributes:
        layers, heads, rows: as in `analysis.state_space.words.Memory`.
        splits: m, tokens.
        bound: min(d_state, m, T − m), the largest rank there can be.
        rank: numerical rank, at σ_max · max(m, T − m) · ε of fp32; mean over rows.
        effective_rank: exp H(σ / Σσ), mean over rows.
        initial_effective_rank: of the run's initial weights; NaN without a run.
        values: σ / σ_max at the middle split, largest first, NaN beyond a head's own: geometric
            mean over rows.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    splits: Int[np.ndarray, " m"]
    bound: Int[np.ndarray, "m h"]
    rank: Float[np.ndarray, "m h"]
    effective_rank: Float[np.ndarray, "m h"]
    initial_effective_rank: Float[np.ndarray, "m h"]
    rows: int
    values: Float[np.ndarray, "h k"] = figure_only()


@torch.no_grad()
def measure(subject: Subject) -> list[Spectrum]:
    """Return the spectrum of all SSD layers.

    Raises:
        NotApplicableError: for a model without SSD, or rows of one token.
    """
    found, before, batch = recurrences(subject)
    seq_len = batch.inputs.shape[1]
    splits = sorted({m for share in SPLITS if 0 < (m := round(share * seq_len)) < seq_len})
    if not splits:
        raise NotApplicableError("rows of one token cannot be cut in two")
    layers, heads = names(found)
    sigmas = _sigmas(found, splits)
    widths = np.repeat([layer.B.shape[-1] for layer in found], [layer.n_heads for layer in found])
    effective = _by_split(sigmas, lambda sigma, _: effective_rank(sigma))
    before_it = np.full_like(effective, np.nan)
    if before:
        before_it = _by_split(_sigmas(before, splits), lambda sigma, _: effective_rank(sigma))
    return [
        Spectrum(
            layers=layers,
            heads=heads,
            splits=np.array(splits),
            bound=np.array([np.minimum(widths, min(m, seq_len - m)) for m in splits]),
            rank=_by_split(sigmas, lambda sigma, m: rank(sigma, (m, seq_len - m))),
            effective_rank=effective,
            initial_effective_rank=before_it,
            rows=len(batch.inputs),
            values=_typical(sigmas[splits[len(splits) // 2]]),
        )
    ]


def _sigmas(found: Sequence[Recurrence], splits: Sequence[int]) -> dict[int, list[Tensor]]:
    """Return the singular values [b h k] of each layer, by split."""
    return {m: [layer.singular_values(m) for layer in found] for m in splits}


def _by_split(
    sigmas: dict[int, list[Tensor]], number: Callable[[Tensor, int], Tensor]
) -> Float[np.ndarray, "m h"]:
    """Return a number of each spectrum: mean over rows that have one."""
    means = [
        torch.cat([number(sigma, m).double().nanmean(0) for sigma in layers])
        for m, layers in sigmas.items()
    ]
    return torch.stack(means).cpu().numpy()


def _typical(sigmas: Sequence[Tensor]) -> Float[np.ndarray, "h k"]:
    """Return σ / σ_max, geometric mean over rows, NaN beyond a head's own number."""
    scaled = [(sigma / sigma[..., :1]).log().mean(0).exp().cpu().numpy() for sigma in sigmas]
    most = max(sigma.shape[-1] for sigma in scaled)
    padded = [
        np.pad(sigma, ((0, 0), (0, most - sigma.shape[-1])), constant_values=np.nan)
        for sigma in scaled
    ]
    return np.concatenate(padded)


def describe(found: Spectrum) -> Words:
    """Put the spectrum in words."""
    middle = len(found.splits) // 2
    effective, bound = found.effective_rank[middle], found.bound[middle]
    low, high = int(np.nanargmin(effective)), int(np.nanargmax(effective))
    cut = f"Across the middle of a row, token {found.splits[middle]},"
    if len(effective) == 1:
        says = f"{cut} the head's block has effective rank {_of(found, 0)}"
    else:
        says = f"{cut} effective ranks go from {_of(found, low)} (head {_name(found, low)}) to "
        says += f"{_of(found, high)} (head {_name(found, high)})"
    full = int((np.round(found.rank[middle]) >= bound).sum())
    if len(effective) == 1:
        says += f"; its numerical rank is {found.rank[middle][0]:.3g}."
    else:
        says += f"; the numerical rank is full in {full} of {len(effective)} heads."
    m = int(found.splits[middle])
    reading = (
        f"Singular values σ of M̃[i ≥ m, j < m] at m = {m}, as shares of the largest, geometric "
        f"mean over {found.rows} rows of the batch: a steep line carries the past in few "
        "directions. At most min(d_state, m, T − m) are not zero. Effective rank is exp H(σ / Σσ); "
        "numerical rank counts σ above σ_max · max(m, T − m) · ε of fp32. Below, effective rank by "
        "where the row is cut."
    )
    if len(found.layers) > NAMED:
        reading += " The heads of lowest and highest effective rank are named, the others grey."
    title = f"Spectrum of what SSD carries past token {m}"
    return Words(title, says, reading, f"Lines of falling singular values. {says}")


def _of(found: Spectrum, head: int) -> str:
    """Return an effective rank as text, with its bound and what it was at step 0."""
    middle = len(found.splits) // 2
    text = f"{found.effective_rank[middle, head]:.3g} of at most {found.bound[middle, head]}"
    before = found.initial_effective_rank[middle, head]
    return text if np.isnan(before) else f"{text}, {before:.3g} at step 0"


def _name(found: Spectrum, head: int) -> str:
    return f"{found.layers[head]}.{found.heads[head]}"


def draw(found: Spectrum) -> go.Figure:
    """Draw σ / σ_max by index, and effective rank by cut, a line a head."""
    middle = len(found.splits) // 2
    effective = found.effective_rank[middle]
    count = len(effective)
    figure = make_subplots(
        rows=2, cols=1, vertical_spacing=0.2, row_heights=[0.6, 0.4], figure=style.new_figure(560)
    )
    labels = [_name(found, head) for head in range(count)]
    extremes = [int(np.nanargmin(effective)), int(np.nanargmax(effective))]
    spectra = [values[~np.isnan(values)] for values in found.values]
    add_head_lines(
        figure,
        labels,
        [np.arange(1, len(values) + 1) for values in spectra],
        # Zeros have no place on a logarithmic axis.
        [np.where(values > 0, values, np.nan) for values in spectra],
        extremes,
        "σ %{x}: %{y:.2g}",
        row=1,
    )
    add_head_lines(
        figure,
        labels,
        [found.splits] * count,
        list(found.effective_rank.T),
        extremes,
        "cut at %{x}: effective rank %{y:.3g}",
        legend=False,
        row=2,
    )
    seen = found.values[np.isfinite(found.values) & (found.values > LEAST)]
    least = max(LEAST, float(seen.min()) if seen.size else LEAST)
    figure.update_xaxes(
        title_text="index of the singular value, from 1", showgrid=False, row=1, col=1
    )
    ends = [0, int(found.splits[0] + found.splits[-1])]
    figure.update_xaxes(title_text="cut m, tokens", range=ends, row=2, col=1)
    figure.update_yaxes(
        title_text="σ / σ_max",
        type="log",
        range=[np.log10(least) - 0.3, 0.2],
        exponentformat="power",
        dtick=1,
        row=1,
        col=1,
    )
    top = 1.08 * float(np.nanmax(found.effective_rank))
    figure.update_yaxes(title_text="effective rank", range=[0, top], nticks=5, row=2, col=1)
    return figure.update_layout(margin_t=96)
