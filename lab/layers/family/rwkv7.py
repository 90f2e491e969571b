"""RWKV-7 (Goose): decays of channels, and a delta rule whose strength is one number a channel."""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lab.layers.recurrence import GATES, L2_EPS, NORM_EPS, Recurrence, Shared, Terms, shift
from lab.ops.delta import delta_matrix

FASTEST = -math.exp(-0.5)
"""Log of the fastest decay."""


class RWKV7(Recurrence):
    """S_t = (diag(w_t) − (a_t ⊙ κ_t) κ_tᵀ) S_{t−1} + k̃_t v_tᵀ, y_t = S_tᵀ r_t, r being our q.

    w = exp(−e^{−1/2} σ(·)) and a = σ(·) are one number a key channel; κ is k ⊙ ξ at length 1, k̃ is
    k ⊙ (1 + (a − 1) ⊙ α), with learned ξ and α. After the norm, each head adds (r_t ⊙ ρ)ᵀ k̃_t v_t:
    its own value, with a learned bonus ρ. The gate is linear in σ of some numbers.

    r, w, k, v and a are computed from a mixture of the token and the one before it, in learned
    shares μ of each channel: x_t + (x_{t−1} − x_t) ⊙ μ.

    Its matrix has two heads for each head: what it reads of the state, and the bonus.

    Args:
        d_model: width d.
        n_heads: heads h.
        rank: of the maps from x to w and a.
        gate_rank: numbers that the gate is linear in.
        shared: options of `lab.layers.recurrence.Shared`; `gate` is what the numbers pass.

    Raises:
        ValueError: for a rank below 1.

    Source: Peng et al. 2025 (2503.14456), in the form of flash-linear-attention's code. μ, ξ, α, ρ
        and the decays start as there for the first layer.
    Departs: no residual of values from the first layer, which a mixer does not see; the gate sees
        the token alone, without shift; heads' norm has no bias. Matrices start as `nn.Linear` does.
    """

    usual = Shared(gate="sigmoid")
    channel_decay = True
    match_before_decay = True
    normed = "centred head"
    matrix_form = "M, what each token reads of each value; of each head, then its bonus"

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        rank: int = 32,
        gate_rank: int = 32,
        **shared: Unpack[Shared],
    ):
        super().__init__(d_model, n_heads, **shared)
        for name, given in (("rank", rank), ("gate_rank", gate_rank)):
            if given < 1:
                raise ValueError(f"{name}={given} must be at least 1")
        self.carry_width = d_model
        channels, width = n_heads * self.d_state, n_heads * self.d_value
        powers = torch.tensor([0.2, 0.7, 0.7, 0.9, 0.9])[:, None]
        self.mix = nn.Parameter(1 - (torch.arange(d_model) / d_model) ** powers)  # r k v w a
        self.decay_down = nn.Linear(d_model, rank, bias=False)
        self.decay_up = nn.Linear(rank, channels)
        self.rate_down = nn.Linear(d_model, rank, bias=False)
        self.rate_up = nn.Linear(rank, channels)
        if self.g_proj is not None:
            self.gate_down = nn.Linear(d_model, gate_rank, bias=False)
            self.g_proj = nn.Linear(gate_rank, width, bias=False)
        share = torch.arange(channels) / max(channels - 1, 1)
        self.match_scale = nn.Parameter(0.71 - 0.1 * (share - 0.5))
        self.key_rate = nn.Parameter(torch.full((channels,), 1.02))
        self.bonus = nn.Parameter(torch.full((n_heads, self.d_state), -0.04))
        with torch.no_grad():
            zigzag = torch.linspace(-1, 1, self.d_state).repeat(n_heads)
            zigzag = zigzag * zigzag.abs()
            self.decay_up.bias.copy_(-5.5 + 6 * share + 2.5 * zigzag)
            self.rate_up.bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * (share - 0.5))

    def prepare(
        self,
        x: Float[Tensor, "b t d"],
        carry: Float[Tensor, "b d"],
        keep: Bool[Tensor, "b t"] | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Float[Tensor, "b d"]]:
        """Return what r, k and v are computed from, w and a, side by side; and the last token."""
        before, last = shift(x, carry, keep)
        r, k, v, w, a = x + (before - x) * self.mix.to(x)[:, None, None]
        return (r, k, v, torch.cat([w, a], -1)), last

    def decide(
        self,
        x: Float[Tensor, "b t e"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return r, k̃ and v, the decays, what they take away where, and the bonus as `own`."""
        w, a = x.chunk(2, -1)
        logits = self.decay_up(self.decay_down(w).tanh()).to(k).view_as(k)
        log_decay = self.hook_log_decay(FASTEST * logits.sigmoid())
        rate = self.hook_beta(self.rate_up(self.rate_down(a)).to(k).sigmoid().view_as(k))
        scale, key_rate = (z.to(k).view(k.shape[-2:]) for z in (self.match_scale, self.key_rate))
        found = k * scale
        found = found * (found.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
        k = k * (1 + (rate - 1) * key_rate)
        own = (q * self.bonus.to(k) * k).sum(-1)
        return Terms(q, k, v, log_decay, found, rate * found, own)

    def list_terms(self, x: Float[Tensor, "b t d"]) -> Terms:
        """Return what the recurrence of whole rows gets; the bonus has no part in it."""
        return super().list_terms(x)._replace(own=None)

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b heads t s"]:
        """Return the matrices, or some of their rows; quadratic, for analysis."""
        terms = self._compute(x)[0]
        M = delta_matrix(*terms[:2], *terms[3:6], rows=rows, match_before_decay=True)
        assert terms.own is not None
        own = terms.own.mT.diag_embed()
        return torch.cat([M, own if rows is None else own[:, :, rows]], 1)

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b heads s p"]:
        """Return the values that the matrices mix."""
        return super().values(x).repeat(1, 2, 1, 1)

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b heads t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the output for the mixed values: of the heads, then of their bonuses."""
        read, own = self.hook_z(rearrange(z, "b h t p -> b t h p")).chunk(2, 2)
        if self.norm_weight is not None:
            weight = self.norm_weight.to(read).view(read.shape[-2:])
            p = read.shape[-1]
            read = F.layer_norm(read, (p,), eps=p * NORM_EPS) * weight
        y = rearrange(read + own, "b t h p -> b t (h p)")
        if self.g_proj is not None:
            y = y * self.g_proj(GATES[self.gate](self.gate_down(x))).to(y)
        return self.out_proj(y.to(x.dtype))

    def _mix(
        self, terms: Terms, memory: Float[Tensor, "b h n p"] | None
    ) -> tuple[Float[Tensor, "b t heads p"], Float[Tensor, "b h n p"]]:
        assert terms.own is not None
        z, memory = super()._mix(terms._replace(own=None), memory)
        return torch.cat([z, terms.own[..., None] * terms.v], 2), memory
