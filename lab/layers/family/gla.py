"""Gated linear attention: each key channel of the state decays as the token says."""

from typing import Unpack

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lab.layers.recurrence import Recurrence, Shared, Terms


class GatedLinearAttention(Recurrence):
    """S_t = diag(α_t) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t / √n, α_t = σ(W₂ W₁ x_t + c)^{1/τ}.

    Args:
        d_model: width d.
        n_heads: heads h.
        gate_rank: outputs of W₁, through which the decays of all channels pass.
        gate_slowness: τ > 0: the larger, the closer the decays are to 1.
        shared: options of `lab.layers.recurrence.Shared`.

    Raises:
        ValueError: for a rank below 1, or τ ≤ 0.

    Source: Yang et al. 2023 (2312.06635), § 4.
    Departs: keys are as wide as values; theirs are half as wide.
    """

    usual = Shared(gate="silu")
    channel_decay = True

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        gate_rank: int = 16,
        gate_slowness: float = 16.0,
        **shared: Unpack[Shared],
    ):
        super().__init__(d_model, n_heads, **shared)
        if gate_rank < 1:
            raise ValueError(f"{gate_rank=} must be at least 1")
        if not gate_slowness > 0:
            raise ValueError(f"{gate_slowness=} must be positive")
        self.gate_slowness = gate_slowness
        self.decay_down = nn.Linear(d_model, gate_rank, bias=False)
        self.decay_up = nn.Linear(gate_rank, n_heads * self.d_state)

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return q / √n, k and v, and a decay of each key channel."""
        logits = self.decay_up(self.decay_down(x)).to(q).view_as(k)
        log_decay = self.hook_log_decay(F.logsigmoid(logits) / self.gate_slowness)
        return Terms(q * q.shape[-1] ** -0.5, k, v, log_decay)
