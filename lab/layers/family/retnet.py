"""Retention: linear attention whose heads forget at fixed rates."""

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from lab.layers.recurrence import Recurrence, Shared, Terms


class Retention(Recurrence):
    """S_t = γ S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t / √n, with γ = 1 − 2^{−5−i} for head i = 0, 1, ….

    q and k are rotated to their positions; nothing that a token says changes how long it is kept.

    Args:
        d_model: width d.
        n_heads: heads h; the i-th halves its state in about 22 · 2^i tokens.
        shared: options of `lab.layers.recurrence.Shared`.

    Source: Sun et al. 2023 (2307.08621), eqs. 6 and 8, without xPos's scales, which γ replaces.
    Departs: values are as wide as keys, theirs twice as wide; heads have an RMSNorm, as in the
        code of both its authors and flash-linear-attention, where eq. 8 has a group norm.
    """

    usual = Shared(position="rope", gate="silu")

    def __init__(self, d_model: int, n_heads: int = 1, **shared: Unpack[Shared]):
        super().__init__(d_model, n_heads, **shared)
        halvings = torch.arange(-5.0, -5.0 - n_heads, -1.0, dtype=torch.double, device="cpu")
        gamma = 1 - halvings.exp2()
        self.rates = gamma.log().tolist()

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return q / √n, k and v, and each head's own decay."""
        log_decay = self.hook_log_decay(q.new_tensor(self.rates).expand(q.shape[:3]))
        return Terms(q * q.shape[-1] ** -0.5, k, v, log_decay)
