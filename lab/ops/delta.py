"""The delta rule and its relatives: a matrix as state that each token decays, corrects and writes.

    S_t = (I − e_t m_tᵀ) diag(exp g_t) S_{t−1} + k_t v_tᵀ        o_t = S_tᵀ q_t

The state S [n p] maps keys to values. A token lets it decay (log-decay g ≤ 0, one number a head or
one a key channel), reads what it holds at the direction m, takes that away at the direction e, and
writes v at k. Without m nothing is corrected; without e it is k, as in the delta rule, whose write
replaces what the state held. What the mixers of the family give it:

    linear attention, RetNet, GLA, HGRN2     q, k, v and the decay; no m
    DeltaNet, Gated DeltaNet, KDA            k = β κ, m = κ, |κ| = 1: v replaces what κ held
    Comba                                    k = β κ, m = s κ / exp g, as it reads before the decay
    RWKV-7                                   a decay w a channel, m = κ̂ / w, e = a ⊙ κ̂
    Gated DeltaProduct                       r virtual tokens a token: all but the first without
                                             decay, the output of the last one
    RWKV-6, Mamba-3                          read S_{t−1}: the q of the next token, moved by one
    mLSTM                                    decay and k scaled so that none exceeds 1

`delta_loop` is the definition, token by token. `delta` computes it in chunks, with memory linear in
t; `delta_matrix` is the same as one matrix, `delta_states` shows the state after each token, and
`delta_step` is one token of decoding. SSD (`lab.ops.ssd`) is the case of a scalar decay without m;
it keeps its own form, which knows that k and q are shared by heads.

Axis letters, besides the package's: r row and c column of a block, z channel of the decay (1 or n).

Source: Yang et al. 2024 (2406.06484), § 3; with decays a channel, Kimi Linear (2510.26692), § 3.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lab.ops.precision import keep_dtypes, promote
from lab.ops.ssd_decay import FORGOTTEN, decay_matrix

Decay = Float[Tensor, "b t h"] | Float[Tensor, "b t h n"]
LEAF = 2
"""Rows of the smallest blocks, whose decays are computed pair by pair."""


@keep_dtypes
def delta(
    q: Float[Tensor, "b t h n"],
    k: Float[Tensor, "b t h n"],
    v: Float[Tensor, "b t h p"],
    log_decay: Decay | None = None,
    match: Float[Tensor, "b t h n"] | None = None,
    erase: Float[Tensor, "b t h n"] | None = None,
    initial_state: Float[Tensor, "_ _ _ _"] | None = None,
    chunk_len: int = 64,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h n p"]]:
    """Return the outputs, in v's dtype, and the state after the last token, in fp32 at least.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 8, 2, 4)
    >>> k = torch.nn.functional.normalize(k, dim=-1)
    >>> y, _ = delta(q, k, v, match=k)
    >>> _, state = delta(q[:, :5], k[:, :5], v[:, :5], match=k[:, :5])
    >>> rest, _ = delta(q[:, 5:], k[:, 5:], v[:, 5:], match=k[:, 5:], initial_state=state)
    >>> torch.allclose(y[:, 5:], rest, atol=1e-5)
    True

    Args:
        q: what tokens read, t ≥ 1.
        k: where they write.
        v: what they write.
        log_decay: g ≤ 0, −∞ to forget all, of each head or of each of its key channels; None: 0.
        match: m, at which the state is read before it is corrected; None: it is not.
        erase: e, at which what was read is taken away; None: k.
        initial_state: [b h n p], the state before the first token; None is zero.
        chunk_len: most tokens of a chunk; any value gives the same result.

    Raises:
        ValueError: for shapes that do not fit, an erase without a match, or chunk_len < 1.
    """
    _check(q, k, v, log_decay, match, erase, initial_state)
    if chunk_len < 1:
        raise ValueError(f"{chunk_len=} must be at least 1")
    b, t, h, n = q.shape
    chunks = _DeltaChunks(q, k, v, log_decay, match, erase, _choose_len(t, chunk_len))
    state = chunks.k.new_zeros(b, h, n, v.shape[-1])
    states, last = chunks.pass_on(state if initial_state is None else initial_state.to(state))
    return chunks.read(states)[:, :t].to(v.dtype), last


@keep_dtypes
def delta_loop(
    q: Float[Tensor, "b t h n"],
    k: Float[Tensor, "b t h n"],
    v: Float[Tensor, "b t h p"],
    log_decay: Decay | None = None,
    match: Float[Tensor, "b t h n"] | None = None,
    erase: Float[Tensor, "b t h n"] | None = None,
    initial_state: Float[Tensor, "_ _ _ _"] | None = None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h n p"]]:
    """Return what `delta` returns, token by token: the definition."""
    _check(q, k, v, log_decay, match, erase, initial_state)
    states = delta_states(k, v, log_decay, match, erase, initial_state)
    y = torch.einsum("bthnp,bthn->bthp", states, q.to(states))
    return y.to(v.dtype), states[:, -1]


@keep_dtypes
def delta_states(
    k: Float[Tensor, "b t h n"],
    v: Float[Tensor, "b t h p"],
    log_decay: Decay | None = None,
    match: Float[Tensor, "b t h n"] | None = None,
    erase: Float[Tensor, "b t h n"] | None = None,
    initial_state: Float[Tensor, "_ _ _ _"] | None = None,
) -> Float[Tensor, "b t h n p"]:
    """Return the state after each token, in fp32 at least; arguments as those of `delta`."""
    _check(k, k, v, log_decay, match, erase, initial_state)
    b, t, h, n = k.shape
    high = promote(k)
    state = k.new_zeros(b, h, n, v.shape[-1], dtype=high)
    state = state if initial_state is None else initial_state.to(state)
    states = []
    for i in range(t):
        state = _update(
            state, *(None if z is None else z[:, i] for z in (k, v, log_decay, match, erase))
        )
        states.append(state)
    return torch.stack(states, 1)


@keep_dtypes
def delta_step(
    q: Float[Tensor, "b h n"],
    k: Float[Tensor, "b h n"],
    v: Float[Tensor, "b h p"],
    log_decay: Float[Tensor, "b h"] | Float[Tensor, "b h n"] | None,
    match: Float[Tensor, "b h n"] | None,
    erase: Float[Tensor, "b h n"] | None,
    state: Float[Tensor, "b h n p"],
) -> tuple[Float[Tensor, "b h p"], Float[Tensor, "b h n p"]]:
    """Return the output of one token and the state after it; arguments as those of `delta`."""
    _check(q, k, v, log_decay, match, erase, state, "state")
    state = _update(state, k, v, log_decay, match, erase)
    return torch.einsum("bhnp,bhn->bhp", state, q.to(state)).to(v.dtype), state


@keep_dtypes
def delta_matrix(
    q: Float[Tensor, "b t h n"],
    k: Float[Tensor, "b t h n"],
    log_decay: Decay | None = None,
    match: Float[Tensor, "b t h n"] | None = None,
    erase: Float[Tensor, "b t h n"] | None = None,
    rows: slice | None = None,
) -> Float[Tensor, "b h t s"]:
    """Return the matrix M with o = M v, or some of its rows; quadratic, for analysis.

    Without a match M_ts = q_tᵀ diag(exp Σ_{s<r≤t} g_r) k_s for s ≤ t. With one, what is read of v_s
    is what no later token has taken away: a triangular solve.
    """
    _check(q, k, k, log_decay, match, erase, None)
    t, rows = q.shape[1], slice(None) if rows is None else rows
    chunks = _DeltaChunks(q, k, k, log_decay, match, erase, _choose_len(t, t))
    M = chunks.query_key
    if chunks.match is not None:
        # M − (Q E) (I + M E)⁻¹ (M K), each product decayed; with E = K it is Q K (I + M K)⁻¹.
        read = chunks.query_erase[..., :t, :][..., rows, :]
        read = torch.linalg.solve_triangular(
            chunks.corrections, read, upper=False, left=False, unitriangular=True
        )
        whole = (
            read if chunks.erase is None else M[..., :t, :][..., rows, :] - read @ chunks.match_key
        )
        return whole[:, :, 0, :, :t]
    return M[:, :, 0, :t, :t][..., rows, :]


def _update(state, k, v, log_decay, match, erase):
    """Return the state after one token."""
    k, v = k.to(state), v.to(state)
    if log_decay is not None:
        decay = log_decay.to(state).exp()
        state = state * (decay[..., None, None] if decay.ndim == 2 else decay[..., None])
    if match is not None:
        held = torch.einsum("bhnp,bhn->bhp", state, match.to(state))
        if erase is None:
            v = v - held
        else:
            state = state - erase.to(state)[..., None] * held[..., None, :]
    return state + k[..., None] * v[..., None, :]


class _DeltaChunks:
    """The tokens in chunks [b h c l …], and what each chunk does to the state that it finds.

    W = (I + tril(m e))⁻¹ (m S + tril(m k) v) is what its tokens read at m, each product decayed by
    what lies between; with U = v − W, or v and W apart where e is not k,

        S ← A S + B,   o = q S + tril(q k) v − tril(q e) W
    """

    def __init__(self, q, k, v, log_decay, match, erase, length):
        high = promote(k)
        self.q, self.k, self.v = (_cut(z.to(high), length) for z in (q, k, v))
        self.match, self.erase = (
            None if z is None else _cut(z.to(high), length) for z in (match, erase)
        )
        if log_decay is not None:
            log_decay = _cut(log_decay.to(high), length)
        channels = log_decay is not None and log_decay.ndim == self.k.ndim
        self.decay = _ChannelDecay(log_decay) if channels else _ScalarDecay(log_decay, self.k)
        left = [self.q] if self.match is None else [self.q, self.match]
        products = self.decay.multiply(torch.stack(left), self.k[None])
        self.query_key, self.match_key = products[0], products[-1]
        self.query_erase, match_erase = products[0], products[-1]
        if self.erase is not None:
            self.query_erase, match_erase = self.decay.multiply(torch.stack(left), self.erase[None])
        if match is not None:
            self.corrections = match_erase.tril(-1)  # the unit diagonal is not stored
            self.match_key = self.match_key.tril(-1)

    def pass_on(self, state):
        """Return the state before each chunk [b h c n p], and the one after the last."""
        keys = self.decay.until_end(self.k)
        if self.match is None:
            self.writes = self.v
            added, forgets = keys.mT @ self.v, None
        else:
            first = self.match_key @ self.v if self.erase is not None else self.v
            joint = torch.cat([first, self.decay.since_start(self.match)], -1)
            solved = torch.linalg.solve_triangular(
                self.corrections, joint, upper=False, unitriangular=True
            )
            own, self.reads = solved.split([self.v.shape[-1], self.k.shape[-1]], -1)
            self.writes = own
            if self.erase is None:
                added, forgets = keys.mT @ own, keys.mT @ self.reads
            else:
                taken = self.decay.until_end(self.erase).mT
                added, forgets = keys.mT @ self.v - taken @ own, taken @ self.reads
        n, whole = self.k.shape[-1], self.decay.whole()[..., None]  # [b h c z 1]
        transitions = whole if forgets is None else whole * self.k.new_ones(n).diag() - forgets
        states = []
        # Of each chunk at once: selecting one at a time would give each a gradient of full size.
        for transition, new in zip(transitions.unbind(2), added.unbind(2), strict=True):
            states.append(state)
            state = (transition * state if forgets is None else transition @ state) + new
        return torch.stack(states, 2), state

    def read(self, states):
        """Return the outputs [b t h p], given the state before each chunk."""
        y = self.decay.since_start(self.q) @ states
        if self.match is None:
            y = y + self.query_key @ self.v
        elif self.erase is None:
            y = y + self.query_key @ (self.writes - self.reads @ states)
        else:
            y = y + self.query_key @ self.v
            y = y - self.query_erase @ (self.writes + self.reads @ states)
        return y.flatten(2, 3).transpose(1, 2)


class _ScalarDecay:
    """Decays of each head, [b h c l]; None: 1."""

    def __init__(self, log_decay, like):
        self.between = None
        self.start = like.new_ones(*like.shape[:4], 1)
        if log_decay is not None:
            self.between = decay_matrix(log_decay)
            sums = log_decay.double().clamp(min=FORGOTTEN).cumsum(-1)
            self.start = sums.exp().to(like)[..., None]

    def multiply(self, left, right):
        products = left @ right.mT
        return products.tril() if self.between is None else products * self.between

    def since_start(self, z):
        return z * self.start

    def until_end(self, z):
        return z if self.between is None else z * self.between[..., -1, :, None]

    def whole(self):
        return self.start[..., -1, :]


class _ChannelDecay:
    """Decays of each key channel, [b h c l n].

    exp(G_r − G_c), with G the running sum, is at most 1 for c ≤ r; its two factors are not. So a
    block below the diagonal is computed from the sum at its corner, between c and r: both factors
    are at most 1. Blocks on the diagonal are halved until they are LEAF long.
    """

    def __init__(self, log_decay):
        self.dtype = log_decay.dtype
        self.sums = log_decay.double().clamp(min=FORGOTTEN).cumsum(-2)
        self.halves = []
        size = log_decay.shape[-2]
        while size > LEAF and size % 2 == 0:
            size //= 2
            pairs = self.sums.unflatten(-2, (-1, 2, size))
            corner = pairs[..., 0, -1:, :]
            self.halves.append(
                (self._exp(pairs[..., 1, :, :] - corner), self._exp(corner - pairs[..., 0, :, :]))
            )
        leaves = self.sums.unflatten(-2, (-1, size))
        causal = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()[..., None]
        steps = leaves[..., :, None, :] - leaves[..., None, :, :]
        self.leaves = self._exp(steps.masked_fill(~causal, -torch.inf))
        self.size = size

    def _exp(self, differences):
        return differences.to(self.dtype).exp()

    def multiply(self, left, right):
        size = self.size
        block = torch.einsum(
            "...rn,...rcn,...cn->...rc",
            left.unflatten(-2, (-1, size)),
            self.leaves,
            right.unflatten(-2, (-1, size)),
        )
        for lower, upper in reversed(self.halves):
            later = left.unflatten(-2, (-1, 2, size))[..., 1, :, :] * lower
            sooner = right.unflatten(-2, (-1, 2, size))[..., 0, :, :] * upper
            first, second = block[..., ::2, :, :], block[..., 1::2, :, :]
            corner = later @ sooner.mT
            block = torch.cat(
                [
                    torch.cat([first, torch.zeros_like(corner)], -1),
                    torch.cat([corner, second], -1),
                ],
                -2,
            )
            size *= 2
        return block[..., 0, :, :]

    def since_start(self, z):
        return z * self._exp(self.sums)

    def until_end(self, z):
        return z * self._exp(self.sums[..., -1:, :] - self.sums)

    def whole(self):
        return self._exp(self.sums[..., -1, :])


def _choose_len(t: int, most: int) -> int:
    """Return the length of a chunk: at most LEAF, doubled until it reaches t or `most`."""
    leaf, doublings = max(1, min(t, most)), 0
    while leaf > LEAF:
        leaf, doublings = -(-leaf // 2), doublings + 1
    return leaf << doublings


def _cut(z: Tensor, length: int) -> Tensor:
    """Return tokens [b t h …] in chunks [b h c l …]; zeros, which change nothing, fill the last."""
    z = z.transpose(1, 2)
    missing = -z.shape[2] % length
    if missing:
        z = F.pad(z, (0, 0) * (z.ndim - 3) + (0, missing))
    return z.unflatten(2, (-1, length))


def _check(q, k, v, log_decay, match, erase, state, state_name="initial_state") -> None:
    """Refuse shapes that do not fit, of a row of tokens [b t h …] or of one token [b h …]."""
    *lead, n = q.shape
    p = v.shape[-1]
    if 0 in lead[1:-1]:
        raise ValueError("there are t=0 tokens, must be at least 1")
    for name, z, shape in (
        ("k", k, [*lead, n]),
        ("v", v, [*lead, p]),
        ("match", match, [*lead, n]),
        ("erase", erase, [*lead, n]),
        (state_name, state, [lead[0], lead[-1], n, p]),
    ):
        if z is not None and list(z.shape) != shape:
            raise ValueError(f"{name} is {list(z.shape)}, must be {shape}")
    if log_decay is not None and list(log_decay.shape) not in (lead, [*lead, n]):
        raise ValueError(f"log_decay is {list(log_decay.shape)}, must be {lead} or {[*lead, n]}")
    if erase is not None and match is None:
        raise ValueError("erase needs a match: what is taken away is what the state holds there")
