"""DeltaNet: what a token writes replaces what the state holds at its key."""

from typing import Unpack

from jaxtyping import Float
from torch import Tensor, nn

from lab.layers.recurrence import Recurrence, Shared, Terms
from lab.ops.delta import Decay


class DeltaNet(Recurrence):
    """S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, y_t = S_tᵀ q_t / √n.

    β_t = σ(W_b x_t) says how much of what the state holds at k_t the write replaces. q, k and v
    pass a convolution and SiLU, q and k have length 1.

    Args:
        d_model: width d.
        n_heads: heads h.
        negative: β in (0, 2): a token can turn the sign of what the state holds at its key.
        shared: options of `lab.layers.recurrence.Shared`.

    Source: Yang et al. 2024 (2406.06484); negative: Grazzi et al. 2024 (2411.12537).
    """

    usual = Shared(conv_width=4, activation="silu", qk_norm="l2")

    def __init__(
        self, d_model: int, n_heads: int = 1, *, negative: bool = False, **shared: Unpack[Shared]
    ):
        super().__init__(d_model, n_heads, **shared)
        self.strength = 2.0 if negative else 1.0
        self.b_proj = nn.Linear(d_model, self.n_writes * n_heads, bias=False)

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t g n"],
        v: Float[Tensor, "b t g p"],
    ) -> Terms:
        """Return keys scaled by β, which replace what the state holds at them, and the decay."""
        beta = self.hook_beta(self.strength * self.b_proj(x).to(q).sigmoid())
        log_decay = self.compute_decay(x, q)
        return Terms(q * q.shape[-1] ** -0.5, beta[..., None] * k, v, log_decay, match=k)

    def compute_decay(self, x: Float[Tensor, "b t d"], q: Float[Tensor, "b t h n"]) -> Decay | None:
        """Return the log-decays, in q's dtype; None, unless defined otherwise: nothing decays."""
        return None
