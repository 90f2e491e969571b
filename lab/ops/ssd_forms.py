"""The slow, obvious forms of state space duality: references for `lab.ops.ssd`, and what analyses
look at: the matrix that it applies, what each token writes, the state after each token. They
compute in the dtype of their arguments, even under autocast.
"""

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from lab.ops.precision import keep_dtypes
from lab.ops.ssd_decay import segment_sums


def ssd_recurrent(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None = None,
    initial_state: Float[Tensor, "b h p n"] | None = None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return y and the last state, token by token: the definition itself."""
    states = scan_states(state_writes(x, dt, B), dt * A, initial_state)
    return read_states(states, x, C, D), states[:, -1]


def ssd_quadratic(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None = None,
    initial_state: Float[Tensor, "b h p n"] | None = None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return y = M̃ x and the last state from the whole matrix: the dual form, as attention."""
    return quadratic_from_decay(x, dt, dt * A, B, C, D, initial_state)


@keep_dtypes
def quadratic_from_decay(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    log_decay: Float[Tensor, "b t h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None = None,
    initial_state: Float[Tensor, "b h p n"] | None = None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return `ssd_quadratic` for log-decays ≤ 0 that need not be dt·A."""
    M = matrix_from_decay(dt, log_decay, B, C, D)
    y = einsum(M, x, "b h t s, b s h p -> b t h p")
    log_decay = rearrange(log_decay, "b t h -> b h t")
    to_end = segment_sums(log_decay)[:, :, -1].exp()
    state = einsum(to_end, state_writes(x, dt, B), "b h s, b s h p n -> b h p n")
    if initial_state is not None:
        faded = log_decay.cumsum(-1).exp()
        C = repeat_groups(C, x.shape[2])
        y = y + einsum(faded, C, initial_state, "b h t, b t h n, b h p n -> b t h p")
        state = state + faded[:, :, -1, None, None] * initial_state
    return y, state


def ssd_matrix(
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "b h t s"]:
    """Return M̃ of y = M̃ x, with dt on the columns and D on the diagonal.

    M̃_ts = exp(Σ_{s<k≤t} dt_k A) (C_t·B_s) dt_s + D δ_ts for s ≤ t, else 0.

    Source: eq. rope_cb's proof, M = L ∘ CBᵀ.
    """
    return matrix_from_decay(dt, dt * A, B, C, D)


@keep_dtypes
def matrix_from_decay(
    dt: Float[Tensor, "b s h"],
    log_decay: Float[Tensor, "b s h"],
    B: Float[Tensor, "b s g n"],
    C: Float[Tensor, "b s g n"],
    D: Float[Tensor, " h"] | None = None,
    rows: slice | None = None,
) -> Float[Tensor, "b h t s"]:
    """Return `ssd_matrix` or some of its rows, for log-decays ≤ 0 that need not be dt·A."""
    s, h = dt.shape[1:]
    first, last, _ = (rows or slice(None)).indices(s)
    a = rearrange(log_decay, "b s h -> b h s")
    # A segment that begins before the rows has two parts, up to the first row and from there on.
    before = F.pad(a[..., 1:first].flip(-1).cumsum(-1).flip(-1), (0, min(first, 1)))
    since = a[..., first:last].cumsum(-1)
    outside = since[..., :, None] + before[..., None, :]
    L = torch.cat([outside, segment_sums(a[..., first:last])], dim=-1).exp()
    scores = einsum(
        repeat_groups(C[:, first:last], h),
        repeat_groups(B[:, :last], h),
        "b t h n, b s h n -> b h t s",
    )
    M = L * scores * rearrange(dt[:, :last], "b s h -> b h 1 s")
    if D is not None:
        M[..., first:].diagonal(dim1=-2, dim2=-1).add_(D[:, None])
    return F.pad(M, (0, s - last))


@keep_dtypes
def state_writes(
    x: Float[Tensor, "b t h p"], dt: Float[Tensor, "b t h"], B: Float[Tensor, "b t g n"]
) -> Float[Tensor, "b t h p n"]:
    """Return what each token adds to the state: dt_t x_t ⊗ B_t."""
    return einsum(dt, x, repeat_groups(B, x.shape[2]), "b t h, b t h p, b t h n -> b t h p n")


def scan_states(
    writes: Float[Tensor, "b t h p n"],
    log_decay: Float[Tensor, "b t h"],
    initial_state: Float[Tensor, "b h p n"] | None = None,
) -> Float[Tensor, "b t h p n"]:
    """Return the state after each token: h_t = exp(a_t) h_{t−1} + write_t."""
    state = torch.zeros_like(writes[:, 0]) if initial_state is None else initial_state
    states = []
    for decay, write in zip(log_decay.exp().unbind(1), writes.unbind(1), strict=True):
        state = decay[..., None, None] * state + write
        states.append(state)
    return torch.stack(states, dim=1)


@keep_dtypes
def read_states(
    states: Float[Tensor, "b t h p n"],
    x: Float[Tensor, "b t h p"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "b t h p"]:
    """Return y_t = h_t C_t + D x_t."""
    y = einsum(states, repeat_groups(C, x.shape[2]), "b t h p n, b t h n -> b t h p")
    return y if D is None else y + D[:, None] * x


def repeat_groups(z: Float[Tensor, "b t g n"], h: int) -> Float[Tensor, "b t h n"]:
    """Return each head's copy of its group's entries: head h has group h // (H/G)."""
    return z.repeat_interleave(h // z.shape[2], dim=2)
