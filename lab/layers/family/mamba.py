"""Mamba: each channel of the values has a small state, whose decays and writes tokens decide."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lab.layers.recurrence import Gate, Recurrence, Shared, Terms
from lab.layers.ssd import draw_dt_bias
from lab.ops.precision import call_promoted


class Mamba1(Recurrence):
    """h_t = exp(dt_t A) ⊙ h_{t−1} + dt_t u_t B_t, y_t = C_t·h_t + D u_t, of each channel u.

    u passes a convolution and SiLU. B and C [n], which all channels share, and dt = softplus(W₂ W₁
    u_t + c), one number a channel, are linear in all channels of u_t. Each channel has its own
    A < 0 [n] and D. The outputs are multiplied by a gate.

    Each channel is a head of the matrix.

    Args:
        d_model: width d.
        d_state: numbers n that each channel's state holds.
        d_inner: channels h; None: 2 d_model.
        dt_rank: outputs of W₁; None: d_model / 16, rounded up.
        conv_width: tokens that the convolution sums over; 0: none.
        gate: what multiplies the outputs (`lab.layers.recurrence.Shared`).

    Raises:
        ValueError: for a size below its bound, or an unknown gate.

    Source: Gu and Dao 2023 (2312.00752), alg. 2 and § 3.6. A, W₂, c and D start as in their code.
    """

    usual = Shared(activation="silu", norm=False)
    per_channel = channel_decay = conv_bias = True
    matrix_form = "M = Σₙ C exp(Σ dt·A) B·dt + D, per channel"

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_inner: int | None = None,
        dt_rank: int | None = None,
        conv_width: int = 4,
        gate: Gate = "silu",
    ):
        channels = 2 * d_model if d_inner is None else d_inner
        super().__init__(
            d_model,
            channels,
            d_state=d_state,
            d_value=channels,
            conv_width=conv_width,
            gate=gate,
        )
        rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        if rank < 1:
            raise ValueError(f"{dt_rank=} must be at least 1")
        self.key_proj = nn.Linear(channels, 2 * d_state, bias=False)
        self.dt_down = nn.Linear(channels, rank, bias=False)
        self.dt_up = nn.Linear(rank, channels)
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels))
        with torch.no_grad():
            self.dt_up.weight.uniform_(-(rank**-0.5), rank**-0.5)
            self.dt_up.bias.copy_(draw_dt_bias(channels))

    def find_keys(
        self, v: Float[Tensor, "b t h 1"]
    ) -> tuple[Float[Tensor, "b t h n"], Float[Tensor, "b t h n"]]:
        """Return C and B, the same for all channels."""
        shared = call_promoted(self.key_proj, v[..., 0])[:, :, None]
        k, q = shared.expand(-1, -1, v.shape[2], -1).chunk(2, -1)
        return q, k

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h 1"],
    ) -> Terms:
        """Return C, dt B, u, the decays of each channel's state, and D."""
        low = call_promoted(self.dt_down, v[..., 0])
        dt = F.softplus(call_promoted(self.dt_up, low))[..., None]
        log_decay = self.hook_log_decay(-dt * self.A_log.to(v).exp())
        return Terms(q, dt * k, v, log_decay, skip=self.D.to(v).expand(v.shape[:3]))
