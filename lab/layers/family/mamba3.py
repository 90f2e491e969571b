"""Mamba-3: a trapezoidal rule in place of Euler's, and rotations that tokens decide."""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lab.layers.recurrence import GATES, Recurrence, RecurrentState, Shared, Terms, shift
from lab.layers.ssd import DT_MAX, DT_MIN, draw_dt_bias
from lab.ops.precision import promote

DT_MOST = 80
"""Largest dt at the start: beyond, the exponential that finds its bias overflows in fp32."""
A_FLOOR = 1e-4
"""Least rate of decay."""


class Mamba3(Recurrence):
    """S_t = α_t S_{t−1} + α_t (1 − λ_t) dt_t W_{t−1} + λ_t dt_t W_t, y_t = S_tᵀ q_t + D v_t.

    W_t = k_t v_tᵀ is what a token writes, a part of it together with the next token.
    α = exp(−dt softplus(·)), dt = softplus(·) and λ = σ(·) are linear in x but for what is shown.
    q and k, each of root mean square 1 and with a bias, are rotated by the sum of dt π tanh(·) over
    all tokens so far, a number for each of the first pairs of channels.

    It is computed as one write a token: that of token t with the weight that the next one adds,
    λ_t dt_t + (1 − λ_{t+1}) dt_{t+1}, and a token reads α_t S_{t−1} beside its own value.

    With several inputs and outputs (MIMO), r of each, W_t = Σ_j k_tj (x_j ⊙ v_t)ᵀ, the gate is
    SiLU(z_i ⊙ ·) for what q_ti reads of the same state, and the head returns the sum of the gated
    readings ⊙ o_i: x, z and o are `mimo_x`, `mimo_z` and `mimo_o`, learned. D adds x_i ⊙ v_t to
    reading i. Its matrix has a head for each pair of a write j and a reading i.

    Args:
        d_model: width d.
        n_heads: heads h.
        mimo_rank: r ≥ 1.
        rotated: share of the channels of q and k that are rotated, in [0, 1].
        dt_min: least dt at the start, which is log-uniform in the heads, > 0. A token rotates by
            less than π dt: to turn the state over, dt must become large.
        dt_max: greatest dt at the start, ≥ dt_min and ≤ 80.
        shared: options of `lab.layers.recurrence.Shared`; there is neither a convolution, nor an
            activation, nor a rotation to positions.

    Raises:
        ValueError: for a rank below 1, a share outside [0, 1], a range of dt that is none, or an
            option that it does not have.

    Source: Lahoti et al. 2026 (2603.15569), in the form of its authors' code.
    Departs: each head has its own q and k; widths follow `Shared`.
    """

    usual = Shared(qk_norm="rms", norm=False, gate="silu")

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        mimo_rank: int = 1,
        rotated: float = 0.5,
        dt_min: float = DT_MIN,
        dt_max: float = DT_MAX,
        **shared: Unpack[Shared],
    ):
        if mimo_rank < 1:
            raise ValueError(f"{mimo_rank=} must be at least 1")
        self.mimo_rank = mimo_rank
        super().__init__(d_model, n_heads, **shared)
        if not 0 <= rotated <= 1:
            raise ValueError(f"{rotated=} must be in [0, 1]")
        if not 0 < dt_min <= dt_max <= DT_MOST:
            raise ValueError(f"{dt_min=}, {dt_max=}: must be 0 < dt_min ≤ dt_max ≤ {DT_MOST}")
        for name, chosen, only in (
            ("conv_width", 0 if self.conv is None else self.conv.width, 0),
            ("activation", self.activation, "none"),
            ("position", self.position, "none"),
        ):
            if chosen != only:
                raise ValueError(f"{name}={chosen!r} must be {only!r}: Mamba-3 has none")
        n = self.d_state
        self.n_angles = int(n * rotated) // 2
        self.carry_width = d_model + n_heads * self.n_angles
        self.rate_proj = nn.Linear(d_model, 3 * n_heads, bias=False)
        self.angle_proj = nn.Linear(d_model, self.n_angles, bias=False) if self.n_angles else None
        self.dt_bias = nn.Parameter(draw_dt_bias(n_heads, dt_min, dt_max))
        self.q_scale, self.k_scale = nn.Parameter(torch.ones(n)), nn.Parameter(torch.ones(n))
        self.q_bias = nn.Parameter(torch.ones(mimo_rank * n_heads, n))
        self.k_bias = nn.Parameter(torch.ones(mimo_rank * n_heads, n))
        self.D = nn.Parameter(torch.ones(n_heads))
        if mimo_rank > 1:
            mixed = torch.ones(mimo_rank, n_heads, self.d_value)
            self.mimo_x, self.mimo_o = (nn.Parameter(mixed / mimo_rank) for _ in "xo")
            if self.g_proj is not None:
                self.mimo_z = nn.Parameter(mixed.clone())

    def list_widths(self, n: int, width: int) -> list[int]:
        """Return the widths of q, k and v: r queries and keys, of one value."""
        keys = self.mimo_rank * self.n_heads * n
        return [keys, keys, width]

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: RecurrentState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], RecurrentState]:
        """Return the outputs of further tokens, and the state after them."""
        self._check(x, state, keep)
        return super().prefill(x, None if state is None else self._complete(x, state, keep), keep)

    def step(
        self, x: Float[Tensor, "b d"], state: RecurrentState
    ) -> tuple[Float[Tensor, "b d"], RecurrentState]:
        """Return the output of one further token, and the state after it."""
        self._check(x, state)
        return super().step(x, self._complete(x[:, None], state, None))

    def prepare(
        self,
        x: Float[Tensor, "b t d"],
        carry: Float[Tensor, "b e"],
        keep: Bool[Tensor, "b t"] | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Float[Tensor, "b e"]]:
        """Return x thrice; log-decay, own and next weight and angles, side by side; and the carry.

        The carry is the last token and its angles.
        """
        d = x.shape[-1]
        _, last = shift(x, carry[:, :d], keep)
        rates, own, added, dt = self._list_rates(x, keep)
        ahead, _ = self._look_ahead(added, keep)
        angles = carry[:, None, d:].double()
        if self.angle_proj is not None:
            turns = math.pi * self.angle_proj(x).to(dt).tanh()[:, :, None] * dt[..., None]
            angles = (angles + turns.flatten(2).double().cumsum(1)) % (2 * math.pi)
        else:
            angles = angles.expand(-1, x.shape[1], -1)
        angles = angles.to(dt)
        return (
            (x, x, x, torch.cat([rates, own, ahead, angles], -1)),
            torch.cat([last, angles[:, -1]], -1),
        )

    def decide(
        self,
        x: Float[Tensor, "b t g"],
        q: Float[Tensor, "b t rh n"],
        k: Float[Tensor, "b t rh n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return rotated q, decayed, and k, weighted; and what is read of the own value.

        Each reading is a head of its own here: with r of them, heads are h·r, and so are their
        states, of which r are alike.
        """
        h, r = self.n_heads, self.mimo_rank
        log_decay, own, ahead, angles = x.split([h, h, h, x.shape[-1] - 3 * h], -1)
        log_decay = self.hook_log_decay(log_decay)
        q = self._turn(q, self.q_scale, self.q_bias, angles)
        q = rearrange(q, "b t (i h) n -> b t (h i) n", h=h)
        k = self._turn(k, self.k_scale, self.k_bias, angles)
        k, v = (z.repeat_interleave(r, -2) for z in self._spread(k, v))
        log_decay, own, ahead = (z.repeat_interleave(r, -1) for z in (log_decay, own, ahead))
        skip = torch.eye(r).to(q)[:, None] * self.D.to(q)[:, None]
        weight = own + ahead
        own = own[:, :, None] * (q[:, :, None] * k).sum(-1) + skip.flatten(1)
        q, k = q * log_decay.exp()[..., None], k * weight[:, :, None, :, None]
        if r == 1:  # one write a token has no axis of writes
            k, v, own = (z.squeeze(2) for z in (k, v, own))
        return Terms(q, k, v, log_decay, own=own)

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b heads t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the output for mixed values: of each reading, or of each of its writes."""
        h, r = self.n_heads, self.mimo_rank
        if r == 1:
            return super().project(x, z)
        z = z.unflatten(1, (-1, h * r)).sum(1)
        y = self.hook_z(rearrange(z, "b h t p -> b t h p"))
        if self.norm_weight is not None:
            y = self._norm_output(y, self.norm_weight.to(y))
        y = rearrange(y, "b t (h i) p -> b t i h p", i=r)
        if self.g_proj is not None:
            gate = rearrange(self.g_proj(x).to(y), "b t (h p) -> b t 1 h p", h=h)
            y = y * GATES[self.gate](gate * self.mimo_z.to(y))
        y = rearrange((y * self.mimo_o.to(y)).sum(2), "b t h p -> b t (h p)")
        return self.out_proj(y.to(x.dtype))

    def _mix(
        self, terms: Terms, memory: Float[Tensor, "b h n p"] | None
    ) -> tuple[Float[Tensor, "b t heads p"], Float[Tensor, "b h n p"]]:
        r = self.mimo_rank
        memory = None if memory is None else memory.repeat_interleave(r, 1)
        z, memory = super()._mix(terms, memory)
        return z, memory[:, ::r].contiguous()

    def _spread(self, k, v):
        """Return keys [b t j h n] and values [b t j h p] of k [b t (j h) n] and v [b t h p]."""
        v = v[:, :, None]
        if self.mimo_rank > 1:
            v = v * self.mimo_x.to(v)
        return rearrange(k, "b t (j h) n -> b t j h n", h=self.n_heads), v

    def _list_rates(self, x, keep):
        """Return log α, λ dt, (1 − λ) dt and dt [b t h], all 0 at padding."""
        rate, dt, share = self.rate_proj(x).to(promote(x)).chunk(3, -1)
        dt = F.softplus(dt + self.dt_bias.to(dt))
        if keep is not None:
            dt = dt.masked_fill(~keep[..., None], 0)
        share = share.sigmoid()
        return -F.softplus(rate).clamp(min=A_FLOOR) * dt, share * dt, (1 - share) * dt, dt

    def _look_ahead(self, z, keep):
        """Return what z [b t h] is at the next kept token, 0 without one, and at the first."""
        keep = None if keep is None else keep.flip(1)
        later, first = shift(z.flip(1), torch.zeros_like(z[:, 0]), keep)
        return later.flip(1), first

    def _complete(self, x, state, keep):
        """Return the state with what the first of further tokens writes of the one before it."""
        d, high = x.shape[-1], promote(x)
        last, angles = state.carry[:, None, :d].to(x), state.carry[:, None, d:].to(high)
        k = rearrange(self.k_proj(last).to(high), "b 1 (h n) -> b 1 h n", n=self.d_state)
        v = rearrange(self.v_proj(last).to(high), "b 1 (h p) -> b 1 h p", p=self.d_value)
        k = self._turn(self._normalise(k), self.k_scale, self.k_bias, angles)
        k, v = (z[:, 0] for z in self._spread(k, v))
        _, first = self._look_ahead(self._list_rates(x, keep)[2], keep)
        added = torch.einsum("bjhn,bjhp->bhnp", first[:, None, :, None] * k, v)
        return state._replace(memory=state.memory + added.to(state.memory))

    def _turn(self, z, scale, bias, angles):
        """Return q or k [b t h n], scaled and with its bias, rotated in its first pairs."""
        z = z * scale.to(z) + bias.to(z)
        angles = rearrange(angles, "b t (h r) -> b t h r", h=self.n_heads)
        angles = angles.repeat(1, 1, self.mimo_rank, 1)
        turned, rest = z.split([2 * self.n_angles, z.shape[-1] - 2 * self.n_angles], -1)
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
        return torch.cat([pairs.flatten(-2), rest], -1)
