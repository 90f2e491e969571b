"""The delta rule and its relatives: a matrix as state that each token decays, corrects and writes.

    S_t = (I − e_t m_tᵀ) diag(exp g_t) S_{t−1} + k_t v_tᵀ,   o_t = S_tᵀ q_t

The state S [n p] maps keys to values. A token lets it decay (log-decay g ≤ 0, one number a head or
one a key channel, of any strength: −∞ forgets all), reads what it holds at the direction m, takes
that away at the direction e, and writes v at k. Without m nothing is corrected; without e it is k,
as in the delta rule, whose write replaces what the state held. Scales such as n^{−½} are the
caller's. What the mixers of the family give it (κ, κ̂: keys of length 1):

| Mixer | log_decay | what else |
|---|---|---|
| linear attention | None | feature maps of q, k; a column of ones in v is the normaliser |
| RetNet, simple GLA, Mamba-2 | [b t h] | v times dt in the last |
| GLA, HGRN2 | [b t h n] | HGRN2: k = 1 − exp(g) |
| RWKV-6 | [b t h n] | `own` = q·(u ∘ k) |
| mLSTM | [b t h] | k times the input gate, a column of ones in v |
| DeltaNet | None | k = β κ, match = κ |
| Gated DeltaNet, KDA | [b t h], [b t h n] | k = β κ, match = κ |
| Gated DeltaProduct | [b t h] | r writes a token: k = β κ, match = κ, [b t r h n]; v [b t r h p] |
| Comba | [b t h] | k = β κ, match = s κ; `match_before_decay` as in its kernels |
| RWKV-7 | [b t h n] | match = κ̂, erase = a ∘ κ̂, `match_before_decay` |
| Mamba-3 | [b t h] | `own`, and q times the decay |

`delta_loop` is the definition, token by token. `delta` computes it in chunks, with memory linear in
t; `delta_matrix` is the same as one matrix, `delta_states` shows the states, and `delta_step` is
one token of decoding. SSD is the case of a scalar decay without m, but `lab.ops.ssd` stays its own
op: it shares products among the heads of a group and recomputes what backward needs, so that with
four heads in a group and a state of 128 `delta` takes 1.4 times its time and 2.1 times its memory.

Axis letters, besides the package's: r write of a token.

Source: Yang et al. 2024 (2406.06484), § 3; with decays a channel, Kimi Linear (2510.26692), § 3.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lab.ops.precision import keep_dtypes, promote
from lab.ops.ssd_decay import decay_matrix

Decay = Float[Tensor, "b t h"] | Float[Tensor, "b t h n"]
"""Log-decays ≤ 0, of each head or of each of its key channels."""
CHUNK_LEN = 64
"""The longest chunk: work on matrices grows with it, the number of steps from chunk to chunk
falls."""


@keep_dtypes
def delta(
    q: Float[Tensor, "b q g n"],
    k: Float[Tensor, "b t *r g n"],
    v: Float[Tensor, "b t *r h p"],
    log_decay: Decay | None = None,
    match: Float[Tensor, "b t *r g n"] | None = None,
    erase: Float[Tensor, "b t *r g n"] | None = None,
    initial_state: Float[Tensor, "b h n p"] | None = None,
    chunk_len: int = CHUNK_LEN,
    *,
    match_before_decay: bool = False,
    own: Float[Tensor, "b q *r h"] | None = None,
    at: Int[Tensor, "b q"] | None = None,
) -> tuple[Float[Tensor, "b q h p"], Float[Tensor, "b h n p"]]:
    """Return what is read, in v's dtype, and the state after the last token, in fp32 at least.

    The state lets a row be computed in parts:

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 8, 2, 4)
    >>> k, g = torch.nn.functional.normalize(k, dim=-1), -torch.rand(1, 8, 2)
    >>> y, _ = delta(q, 0.5 * k, v, g, match=k)
    >>> _, state = delta(q[:, :5], 0.5 * k[:, :5], v[:, :5], g[:, :5], match=k[:, :5])
    >>> part = (z[:, 5:] for z in (q, 0.5 * k, v, g))
    >>> rest, _ = delta(*part, match=k[:, 5:], initial_state=state)
    >>> torch.allclose(y[:, 5:], rest, atol=1e-5)
    True

    Args:
        q: what tokens read, t ≥ 1; its heads, like those of k, match and erase, may be groups g
            that divide h: head j has group j // (h/g).
        k: where tokens write; with an axis r after t a token writes several times: the state
            decays before the first write and is read after the last.
        v: what tokens write.
        log_decay: ≤ 0, for a head or each of its key channels; None for no decay.
        match: m, at which the state is read before it is corrected; None: it is not, and no
            equations are solved.
        erase: e, at which what was read is taken away; None: k.
        initial_state: the state before the first token; None is zero.
        chunk_len: most writes of a chunk, rounded down to a power of two; any value gives the same
            result.
        match_before_decay: m reads the state before it decays: diag(exp g_t) − e_t m_tᵀ.
        own: where it is given, tokens read S_{t−1}ᵀ q_t + own_t v_t instead of S_tᵀ q_t, summed
            over r.
        at: the positions that q reads at, each at most once in a row; None for all tokens.

    Raises:
        ValueError: for shapes that do not fit, an erase without a match, positions outside the row
            or given twice, or chunk_len < 1.
    """
    if chunk_len < 1:
        raise ValueError(f"chunk_len={chunk_len} must be at least 1")
    z = _spread(q, k, v, log_decay, match, erase, match_before_decay, own, at, initial_state)
    chunks = _compute_chunks(z, _choose_length(chunk_len, z.k.shape[1]))
    starts, last = chunks.pass_states(z.state)
    y = z.select_reads(_unfold(chunks.read(starts), z.k.shape[1]))
    if own is not None:
        y = y + _read_own_write(own, at, v)
    return y.to(v.dtype), last


@keep_dtypes
def delta_loop(
    q: Float[Tensor, "b q g n"],
    k: Float[Tensor, "b t *r g n"],
    v: Float[Tensor, "b t *r h p"],
    log_decay: Decay | None = None,
    match: Float[Tensor, "b t *r g n"] | None = None,
    erase: Float[Tensor, "b t *r g n"] | None = None,
    initial_state: Float[Tensor, "b h n p"] | None = None,
    *,
    match_before_decay: bool = False,
    own: Float[Tensor, "b q *r h"] | None = None,
    at: Int[Tensor, "b q"] | None = None,
) -> tuple[Float[Tensor, "b q h p"], Float[Tensor, "b h n p"]]:
    """Return what `delta` does, token by token: the definition itself, in v's dtype."""
    z = _spread(q, k, v, log_decay, match, erase, match_before_decay, own, at, initial_state)
    states = _scan(z)
    y = torch.einsum("bthnp,bthn->bthp", states, z.q)
    y = z.select_reads(y)
    if own is not None:
        y = y + _read_own_write(own, at, v)
    return y.to(v.dtype), states[:, -1]


@keep_dtypes
def delta_step(
    q: Float[Tensor, "b g n"],
    k: Float[Tensor, "b *r g n"],
    v: Float[Tensor, "b *r h p"],
    log_decay: Float[Tensor, "b h *n"] | None,
    match: Float[Tensor, "b *r g n"] | None,
    erase: Float[Tensor, "b *r g n"] | None,
    state: Float[Tensor, "b h n p"],
    *,
    match_before_decay: bool = False,
    own: Float[Tensor, "b *r h"] | None = None,
) -> tuple[Float[Tensor, "b h p"], Float[Tensor, "b h n p"]]:
    """Return what one token reads, in v's dtype, and the state after it: decoding.

    Arguments are those of `delta` without the time axis; `state` is the one before the token.
    """
    at_once = (None if z is None else z[:, None] for z in (own, q, k, v, log_decay, match, erase))
    _check(None, state, *at_once)
    h, high = v.shape[-2], promote(v)
    q, state = _repeat(q.to(high), h), state.to(high)
    read = state
    decay = None if log_decay is None else log_decay.to(high).reshape(*log_decay.shape[:2], -1)
    of_write = [None if z is None else _repeat(z.to(high), h) for z in (k, v, match, erase)]
    for i in range(k.shape[1] if k.ndim == 4 else 1):
        now = of_write if k.ndim == 3 else [None if z is None else z[:, i] for z in of_write]
        state = _update(state, match_before_decay, decay if i == 0 else None, *now)
    y = (q[..., None, :] @ (state if own is None else read))[..., 0, :]
    if own is not None:
        y = y + _read_own_write(own[:, None], None, v[:, None])[:, 0]
    return y.to(v.dtype), state


@keep_dtypes
def delta_matrix(
    q: Float[Tensor, "b t g n"],
    k: Float[Tensor, "b s *r g n"],
    log_decay: Decay | None = None,
    match: Float[Tensor, "b s *r g n"] | None = None,
    erase: Float[Tensor, "b s *r g n"] | None = None,
    rows: slice | None = None,
    *,
    match_before_decay: bool = False,
    own: Float[Tensor, "b t *r h"] | None = None,
    n_heads: int | None = None,
) -> Float[Tensor, "b h _ s *r"]:
    """Return M of o = M v, from a zero state: as `delta` with one chunk, quadratic in t.

    Arguments that stand there too are those of `delta`.

    Args:
        n_heads: v's heads; None for those of log_decay, or of q without one.
        rows: which rows to return, consecutive ones; tokens after them are not looked at.
    """
    t, m = k.shape[1], k.shape[2] if k.ndim == 5 else 1
    h = n_heads or (q.shape[2] if log_decay is None else log_decay.shape[2])
    first, last, _ = (rows or slice(None)).indices(t)
    q, k = q[:, :last], k[:, :last]
    log_decay, match, erase, own = (
        None if z is None else z[:, :last] for z in (log_decay, match, erase, own)
    )
    v = torch.eye(last * m, dtype=k.dtype, device=k.device)  # each write is seen by itself
    v = v[None, :, None].expand(len(k), -1, h, -1)
    v = v.unflatten(1, (last, m)) if k.ndim == 5 else v
    z = _spread(q, k, v, log_decay, match, erase, match_before_decay, own, None, None)
    length = z.k.shape[1]
    chunks = _compute_chunks(z, _choose_length(2 * length, length))
    M = z.select_reads(_unfold(chunks.scores @ chunks.values, length))
    if own is not None:
        M = M + _read_own_write(own, None, v)
    M = F.pad(M[:, first:].transpose(1, 2), (0, (t - last) * m))
    return M.unflatten(-1, (t, m)) if k.ndim == 5 else M


@keep_dtypes
def delta_states(
    k: Float[Tensor, "b t *r g n"],
    v: Float[Tensor, "b t *r h p"],
    log_decay: Decay | None = None,
    match: Float[Tensor, "b t *r g n"] | None = None,
    erase: Float[Tensor, "b t *r g n"] | None = None,
    initial_state: Float[Tensor, "b h n p"] | None = None,
    *,
    match_before_decay: bool = False,
    at: Int[Tensor, "b q"] | None = None,
) -> Float[Tensor, "b q h n p"]:
    """Return the state after each token (after its last write), or after those `at` positions.

    Arguments are those of `delta`; positions may be repeated here.
    """
    q = k.new_zeros(k.shape[0], k.shape[1], 1, k.shape[-1])
    z = _spread(q, k, v, log_decay, match, erase, match_before_decay, None, None, initial_state)
    if at is None:
        return z.select_reads(_scan(z))
    reads = at * z.every + z.first
    length = _choose_length(CHUNK_LEN, z.k.shape[1])
    chunks = _compute_chunks(z, length)
    starts, _ = chunks.pass_states(z.state)
    which = (reads // length, torch.arange(len(reads), device=at.device)[:, None])
    values = chunks.find_values(starts)[which]
    upto = torch.arange(length, device=at.device) <= (reads % length)[..., None]
    upto = upto[:, :, None, :, None]  # [b q 1 l 1]
    g = z.k.new_zeros(*z.k.shape[:3], 1) if z.log_decay is None else z.log_decay
    g = _fold(g, length)[which].where(upto, 0)
    since_write = _sum_after(g).exp() * upto
    keys = [_fold(y, length)[which] * since_write for y in (z.k, z.erase) if y is not None]
    return g.sum(-2).exp()[..., None] * starts[which] + torch.cat(keys, -2).mT @ values


class _Spread(NamedTuple):
    """Arguments of `delta` in one form: heads instead of groups, one write at each time.

    Tokens read at times `first`, `first + every`, …; those given in `at`, at `reads`.
    """

    q: Float[Tensor, "b t h n"]
    k: Float[Tensor, "b t h n"]
    v: Float[Tensor, "b t h p"]
    log_decay: Float[Tensor, "b t h _"] | None
    match: Float[Tensor, "b t h n"] | None
    erase: Float[Tensor, "b t h n"] | None
    match_before_decay: bool
    state: Float[Tensor, "b h n p"] | None
    reads: Int[Tensor, "b q"] | None
    first: int
    every: int

    def select_reads(self, z: Float[Tensor, "b t *rest"]) -> Float[Tensor, "b q *rest"]:
        """Return what is read, of what all times would read."""
        return z[:, self.first :: self.every] if self.reads is None else _take(z, self.reads)


def _spread(q, k, v, log_decay, match, erase, match_before_decay, own, at, state) -> _Spread:
    m = k.shape[2] if k.ndim == 5 else 1
    _check(at, state, own, q, k, v, log_decay, match, erase)
    h, high = v.shape[-2], promote(v)
    # What is read before a token's write is read after the write of the token before it.
    null = 0 if own is None else 1

    def spread(z):
        z = _repeat((z.flatten(1, 2) if z.ndim == 5 else z).to(high), h)
        return _pad(z, null, 0)

    k, v = spread(k), spread(v)
    match, erase = (None if z is None else spread(z) for z in (match, erase))
    q, state = _repeat(q.to(high), h), None if state is None else state.to(high)
    if log_decay is not None:
        log_decay = log_decay.to(high).reshape(*log_decay.shape[:3], 1, -1)
        log_decay = _pad(_pad(log_decay.transpose(2, 3), 0, m - 1).flatten(1, 2), null, 0)
    first = 0 if null else m - 1
    reads = None if at is None else at * m + first
    if reads is not None:
        index = reads[..., None, None].expand(-1, -1, *q.shape[2:])
        q = torch.zeros_like(k).scatter(1, index, q)
    elif null:
        reads = m * torch.arange(q.shape[1], device=q.device).expand(len(q), -1)
        q = _pad(_pad(q[:, :, None], 0, m - 1).flatten(1, 2), 0, 1)
    else:
        q = _pad(q[:, :, None], m - 1, 0).flatten(1, 2)
    return _Spread(q, k, v, log_decay, match, erase, match_before_decay, state, reads, first, m)


def _check(at, state, own, q, k, v, log_decay, match, erase) -> None:
    rows, t, *several, _, n = k.shape
    h, p = v.shape[-2:]
    if t < 1:
        raise ValueError("k has t=0 tokens, must have at least 1")
    if erase is not None and match is None:
        raise ValueError("erase needs a match: what is taken away is what the state holds there")
    for name, z in {"q": q, "k": k, "match": match, "erase": erase}.items():
        if z is not None and (z.shape[-2] < 1 or h % z.shape[-2]):
            raise ValueError(f"{name} has g={z.shape[-2]} groups, must divide v's h={h} heads")
    reads = t if at is None else at.shape[1]
    expected = {
        "q [b q g n]": (q, (rows, reads, q.shape[-2], n)),
        "v [b t h p]": (v, (rows, t, *several, h, p)),
        **{
            f"{name} [b t g n]": (z, (rows, t, *several, z.shape[-2], n))
            for name, z in {"match": match, "erase": erase}.items()
            if z is not None
        },
        "own [b q h]": (own, (rows, reads, *several, h)),
        "at [b q]": (at, (rows, reads)),
        "initial_state [b h n p]": (state, (rows, h, n, p)),
    }
    for name, (z, shape) in expected.items():
        if z is not None and z.shape != shape:
            raise ValueError(f"{name} is {list(z.shape)}, must be {list(shape)}")
    if at is not None:
        ordered = at.sort(1).values
        if reads < 1 or ordered[:, 0].lt(0).any() or ordered[:, -1].ge(t).any():
            raise ValueError(f"at must be positions in [0, {t}), at least one of each row")
        if ordered.diff(dim=1).eq(0).any():
            raise ValueError("at gives a position of a row twice, must give each at most once")
    if log_decay is not None and log_decay.shape not in ((rows, t, h), (rows, t, h, n)):
        raise ValueError(
            f"log_decay is {list(log_decay.shape)}, must be {[rows, t, h]} or {[rows, t, h, n]}"
        )


def _scan(z: _Spread) -> Float[Tensor, "b t h n p"]:
    """Return the state after each write: the definition."""
    state = z.state
    if state is None:
        state = z.v.new_zeros(z.v.shape[0], *z.k.shape[2:], z.v.shape[-1])
    states = []
    for t in range(z.k.shape[1]):
        now = (None if y is None else y[:, t] for y in (z.log_decay, z.k, z.v, z.match, z.erase))
        state = _update(state, z.match_before_decay, *now)
        states.append(state)
    return torch.stack(states, 1)


def _update(state, match_before_decay, log_decay, k, v, match, erase):
    """Return the state after one write: the formula."""
    before, write = state, v[..., None, :]
    if log_decay is not None:
        state = log_decay.exp()[..., None] * state
    if match is not None:
        held = match[..., None, :] @ (before if match_before_decay else state)
        if erase is None:
            write = write - held
        else:
            state = state - erase[..., None] * held
    return state + k[..., None] * write


class _DeltaChunks(NamedTuple):
    """What a chunk's tokens write and read, but for the state S₀ before the chunk.

    Within a chunk let R be what its tokens read at m before they correct the state, f the decay
    since its start, e that until its end, and K, E, M, Q its tokens, in whose products each pair
    has the decay between the two:

        (I + tril(M Eᵀ, −1)) R = tril(M Kᵀ, −1) V + (f ∘ M) S₀
        O = tril(Q Kᵀ) V − tril(Q Eᵀ) R + (f ∘ Q) S₀,   S₁ = f_last S₀ + (e ∘ K)ᵀ V − (e ∘ E)ᵀ R

    So K and E together are keys, and V and −R are their values, the latter linear in S₀. Where E is
    K, one key has the value V − R. Axis letter, besides those above: w key within its chunk, l or,
    where E is not K, 2 l of them.
    """

    q: Float[Tensor, "c b h l n"]  # f ∘ Q
    keys: Float[Tensor, "c b h w n"]  # e ∘ K, and e ∘ E
    scores: Float[Tensor, "c b h l w"]
    values: Float[Tensor, "c b h w p"]  # with S₀ = 0
    erased: Float[Tensor, "c b h w n"] | None  # times S₀ is what values lack
    kept: Float[Tensor, "c b h _ 1"]  # f_last

    def pass_states(
        self, state: Float[Tensor, "b h n p"] | None
    ) -> tuple[Float[Tensor, "c b h n p"], Float[Tensor, "b h n p"]]:
        """Return the states before the chunks, and the one after the last."""
        added, kept = self.keys.mT @ self.values, self.kept
        if self.erased is not None:
            unit = torch.eye(self.keys.shape[-1], dtype=kept.dtype, device=kept.device)
            kept = kept * unit - self.keys.mT @ self.erased
        state = torch.zeros_like(added[0]) if state is None else state
        starts = []
        # Of all chunks at once: selecting one at a time would give each a gradient of full size.
        for part, new in zip(kept.unbind(), added.unbind(), strict=True):
            starts.append(state)
            if self.erased is None:
                state = torch.addcmul(new, part, state)
            else:
                state = _add_product(new, part, state)
        return torch.stack(starts), state

    def find_values(self, starts: Float[Tensor, "c b h n p"]) -> Float[Tensor, "c b h w p"]:
        """Return the values that chunks write, from the states before them."""
        if self.erased is None:
            return self.values
        return _add_product(self.values, self.erased, starts, -1.0)

    def read(self, starts: Float[Tensor, "c b h n p"]) -> Float[Tensor, "c b h l p"]:
        """Return what tokens read, from the states before their chunks."""
        return _add_product(self.scores @ self.find_values(starts), self.q, starts)


def _compute_chunks(z: _Spread, length: int) -> _DeltaChunks:
    q, k, v = (_fold(y, length) for y in (z.q, z.k, z.v))
    match, erase, g = (
        None if y is None else _fold(y, length) for y in (z.match, z.erase, z.log_decay)
    )
    g = k.new_zeros(*k.shape[:-1], 1) if g is None else g
    decay = _decay_by_head if g.shape[-1] == 1 else _decay_by_channel
    kept = g.sum(-2).exp()[..., None]
    if match is None:
        (q,), (k,), ((scores,),) = decay([q], [k], g)
        return _DeltaChunks(q, k, scores, v, None, kept)
    before = z.match_before_decay
    if erase is None:
        (q, match), (k,), ((scores,), (overlaps,)) = decay([q, match], [k], g, before)
        values, erased = _solve(overlaps, v, match)
        return _DeltaChunks(q, k, scores, values, erased, kept)
    (q, match), keys, (scores, (of_k, of_e)) = decay([q, match], [k, erase], g, before)
    read, erased = _solve(of_e, of_k.tril(-1) @ v, match)
    values, erased = torch.cat([v, -read], -2), torch.cat([torch.zeros_like(erased), erased], -2)
    return _DeltaChunks(q, torch.cat(keys, -2), torch.cat(scores, -1), values, erased, kept)


def _add_product(z, a, b, sign=1.0):
    """Return z ± a @ b, each with batch axes alike, in one pass over z."""
    flat = torch.baddbmm(*(y.flatten(0, -3) for y in (z, a, b)), alpha=sign)
    return flat.view(z.shape)


def _solve(A, *sides):
    """Return (I + tril(A, −1))⁻¹ times each side."""
    solution = torch.linalg.solve_triangular(
        A, torch.cat(sides, -1), upper=False, unitriangular=True
    )
    return solution.split([side.shape[-1] for side in sides], -1)


def _decay_by_head(rows, keys, log_decay, last_before=False):
    """Return what reads and writes of a chunk are with one log-decay, [… l 1], for all channels.

    Args:
        rows: where tokens read, [… l n] each: q, or q and match.
        keys: where tokens write, [… l n] each: k, or k and erase.
        log_decay: ≤ 0.
        last_before: whether tokens read at the last of the rows before their own decay.

    Returns:
        Rows times the decay since the chunk's start, keys times that until its end, and for each
        row and key their products, times the decay between the two tokens: 0 for later keys, and
        without meaning for a token's own key and match.
    """
    L, since = decay_matrix(log_decay[..., 0]), log_decay.cumsum(-2).exp()
    to_end = L[..., -1, :, None]
    ways = [(since, L)] * len(rows)
    if last_before:
        ways[-1] = F.pad(since[..., :-1, :], (0, 0, 1, 0), value=1.0), _delay(L)
    scores = [[(row @ key.mT) * L for key in keys] for row, (_, L) in zip(rows, ways, strict=True)]
    rows = [row * since for row, (since, _) in zip(rows, ways, strict=True)]
    return rows, [key * to_end for key in keys], scores


def _decay_by_channel(rows, keys, log_decay, last_before=False):
    """Return what `_decay_by_head` does where each channel has its own log_decay, [… l n].

    The decay between two tokens is then part of the sum over channels. A later half of tokens reads
    an earlier one by a product of matrices, since the decay is that until the end of the earlier
    half times that since the start of the later one, of which neither overflows. So halves of one
    token are put together, then of two, up to the whole chunk.
    """
    kept = log_decay.exp()  # [… blocks n]
    blocks = [[(row * key).sum(-1)[..., None, None] for key in keys] for row in rows]
    undecayed = rows[-1]
    rows = [row * kept for row in rows]
    if last_before:
        rows[-1] = undecayed
    rows, keys = ([z.unsqueeze(-2) for z in given] for given in (rows, keys))  # [… blocks l n]
    while kept.shape[-2] > 1:
        kept_early, kept_late = (z[..., None, :] for z in kept.unflatten(-2, (-1, 2)).unbind(-2))
        row_halves = [z.unflatten(-3, (-1, 2)).unbind(-3) for z in rows]
        key_halves = [z.unflatten(-3, (-1, 2)).unbind(-3) for z in keys]
        blocks = [
            [
                _join(block, late @ early.mT)
                for block, (early, _) in zip(of_row, key_halves, strict=True)
            ]
            for of_row, (_, late) in zip(blocks, row_halves, strict=True)
        ]
        rows = [torch.cat([early, late * kept_early], -2) for early, late in row_halves]
        keys = [torch.cat([early * kept_late, late], -2) for early, late in key_halves]
        kept = (kept_early * kept_late).squeeze(-2)
    rows, keys = ([z.squeeze(-3) for z in given] for given in (rows, keys))
    return rows, keys, [[block.squeeze(-3) for block in of_row] for of_row in blocks]


def _join(blocks, lower):
    """Return pairs of blocks [… 2·blocks l l] as blocks of twice the size, with 0 above."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    upper = torch.cat([first, torch.zeros_like(lower)], -1)
    return torch.cat([upper, torch.cat([lower, second], -1)], -2)


def _sum_after(log_decay):
    """Return for each token of [… l n] the sum over later ones, without a difference of sums."""
    return F.pad(log_decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _delay(z):
    """Return [… l n] one token later, zeros first."""
    return F.pad(z[..., :-1, :], (0, 0, 1, 0))


def _choose_length(chunk_len: int, t: int) -> int:
    """Return a power of two: halves are put together."""
    return min(1 << (chunk_len.bit_length() - 1), 1 << (t - 1).bit_length())


def _fold(z: Float[Tensor, "b t h n"], length: int) -> Float[Tensor, "c b h l n"]:
    """Return tokens as chunks; the last is padded with tokens that do nothing."""
    z = _pad(z, 0, -z.shape[1] % length)
    return z.unflatten(1, (-1, length)).permute(1, 0, 3, 2, 4).contiguous()


def _unfold(z: Float[Tensor, "c b h l p"], t: int) -> Float[Tensor, "b t h p"]:
    return z.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :t]


def _pad(z: Float[Tensor, "*b t h n"], before: int, after: int) -> Float[Tensor, "*b s h n"]:
    """Return z with zeros before and after in time; by zero, torch would copy it."""
    return F.pad(z, (0, 0, 0, 0, before, after)) if before or after else z


def _repeat(z: Float[Tensor, "*times g n"], h: int) -> Float[Tensor, "*times h n"]:
    return z if z.shape[-2] == h else z.repeat_interleave(h // z.shape[-2], -2)


def _take(y: Float[Tensor, "b t h p"], at: Int[Tensor, "b q"]) -> Float[Tensor, "b q h p"]:
    return y.take_along_dim(at[..., None, None], 1)


def _read_own_write(own, at, v):
    """Return what tokens read of their own values [b t *r h p], of all writes together."""
    high = promote(v)
    if at is not None:
        v = v.take_along_dim(at.view(*at.shape, *[1] * (v.ndim - 2)), 1)
    read = own.to(high)[..., None] * v.to(high)
    return read.sum(2) if v.ndim == 5 else read
