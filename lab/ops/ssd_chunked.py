"""State space duality in chunks, forward and backward, in torch; at all positions, or at some.

The state S [p n] of each head is passed from chunk to chunk. Within a chunk, with M = L ∘ CBᵀ and
values v = dt x, let f be the fraction of the state left at each token, and e the fraction of each
token's write left at the chunk's end:

    y = M v + f ∘ (C S₀ᵀ) + D x,   S₁ = f_last S₀ + (e ∘ v)ᵀ B

Autograd would keep L, M and every other intermediate of the whole sequence. Here only the states
and C S₀ᵀ are kept. Backward recomputes the rest, as kernels do, a few chunks at a time so that it
stays in the processor's cache. On a CPU elementwise operations take as long as the products, so
they write into what is no longer needed, or where their result is wanted. Axis letters of this
file, besides the package's: j head within its group, m read position within its chunk. Matrices L,
M and CBᵀ are stored source-major, as [s t].

At some positions only (`ssd_at`), every chunk's writes reach the state, the matrices of a chunk
have rows for its read positions alone, and chunks in which nothing is read have none.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lab.compilation import keep_eager
from lab.ops.derivatives import differentiate, needs_plain
from lab.ops.precision import disable_autocast, keep_dtypes, promote
from lab.ops.ssd_decay import decay_gradient, decay_matrix
from lab.ops.ssd_forms import quadratic_from_decay

CHUNK_LEN = 64
"""The longest chunk. The work on matrices grows with it, that on states does not; shorter chunks
keep more states, and need more calls."""

CHUNKS_AT_ONCE, CHUNKS_ON_GPU = 64, 256
"""Chunks, over all heads and rows, whose matrices one call computes: more mean fewer calls, fewer
stay in cache. Small calls leave a GPU idle, so it gets more chunks at once, which takes memory."""


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
    """Return what `lab.ops.ssd.ssd` does, for any log-decay ≤ 0.

    The computation is in x's dtype, or fp32 if x is less precise. chunk_len is an upper bound:
    chunks longer than `CHUNK_LEN` would only be slower.
    """
    length = min(chunk_len, CHUNK_LEN, x.shape[1])
    if needs_plain():
        return _compute_plainly(length, x, dt, log_decay, B, C, D, initial_state)
    return _run_eagerly(x, dt, log_decay, B, C, D, initial_state, length)


@keep_dtypes
def _compute_plainly(length, x, dt, log_decay, B, C, D, state):
    """Return what `ssd_chunked` does, each chunk by its whole matrix."""
    tokens = (z.to(promote(x)).split(length, 1) for z in (x, dt, log_decay, B, C))
    D, state = (None if z is None else z.to(promote(x)) for z in (D, state))
    outputs = []
    for x_c, dt_c, log_decay_c, B_c, C_c in zip(*tokens, strict=True):
        y, state = quadratic_from_decay(x_c, dt_c, log_decay_c, B_c, C_c, D, state)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, 1).to(x.dtype), state


class _Chunks(NamedTuple):
    """A few chunks of a sequence in high precision, and what is computed within each chunk."""

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
        y = _allocate_padded(x, length)
        state = x.new_zeros(b * g, j * p, n, dtype=promote(x))
        if initial_state is not None:
            state.copy_(initial_state.reshape(b * g, j * p, n))
        # A tensor for each span: malloc reuses pages of such sizes, where it would have the
        # system clear a larger one anew at each call.
        states, from_states = [], []
        for span in _list_spans(x, length):
            z = _prepare_chunks(x, dt, log_decay, B, C, span, length)
            c = z.x.shape[0]
            starts = state.new_empty(c, b * g, j * p, n)
            starts[0] = state
            _multiply(z.writes[:-1].mT, z.B[:-1], out=starts[1:])
            state = z.writes[-1].mT @ z.B[-1]
            kept = z.left[..., -1, :].unbind()
            by_head = [*starts.view(c, b, g, j, p * n), state.view(b, g, j, p * n)]
            for i in range(c):
                by_head[i + 1].addcmul_(by_head[i], kept[i])
            read = _find_readers(states, initial_state, c)
            from_state = torch.empty_like(z.writes)
            from_state[: read.start] = 0
            _multiply(z.C[read], starts[read].mT, out=from_state[read])
            states.append(starts)
            from_states.append(from_state)
            out = z.L.mul_(z.scores).mT @ z.values
            if D is not None:
                out.addcmul_(z.x, D.to(out.dtype).view(g, j, 1, 1))
            y_z = _view_chunks(y, span, length, g)
            torch.addcmul(out, _split_heads(from_state, z.x), z.left, out=y_z)
        ctx.save_for_backward(x, dt, log_decay, B, C, D, initial_state, *states, *from_states)
        ctx.set_materialize_grads(False)
        ctx.length, ctx.given_state = length, None if initial_state is None else initial_state.dtype
        return _cut_padding(y, x), state.view(b, h, p, n)

    @staticmethod
    def backward(ctx, dy, d_last):  # type: ignore[override]
        # Where activations are checkpointed, they can be read only once.
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = partial(_compute_plainly, ctx.length)
            return *differentiate(plain, saved[:7], (dy, d_last)), None
        # Backward may be called where autocast is on, too.
        with disable_autocast(saved[0]):
            return _Chunked._backward(ctx, saved, dy, d_last)

    @staticmethod
    def _backward(ctx, tensors, dy, d_last):
        x, dt, log_decay, B, C, D, _, *saved = tensors
        states, from_states = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        length, high = ctx.length, states[0].dtype
        b, _, h, p = x.shape
        g, n = B.shape[2:]
        j = h // g
        whole = [_allocate_padded(z, length) for z in (x, dt, log_decay, B, C)]
        dD = x.new_zeros(g, j, dtype=high)
        dy = torch.zeros_like(x) if dy is None else dy
        d_state = torch.zeros_like(states[0][0])
        if d_last is not None:
            d_state.copy_(d_last.reshape(b * g, j * p, n))
        spans = _list_spans(x, length)
        for number in reversed(range(len(spans))):
            span, starts = spans[number], states[number]
            z = _prepare_chunks(x, dt, log_decay, B, C, span, length)
            dx_z, d_dt_z, d_log_decay_z, dB_z, dC_z = (
                _view_chunks(part, span, length, g) for part in whole
            )
            c = z.x.shape[0]
            dy_z = _fold(dy, span, length, g, high).contiguous()
            reads = _merge_heads(dy_z, z.left)
            kept = z.left[..., -1, :].unbind()
            # The gradients of the states at the chunks' ends.
            d_ends = torch.empty_like(starts)
            d_ends[-1] = d_state
            _multiply(reads[1:].mT, z.C[1:], out=d_ends[:-1])
            d_state = reads[0].mT @ z.C[0]
            by_head = [d_state.view(b, g, j, p * n), *d_ends.view(c, b, g, j, p * n)]
            for i in reversed(range(c)):
                by_head[i].addcmul_(by_head[i + 1], kept[i])

            # The last state may not be read at all.
            later = slice(0, c - (d_last is None and number == len(spans) - 1))
            from_end, d_B = torch.empty_like(z.writes), torch.empty_like(z.B)
            from_end[later.stop :], d_B[later.stop :] = 0, 0
            _multiply(z.B[later], d_ends[later].mT, out=from_end[later])
            _multiply(z.writes[later], d_ends[later], out=d_B[later])

            read = _find_readers(states[:number], ctx.given_state, c)
            d_C = torch.empty_like(z.C)
            d_C[: read.start] = 0
            _multiply(reads[read], starts[read], out=d_C[read])
            at_reads = _split_heads(reads.mul_(from_states[number]), z.x).sum(-1)
            through = d_ends.mul_(starts).view(c, b, g, j, p * n).sum(-1)
            through *= z.left[..., -1, 0]

            P = (z.values @ dy_z.mT).mul_(z.L)
            d_scores = P.sum(3).flatten(0, 2)
            P.mul_(z.scores)
            d_B.flatten(0, 1).baddbmm_(d_scores, z.C.flatten(0, 1))
            d_C.flatten(0, 1).baddbmm_(d_scores.mT, z.B.flatten(0, 1))
            dB_z.copy_(d_B.view_as(dB_z))
            dC_z.copy_(d_C.view_as(dC_z))

            d_values = z.L.mul_(z.scores) @ dy_z
            d_values.addcmul_(_split_heads(from_end, z.x), z.to_end)
            d_dt_z.copy_(torch.mul(d_values, z.x, out=z.values).sum(-1))
            if D is None:
                torch.mul(d_values, z.dt, out=dx_z)
            else:
                dD += (dy_z * z.x).sum((0, 1, 4, 5))
                d_values.mul_(z.dt)
                torch.addcmul(d_values, dy_z, D.to(high).view(g, j, 1, 1), out=dx_z)

            at_writes = _split_heads(from_end.mul_(z.writes), z.x).sum(-1)
            # A token's decay moves what later tokens read, and what earlier ones wrote.
            at_token = decay_gradient(P.mT) + through[..., None]
            at_token += at_reads.flip(-1).cumsum(-1).flip(-1)
            at_token[..., 1:] += at_writes[..., :-1].cumsum(-1)
            d_log_decay_z.copy_(at_token)
        dD = None if D is None else dD.flatten().to(D.dtype)
        d_initial = None
        if ctx.given_state is not None:
            d_initial = d_state.view(b, h, p, n).to(ctx.given_state)
        grads = (_cut_padding(z, x) for z in whole)
        return *grads, dD, d_initial, None


def _find_readers(before: Sequence[Tensor], given: object, c: int) -> slice:
    """Return which of c chunks start from a state: all but a sequence's first without one."""
    return slice(int(not before and given is None), c)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the matrix products of a and b, which have two batch axes, into `out`."""
    if len(out):
        torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))


@keep_eager
@keep_dtypes
def _run_eagerly(*arguments):
    """Run the loop over chunks eagerly: torch.compile would unroll it without a gain."""
    return _Chunked.apply(*arguments)


def _list_spans(x: Tensor, length: int) -> list[slice]:
    """Return the spans of tokens, with padding, whose chunks are computed together."""
    b, t, h = x.shape[:3]
    at_once = CHUNKS_ON_GPU if x.is_cuda else CHUNKS_AT_ONCE
    step = length * max(1, at_once // max(1, b * h))
    padded = t + -t % length
    return [slice(first, min(first + step, padded)) for first in range(0, t, step)]


def _prepare_chunks(x, dt, log_decay, B, C, span: slice, length: int) -> _Chunks:
    high, g = promote(x), B.shape[2]
    x, dt, log_decay = (_fold(z, span, length, g, high) for z in (x, dt[..., None], log_decay))
    B, C = (_fold(z, span, length, g, high).squeeze(3).flatten(1, 2).contiguous() for z in (B, C))
    log_decay = log_decay.contiguous()
    L = decay_matrix(log_decay).mT
    left = log_decay.cumsum(-1).exp()[..., None]
    to_end = L[..., -1:].clone()
    values = torch.mul(x, dt, out=x.new_empty(x.shape))
    scores = (B @ C.mT).view(*x.shape[:3], 1, length, length)
    return _Chunks(x, dt, values, _merge_heads(values, to_end), B, C, L, scores, left, to_end)


def _fold(z, span: slice, length: int, g: int, dtype: torch.dtype):
    """Return tokens of [b t (g j) …] as chunks [c b g j l …].

    The last chunk is padded with zeros: a token with dt = 0 neither decays the state nor writes.
    """
    z = z[:, span].to(dtype)
    missing = -z.shape[1] % length
    if missing:
        z = F.pad(z, (0, 0) * (z.ndim - 2) + (0, missing))
    return _view_chunks(z, slice(None), length, g)


def _view_chunks(z, span: slice, length: int, g: int):
    """Return a view of tokens [b t (g j) …] as chunks [c b g j l …]; t is a multiple of l."""
    b, _, h, *rest = z.shape
    z = z[:, span].view(b, -1, length, g, h // g, *rest)
    return z.permute(1, 0, 3, 4, 2, *range(5, z.ndim))


def _allocate_padded(like, length: int):
    """Return room for [b t …] and for what is missing to whole chunks."""
    b, t, *rest = like.shape
    return like.new_empty(b, t + -t % length, *rest)


def _cut_padding(z, like):
    return z[:, : like.shape[1]].contiguous()


def _merge_heads(z, weight):
    """Return z ∘ weight, [c b g j l p], as [c (b g) l (j p)]: a group's heads share products."""
    c, b, g, j, length, p = z.shape
    out = z.new_empty(c, b, g, length, j, p)
    torch.mul(z.transpose(3, 4), weight.transpose(3, 4), out=out)
    return out.view(c, b * g, length, j * p)


def _split_heads(z, like):
    """Return [c (b g) l (j p)] as [c b g j l p], the shape of `like`."""
    c, b, g, j, length, p = like.shape
    return z.view(c, b, g, length, j, p).transpose(3, 4)


@keep_dtypes
def ssd_at(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    log_decay: Float[Tensor, "b t h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b q g n"],
    at: Int[Tensor, "b q"],
    chunk_len: int = CHUNK_LEN,
) -> Float[Tensor, "b q h p"]:
    """Return the outputs of `lab.ops.ssd.ssd`, without the skip, at some positions.

    Args:
        x: what tokens write.
        dt: step sizes, ≥ 0.
        log_decay: ≤ 0.
        B: where tokens write in the state.
        C: where the read positions read.
        at: the read positions, q ≥ 1 of each row, in any order.
        chunk_len: most tokens of a chunk; any value gives the same result.
    """
    (b, t, h, p), g = x.shape, B.shape[2]
    length, high = min(chunk_len, CHUNK_LEN, t), promote(x)
    places = _find_places(at, length)
    x, dt, log_decay, B = (
        _fold(z, slice(None), length, g, high) for z in (x, dt[..., None], log_decay, B)
    )
    read = slice(places.first, places.first + len(places.slots))
    values, B = x * dt, B.squeeze(3)

    rows = torch.arange(b, device=at.device)[:, None] * (at.shape[1] + 1)
    C = F.pad(C.to(high), (0, 0, 0, 0, 0, 1)).flatten(0, 1)
    C = C.index_select(0, (places.slots + rows).flatten())
    C = C.unflatten(0, places.slots.shape).transpose(2, 3)  # [c b g m n]
    offsets = places.offsets[:, :, None, None, :, None]  # [c b 1 1 m 1]

    L = decay_matrix(log_decay[read]).take_along_dim(offsets, -2)
    y = (L * (C @ B[read].mT)[:, :, :, None]) @ values[read]  # [c b g j m p]
    if read.stop > 1:
        starts = _carry_states(values[: read.stop - 1], log_decay, B, read)
        from_state = (C @ starts.mT).unflatten(-1, (h // g, p)).transpose(3, 4)
        left = log_decay[read].cumsum(-1).exp()[..., None].take_along_dim(offsets, -2)
        y = y + left * from_state
    y = y.permute(0, 1, 4, 2, 3, 5).flatten(0, 2).index_select(0, places.found.flatten())
    return y.view(b, -1, h, p).to(x.dtype)


class _Places(NamedTuple):
    """Where the read positions are among the chunks that have any.

    Attributes:
        first: the first chunk that has one.
        slots: which of a row's q positions; q where the row has fewer than m in the chunk.
        offsets: the position within its chunk.
        found: the index of each position in slots, flat.
    """

    first: int
    slots: Int[Tensor, "c b m"]
    offsets: Int[Tensor, "c b m"]
    found: Int[Tensor, "b q"]


def _find_places(at: Int[Tensor, "b q"], length: int) -> _Places:
    (b, q), device = at.shape, at.device
    chunk = at // length
    first, last = (int(end) for end in chunk.aminmax())
    chunk, n_chunks = chunk - first, last - first + 1
    in_chunk = F.one_hot(chunk, n_chunks).cumsum(1)
    rank = in_chunk.gather(2, chunk[..., None]).squeeze(2) - 1
    m = int(rank.max()) + 1
    rows = torch.arange(b, device=device)[:, None]
    found = (chunk * b + rows) * m + rank
    slots = at.new_full((n_chunks * b * m,), q)
    slots[found] = torch.arange(q, device=device).expand(b, q)
    offsets = at.new_zeros(n_chunks * b * m)
    offsets[found] = at % length
    return _Places(first, slots.view(-1, b, m), offsets.view(-1, b, m), found)


def _carry_states(
    values: Float[Tensor, "before b g j l p"],
    log_decay: Float[Tensor, "c b g j l"],
    B: Float[Tensor, "c b g l n"],
    read: slice,
) -> Float[Tensor, "read b g jp n"]:
    """Return the states before the chunks of a slice, of a sequence that starts without one."""
    log_decay = log_decay[: len(values)]
    after = F.pad(log_decay[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    writes = (values * after.exp()[..., None]).transpose(3, 4).flatten(4)  # [c b g l jp]
    written = writes.mT @ B[: len(values)]
    p = values.shape[-1]
    kept = log_decay.sum(-1).exp().repeat_interleave(p, -1)[..., None]
    states = [torch.zeros_like(written[0])]
    for factor, new in zip(kept, written, strict=True):
        states.append(torch.addcmul(new, factor, states[-1]))
    return torch.stack(states[read.start : read.stop])
