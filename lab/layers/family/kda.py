"""Kimi Delta Attention: the delta rule with a decay of each key channel."""

from typing import Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lab.layers.family.deltanet import DeltaNet
from lab.layers.recurrence import Shared
from lab.layers.ssd import draw_dt_bias, draw_log_rates
from lab.ops.delta import Decay


class KimiDeltaAttention(DeltaNet):
    """S_t = (I − β_t k_t k_tᵀ) diag(α_t) S_{t−1} + β_t k_t v_tᵀ, y_t = S_tᵀ q_t / √n.

    α_t = exp(−A softplus(W₂ W₁ x_t + c)) decays each key channel, with one A a head; β_t = σ(W_b
    x_t) says how much of what it holds at k_t the write replaces. q, k and v pass a convolution and
    SiLU, q and k have length 1. The gate too is computed by way of `rank` numbers.

    Args:
        d_model: width d.
        n_heads: heads h.
        negative: β in (0, 2): a token can turn the sign of what the state holds at its key.
        rank: of the maps from x to decays and gate; None: a head's values.
        shared: options of `lab.layers.recurrence.Shared`.

    Raises:
        ValueError: for a rank below 1.

    Source: Kimi Linear (2510.26692); negative: Grazzi et al. 2024 (2411.12537). A and c start as in
        flash-linear-attention's code.
    """

    usual = Shared(conv_width=4, activation="silu", qk_norm="l2", gate="sigmoid")
    channel_decay = True

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        negative: bool = False,
        rank: int | None = None,
        **shared: Unpack[Shared],
    ):
        super().__init__(d_model, n_heads, negative=negative, **shared)
        width = self.v_proj.out_features
        rank = width // n_heads if rank is None else rank
        if rank < 1:
            raise ValueError(f"{rank=} must be at least 1")
        channels = n_heads * self.d_state
        self.decay_down = nn.Linear(d_model, rank, bias=False)
        self.decay_up = nn.Linear(rank, channels)
        self.A_log = nn.Parameter(draw_log_rates(n_heads))
        if self.g_proj is not None:
            down = nn.Linear(d_model, rank, bias=False)
            self.g_proj = nn.Sequential(down, nn.Linear(rank, width))
        with torch.no_grad():
            self.decay_up.bias.copy_(draw_dt_bias(channels))

    def compute_decay(self, x: Float[Tensor, "b t d"], q: Float[Tensor, "b t h n"]) -> Decay:
        """Return the log-decay of each key channel, in q's dtype."""
        rate = F.softplus(self.decay_up(self.decay_down(x)).to(q)).view_as(q)
        return self.hook_log_decay(-self.A_log.to(q).exp()[:, None] * rate)
