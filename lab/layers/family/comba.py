"""Comba: a delta rule whose feedback is weaker than its write, and which corrects what it reads."""

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.layers.family.gated_deltanet import GatedDeltaNet
from lab.layers.recurrence import Shared, Terms


class Comba(GatedDeltaNet):
    """S_t = (α_t I − β_t k_t p_tᵀ) S_{t−1} + β_t k_t v_tᵀ, p_t = s k_t, y_t = S_tᵀ q_t / √n.

    s = σ(·), a number that each head learns, is how much of what the state holds at k_t, before it
    decays, is fed back. α_t and β_t are Gated DeltaNet's. q, k and v pass a convolution and SiLU; D
    s k_t is subtracted of q, with another number D of each head, before q and k get length 1.

    Args:
        d_model: width d.
        n_heads: heads h.
        correction: D at the start.
        shared: options of `lab.layers.recurrence.Shared`.

    Source: Hu et al. 2025 (2506.02475), in the form of flash-linear-attention's code, which
        recommends to try correction = 0.02 too. s starts at σ(1), as there, A and c as Gated
        DeltaNet's.
    Departs: kernels there give p length 1 as well, after which s affects only q. Values are as wide
        as keys; theirs are twice as wide.
    """

    usual = Shared(conv_width=4, activation="silu", qk_norm="l2", gate="sigmoid")
    match_before_decay = True

    def __init__(
        self, d_model: int, n_heads: int = 1, *, correction: float = 1.0, **shared: Unpack[Shared]
    ):
        super().__init__(d_model, n_heads, **shared)
        self.feedback = nn.Parameter(torch.ones(n_heads))
        self.D = nn.Parameter(torch.full((n_heads,), correction))

    def normalise(
        self, q: Float[Tensor, "b t h n"], k: Float[Tensor, "b t h n"]
    ) -> tuple[Float[Tensor, "b t h n"], Float[Tensor, "b t h n"]]:
        """Return q corrected by k, and k, of which each has its norm."""
        share = (self.D * self.feedback.sigmoid()).to(q)[:, None]
        return super().normalise(q - share * k, k)

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return Gated DeltaNet's terms, with the share that is fed back."""
        share = self.feedback.to(q).sigmoid()[:, None]
        return super().decide(x, q, k, v)._replace(match=share * k)
