"""Mamba's recurrence: every channel has a state of its own, with a decay for each of its entries.

    h_t = exp(dt_t A) ∘ h_{t−1} + dt_t x_t B_t,   y_t = h_t·C_t + D x_t

x, dt and D are of one channel h, and A, B, C are vectors [n]. As in `lab.ops.ssd`, B and C are the
same for all channels. Entry n alone is state space duality with a state of width 1, so the matrix
that the recurrence applies is a sum of n semiseparable ones.

Source: Gu & Dao 2023 (arXiv 2312.00752); the matrix is that of Ali et al. 2024 (arXiv 2403.01590).
"""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lab.ops.ssd_forms import matrix_from_decay, scan_states


def selective_scan_states(
    writes: Float[Tensor, "b t h p n"], log_decay: Float[Tensor, "b t h n"]
) -> Float[Tensor, "b t h p n"]:
    """Return the state after each token: h_t = exp(a_t) ∘ h_{t−1} + write_t."""
    h = writes.shape[2]
    states = scan_states(
        rearrange(writes, "b t h p n -> b t (h n) p 1"),
        rearrange(log_decay, "b t h n -> b t (h n)"),
    )
    return rearrange(states, "b t (h n) p 1 -> b t h p n", h=h)


def selective_scan_matrix(
    dt: Float[Tensor, "b s h"],
    log_decay: Float[Tensor, "b s h n"],
    B: Float[Tensor, "b s 1 n"],
    C: Float[Tensor, "b s 1 n"],
    D: Float[Tensor, " h"] | None = None,
    rows: slice | None = None,
) -> Float[Tensor, "b h t s"]:
    """Return M of y = M x for each channel, or some of its rows.

    M_ts = Σ_n C_tn exp(Σ_{s<k≤t} dt_k A_n) B_sn dt_s + D δ_ts for s ≤ t, else 0.
    """
    parts = zip(log_decay.unbind(-1), B.split(1, -1), C.split(1, -1), strict=True)
    matrix = None
    for entry, (decay, write, read) in enumerate(parts):
        part = matrix_from_decay(dt, decay, write, read, None if entry else D, rows)
        matrix = part if matrix is None else matrix + part
    assert matrix is not None
    return matrix
