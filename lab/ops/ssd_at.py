"""State space duality whose outputs are read at some positions only.

Every chunk's writes reach the state, as in `lab.ops.ssd_chunked`. The matrices of a chunk have rows
for its read positions alone, and chunks in which nothing is read have none. Axis letters of this
file, besides the package's: j head within its group, m read position within its chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lab.ops.precision import keep_dtypes, promote
from lab.ops.ssd_chunked import CHUNK_LEN
from lab.ops.ssd_decay import decay_matrix


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
    x, dt, log_decay, B = (_fold(z, length, g, high) for z in (x, dt[..., None], log_decay, B))
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


def _fold(
    z: Float[Tensor, "b t h *p"], length: int, g: int, dtype: torch.dtype
) -> Float[Tensor, "c b g j l *p"]:
    """Return tokens as chunks; the last is padded with tokens that neither decay nor write."""
    b, t, h, *rest = z.shape
    if t % length:
        z = F.pad(z, (0, 0) * (z.ndim - 2) + (0, -t % length))
    z = z.to(dtype).reshape(b, -1, length, g, h // g, *rest)
    return z.permute(1, 0, 3, 4, 2, *range(5, z.ndim))


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
