"""Gated DeltaNet: the delta rule with a decay of the state."""

from typing import Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lab.layers.family.deltanet import DeltaNet
from lab.layers.recurrence import Shared
from lab.layers.ssd import draw_dt_bias, draw_log_rates
from lab.ops.delta import Decay


class GatedDeltaNet(DeltaNet):
    """S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, y_t = S_tᵀ q_t / √n.

    α_t = exp(−A softplus(W_a x_t + c)) decays the state, β_t = σ(W_b x_t) says how much of what it
    holds at k_t the write replaces. q, k and v pass a convolution and SiLU, q and k have length 1.

    Args:
        d_model: width d.
        n_heads: heads h.
        negative: β in (0, 2): a token can turn the sign of what the state holds at its key.
        shared: options of `lab.layers.recurrence.Shared`.

    Source: Yang et al. 2024 (2412.06464), eq. 10 and fig. 1; negative: Grazzi et al. 2024
        (2411.12537). A and c start as in their code. Departs: values are as wide as keys; theirs
        are twice as wide.
    """

    usual = Shared(conv_width=4, activation="silu", qk_norm="l2", gate="silu")

    def __init__(
        self, d_model: int, n_heads: int = 1, *, negative: bool = False, **shared: Unpack[Shared]
    ):
        super().__init__(d_model, n_heads, negative=negative, **shared)
        self.a_proj = nn.Linear(d_model, n_heads)
        self.A_log = nn.Parameter(draw_log_rates(n_heads))
        with torch.no_grad():
            self.a_proj.bias.copy_(draw_dt_bias(n_heads))

    def compute_decay(self, x: Float[Tensor, "b t d"], q: Float[Tensor, "b t h n"]) -> Decay:
        """Return the log-decay of each head, in q's dtype."""
        rate = F.softplus(self.a_proj(x).to(q))
        return self.hook_log_decay(-self.A_log.to(q).exp() * rate)
