"""RWKV-6 (Finch): decays that a token decides, a bonus for the token's own value, token shift."""

from typing import Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lab.layers.recurrence import Recurrence, Shared, Terms, shift


class RWKV6(Recurrence):
    """S_t = diag(w_t) S_{t−1} + k_t v_tᵀ, y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t, r being our q.

    r, k, v and the decay w = exp(−exp(·)) are computed from a mixture of the token and the one
    before it, in shares λ that both tokens decide for each of the four and each channel:

        x_t + (x_{t−1} − x_t) ⊙ λ,   λ = μ + B tanh(A (x_t + (x_{t−1} − x_t) ⊙ μ'))

    Args:
        d_model: width d.
        n_heads: heads h.
        mix_rank: outputs of each A.
        decay_rank: width of the hidden layer from which the decays are computed.
        shared: options of `lab.layers.recurrence.Shared`.

    Raises:
        ValueError: for a rank below 1.

    Source: Peng et al. 2024 (2404.05892), on Finch. μ, μ' and the decays start about as in their
        code for the first layer; u at 0, as in flash-linear-attention's.
    Departs: the output gate sees the token alone, without shift; heads' norm has no bias; keys are
        as wide as values.
    """

    usual = Shared(gate="silu")
    channel_decay = True
    normed = "centred head"

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        mix_rank: int = 32,
        decay_rank: int = 64,
        **shared: Unpack[Shared],
    ):
        super().__init__(d_model, n_heads, **shared)
        for name, rank in (("mix_rank", mix_rank), ("decay_rank", decay_rank)):
            if rank < 1:
                raise ValueError(f"{name}={rank} must be at least 1")
        self.carry_width = d_model
        start = 1 - torch.arange(d_model) / d_model
        self.mix_shift = nn.Parameter(start.clone())
        self.mix_bias = nn.Parameter(start.repeat(4, 1))
        self.mix_down = nn.Linear(d_model, 4 * mix_rank, bias=False)
        self.mix_up = nn.Parameter(torch.empty(4, d_model, mix_rank).uniform_(-0.01, 0.01))
        channels = n_heads * self.d_state
        self.decay_down = nn.Linear(d_model, decay_rank, bias=False)
        self.decay_up = nn.Linear(decay_rank, channels)
        self.bonus = nn.Parameter(torch.zeros(n_heads, self.d_state))
        with torch.no_grad():
            share = torch.arange(channels) / max(channels - 1, 1)
            self.decay_up.bias.copy_(-6 + 5 * share**0.7)

    def prepare(
        self,
        x: Float[Tensor, "b t d"],
        carry: Float[Tensor, "b d"],
        keep: Bool[Tensor, "b t"] | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Float[Tensor, "b d"]]:
        """Return the mixtures of which r, k, v and decay are computed; and the last token."""
        before, last = shift(x, carry, keep)
        change = before - x
        hidden = self.mix_down(x + change * self.mix_shift.to(x)).tanh().unflatten(-1, (4, -1))
        share = torch.einsum("btmr,mdr->mbtd", hidden, self.mix_up.to(x))
        r, k, v, w = x + change * (share + self.mix_bias.to(x)[:, None, None])
        return (r, k, v, w), last

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return r, k and v, a decay of each key channel, and what is read of the own value."""
        logits = self.decay_up(self.decay_down(x).tanh()).to(q).view_as(k)
        log_decay = self.hook_log_decay(-logits.exp())
        return Terms(q, k, v, log_decay, own=(q * self.bonus.to(k) * k).sum(-1))
