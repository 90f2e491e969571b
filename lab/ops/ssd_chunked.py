"""State space duality in chunks, forward and backward, in torch.

Between chunks goes the state S [p n] of each head. Within one, with M = L ∘ CBᵀ, values v = dt x,
f what is left of the state at each token and e what is left of each token at the chunk's end:

    y = M v + f ∘ (C S₀ᵀ) + D x,   S₁ = f_last S₀ + (e ∘ v)ᵀ B

Autograd would keep L, M and every other intermediate of the whole sequence. Here the states alone
are kept, and the rest is computed again, as kernels do, a few chunks at a time, so that it stays
in the processor's cache. Axis letters of this file, beside the package's: j head within its group.
Matrices L, M and CBᵀ lie source-major, as [s t].
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lab.ops.ssd_decay import decay_gradient, decay_matrix

CHUNK_LEN = 32
"""The longest chunk. The matrices' work grows with it, the products with states do not depend on
it; shorter chunks keep more states, and take more calls."""

ALONE_LEN = 64
"""The longest sequence that is one chunk: without states to read, longer chunks pay."""

CHUNKS_AT_ONCE = 128
"""Chunks of all heads and rows whose matrices are computed in one call: more of them spend less
on calls, fewer stay in cache."""


def ssd_torch(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None,
    chunk_len: int,
    initial_state: Float[Tensor, "b h p n"] | None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return what `lab.ops.ssd.ssd` does."""
    high = torch.promote_types(x.dtype, torch.float32)
    log_decay = dt.to(high) * A.to(high)
    return ssd_chunked(x, dt, log_decay, B, C, D, chunk_len, initial_state)


def ssd_chunked(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    log_decay: Float[Tensor, "b t h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None,
    chunk_len: int,
    initial_state: Float[Tensor, "b h p n"] | None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return what `lab.ops.ssd.ssd` does, for any log-decay ≤ 0; differentiable once.

    Tensors of unlike precision meet in x's, or fp32 if that is more. chunk_len is an upper bound:
    chunks longer than `CHUNK_LEN` would only cost more.
    """
    t = x.shape[1]
    length = min(chunk_len, t if t <= ALONE_LEN else CHUNK_LEN)
    return _uncompiled(x, dt, log_decay, B, C, D, initial_state, length)


class _Chunks(NamedTuple):
    """A few chunks of a sequence, in high precision, and what is computed in each alone."""

    x: Float[Tensor, "c b g j l p"]
    dt: Float[Tensor, "c b g j l 1"]
    values: Float[Tensor, "c b g j l p"]
    writes: Float[Tensor, "c b*g l j*p"]  # e ∘ v
    B: Float[Tensor, "c b*g l n"]
    C: Float[Tensor, "c b*g l n"]
    L: Float[Tensor, "c b g j s t"]
    scores: Float[Tensor, "c b g 1 s t"]  # CBᵀ
    left: Float[Tensor, "c b g j l 1"]  # f
    to_end: Float[Tensor, "c b g j l 1"]  # e


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, log_decay, B, C, D, initial_state, length):
        b, _, h, p = x.shape
        g, n = B.shape[2:]
        j = h // g
        y = torch.empty_like(x)
        state = x.new_zeros(b * g, j * p, n, dtype=_high(x))
        if initial_state is not None:
            state.copy_(initial_state.reshape(b * g, j * p, n))
        # A tensor for each span: malloc reuses pages of such sizes, where it would have the
        # system clear a larger one anew at each call.
        states = []
        for span in _spans(x, length):
            z = _chunks(x, dt, log_decay, B, C, span, length)
            c = z.x.shape[0]
            starts = state.new_empty(c, b * g, j * p, n)
            from_state = torch.empty_like(z.writes)
            kept = z.left[..., -1:, :].unbind()
            for i in range(c):
                starts[i] = state
                # Before the first token there is nothing to read, or there is a given state.
                if i == len(states) == 0 and initial_state is None:
                    from_state[i] = 0
                else:
                    torch.bmm(z.C[i], state.mT, out=from_state[i])
                    state.view(b, g, j, p, n).mul_(kept[i])
                state.baddbmm_(z.writes[i].mT, z.B[i])
            states.append(starts)
            out = (z.L * z.scores).mT @ z.values
            out.addcmul_(from_state.view(c, b, g, length, j, p).transpose(3, 4), z.left)
            if D is not None:
                out.addcmul_(z.x, D.to(out.dtype).view(g, j, 1, 1))
            y[:, span] = _unfold(out, span)
        ctx.save_for_backward(x, dt, log_decay, B, C, D, *states)
        ctx.set_materialize_grads(False)
        ctx.length, ctx.given_state = length, None if initial_state is None else initial_state.dtype
        return y, state.view(b, h, p, n)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, d_last):  # type: ignore[override]
        x, dt, log_decay, B, C, D, *states = ctx.saved_tensors
        length, high = ctx.length, states[0].dtype
        b, _, h, p = x.shape
        g, n = B.shape[2:]
        j = h // g
        dx, d_dt, d_log_decay, dB, dC = (torch.empty_like(z) for z in (x, dt, log_decay, B, C))
        dD = x.new_zeros(g, j, dtype=high)
        dy = torch.zeros_like(x) if dy is None else dy
        # Its own memory, as it moves in place.
        d_state = torch.zeros_like(states[0][0])
        if d_last is not None:
            d_state.copy_(d_last.reshape(b * g, j * p, n))
        read_later = d_last is not None
        for span, starts in reversed(list(zip(_spans(x, length), states, strict=True))):
            z = _chunks(x, dt, log_decay, B, C, span, length)
            c = z.x.shape[0]
            dy_z = _fold(dy, span, length, g, high)
            dy_h = dy_z.contiguous()
            reads_h = dy_h * z.left
            reads = _by_group(dy_z, z.left)
            kept = z.left[..., -1:, :].unbind()
            # Zero where no state is read: before the first token, or after the last.
            from_end = torch.zeros_like(z.writes)
            dB_z, dC_z = torch.zeros_like(z.B), torch.zeros_like(z.C)
            at_reads = d_state.new_zeros(c, b * g, j, length)
            through = d_state.new_zeros(c, b, g, j)
            for i in reversed(range(c)):
                if read_later:
                    torch.bmm(z.B[i], d_state.mT, out=from_end[i])
                    torch.bmm(z.writes[i], d_state, out=dB_z[i])
                if i == 0 and starts is states[0] and ctx.given_state is None:
                    break
                before = starts[i]
                d_C = torch.bmm(reads_h[i].view(b * h, length, p), before.view(b * h, p, n))
                d_C = d_C.view(b * g, j, length, n)
                torch.sum(d_C, 1, out=dC_z[i])
                torch.sum(d_C.mul_(z.C[i][:, None]), -1, out=at_reads[i])
                d_state.view(b, g, j, p, n).mul_(kept[i])
                torch.sum((d_state * before).view(b, g, j, p * n), -1, out=through[i])
                d_state.baddbmm_(reads[i].mT, z.C[i])
                read_later = True

            P = (z.values @ dy_h.mT).mul_(z.L)
            d_scores = P.sum(3).flatten(0, 2)
            P.mul_(z.scores)
            dB_z.flatten(0, 1).baddbmm_(d_scores, z.C.flatten(0, 1))
            dC_z.flatten(0, 1).baddbmm_(d_scores.mT, z.B.flatten(0, 1))
            at_writes = _heads_of(z.writes * from_end, z.x).sum(-1)
            # A token's decay moves what later tokens read, and what earlier ones wrote.
            at_token = decay_gradient(P.mT) + through[..., None]
            at_token += at_reads.view(c, b, g, j, length).flip(-1).cumsum(-1).flip(-1)
            at_token[..., 1:] += at_writes[..., :-1].cumsum(-1)
            d_log_decay[:, span] = _unfold(at_token, span)

            d_values = (z.L * z.scores) @ dy_h
            d_values.addcmul_(_heads_of(from_end, z.x), z.to_end)
            d_dt[:, span] = _unfold((d_values * z.x).sum(-1), span)
            dx_z = d_values.mul_(z.dt)
            if D is not None:
                dx_z.addcmul_(dy_z, D.to(dx_z.dtype).view(g, j, 1, 1))
                dD += (dy_z * z.x).sum((0, 1, 4, 5))
            dx[:, span] = _unfold(dx_z, span)
            for whole, part in ((dB, dB_z), (dC, dC_z)):
                whole[:, span] = _unfold(part.view(c, b, g, 1, length, n), span)
        dD = None if D is None else dD.flatten().to(D.dtype)
        d_initial = None
        if ctx.given_state is not None:
            d_initial = d_state.view(b, h, p, n).to(ctx.given_state)
        return dx, d_dt, d_log_decay, dB, dC, dD, d_initial, None


@torch.compiler.disable()
def _uncompiled(*arguments):
    """Hide the loop over chunks from torch.compile, which would unroll it for nothing."""
    return _Chunked.apply(*arguments)


def _high(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _spans(x: Tensor, length: int) -> list[slice]:
    """Return the stretches of tokens to take at once."""
    b, t, h = x.shape[:3]
    step = length * max(1, CHUNKS_AT_ONCE // (b * h))
    return [slice(first, min(first + step, t)) for first in range(0, t, step)]


def _chunks(x, dt, log_decay, B, C, span: slice, length: int) -> _Chunks:
    high, g = _high(x), B.shape[2]
    x, dt, log_decay = (_fold(z, span, length, g, high) for z in (x, dt[..., None], log_decay))
    B, C = (_fold(z, span, length, g, high).squeeze(3).flatten(1, 2).contiguous() for z in (B, C))
    log_decay = log_decay.contiguous()
    L = decay_matrix(log_decay).mT
    left = log_decay.cumsum(-1).exp()[..., None]
    to_end = L[..., -1:]
    values = torch.mul(x, dt, out=x.new_empty(x.shape))
    scores = (B @ C.mT).view(*x.shape[:3], 1, length, length)
    return _Chunks(x, dt, values, _by_group(x, dt * to_end), B, C, L, scores, left, to_end)


def _fold(z, span: slice, length: int, g: int, dtype: torch.dtype):
    """Return tokens of [b t (g j) …] as chunks [c b g j l …].

    The last chunk is filled up with zeros: tokens of dt = 0 neither decay nor write.
    """
    z = z[:, span].to(dtype)
    b, t, h, *rest = z.shape
    if t % length:
        z = F.pad(z, (0, 0) * (z.ndim - 2) + (0, -t % length))
    z = z.view(b, -1, length, g, h // g, *rest)
    return z.permute(1, 0, 3, 4, 2, *range(5, z.ndim))


def _unfold(z, span: slice):
    """Return chunks [c b g j l …] as tokens [b t (g j) …], without what filled them up."""
    z = z.permute(1, 0, 4, 2, 3, *range(5, z.ndim))
    return z.flatten(3, 4).flatten(1, 2)[:, : span.stop - span.start]


def _by_group(z, weight):
    """Return z ∘ weight, [c b g j l p], as [c (b g) l (j p)]: a group's heads share products."""
    c, b, g, j, length, p = z.shape
    out = z.new_empty(c, b, g, length, j, p)
    torch.mul(z.transpose(3, 4), weight.transpose(3, 4), out=out)
    return out.view(c, b * g, length, j * p)


def _heads_of(z, like):
    """Return [c (b g) l (j p)] as [c b g j l p], the shape of `like`."""
    c, b, g, j, length, p = like.shape
    return z.view(c, b, g, length, j, p).transpose(3, 4)
