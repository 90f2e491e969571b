"""The slow, obvious forms of state space duality: references for `lab.ops.ssd`, and what analyses
look at: the matrix that it applies, what each token writes, the state after each token. They
compute in the dtype of their arguments, even under autocast.

The decay matrix L, of which all forms are made, comes from sums of log-decay over segments:

    L_ts = exp(Σ_{s<k≤t} a_k) for s ≤ t, else 0;   a_k ≤ 0 is what a state loses in log at token k

Differences of one running sum would give the same L, but they cancel: at 2,048 tokens about a
hundred times less exact. So in fp64 each segment is summed by itself. In fp32 differences of a
running sum in fp64 are exact, and much faster. What is not causal is masked before exp, or bounded:
there exp could overflow, and infinity times the mask's zero is NaN.
"""

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from lab.ops.derivatives import needs_plain
from lab.ops.precision import keep_dtypes

FORGOTTEN = -128.0
"""Below this log-decay exp is 0 in fp32. Decays below it are all alike, and would only cost a
running sum its digits."""


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


def decay_matrix(log_decay: Float[Tensor, "*batch t"]) -> Float[Tensor, "*batch t s"]:
    """Return L, 0 ≤ L ≤ 1 with ones on the diagonal, from log-decays ≤ 0.

    Its memory is laid out source-major: the sums run along target time, fastest when adjacent.

    Source: lst:ssd_helper.
    """
    if needs_plain():
        return segment_sums(log_decay).exp()
    return _DecayMatrix.apply(log_decay).mT


def decay_gradient(P: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch t"]:
    """Return the gradient of the log-decays from P, the gradient of log L where causal.

    Token k is in the segments that begin before it and do not end before it:
    ∂a_k = Σ_{t≥k} Σ_{s<k} P_ts. Sums of P's rows less sums of its columns would give it too, but
    they cancel where a segment's neighbours weigh more than itself.
    """
    ones = torch.ones_like(P[(0,) * (P.ndim - 2)])
    return (P.mT @ ones.tril()).mul_(ones.triu(1)).sum(-2)


def segment_sums(log_decay: Float[Tensor, "*batch t"]) -> Float[Tensor, "*batch t s"]:
    """Return log L, −∞ where not causal; its exp is the reference for `decay_matrix`."""
    t = log_decay.shape[-1]
    causal = torch.ones(t, t, dtype=torch.bool, device=log_decay.device).tril()
    in_segment = causal.tril(-1)
    steps = log_decay[..., :, None].expand(*log_decay.shape, t).where(in_segment, 0)
    return steps.cumsum(-2).masked_fill(~causal, -torch.inf)


class _DecayMatrix(torch.autograd.Function):
    """Lᵀ [s t] computed in place, where autograd would keep each step."""

    @staticmethod
    def forward(ctx, log_decay):
        single = log_decay.dtype != torch.float64
        L = _subtract_sums(log_decay) if single else _add_steps(log_decay)
        ctx.save_for_backward(L)
        return L

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        (L,) = ctx.saved_tensors
        return decay_gradient((grad * L).mT)


def _add_steps(log_decay):
    t = log_decay.shape[-1]
    L = log_decay[..., None, :].expand(*log_decay.shape, t).triu(1)
    return L.cumsum_(-1).exp_().triu_()


def _subtract_sums(log_decay):
    """Return Lᵀ from a running sum in fp64, in two parts of the dtype of the log-decays.

    The difference of the large parts is rounded as a segment's own sum would be. A sum that is NaN
    is 0 where segments begin, so that targets before it stay as they are.
    """
    running = log_decay.double().clamp(min=FORGOTTEN).cumsum(-1)
    large = running.to(log_decay.dtype)
    small = (running - large).to(log_decay.dtype)
    L = large[..., None, :] - large.nan_to_num()[..., :, None]
    L.add_(small[..., None, :]).sub_(small.nan_to_num()[..., :, None])
    L.clamp_(max=0).exp_()
    return L.mul_(torch.ones_like(L[(0,) * (L.ndim - 2)]).triu())
