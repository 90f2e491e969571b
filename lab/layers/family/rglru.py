"""RG-LRU, the recurrence of Griffin: decays and writes are gated, and keep the state's size."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab.layers.recurrence import Gate, Recurrence, Shared, Terms

SHARPNESS = 8.0
"""c in the decay."""
WRITTEN_MIN = 1e-12
"""Least value of 1 − a², of which the root is taken."""


class RGLRU(Recurrence):
    """h_t = a_t ⊙ h_{t−1} + √(1 − a_t²) ⊙ i_t ⊙ v_t, y_t = h_t, a_t = exp(−c softplus(Λ) ⊙ r_t).

    v passes a convolution; the gates r = σ(W_r v + b_r) and i = σ(W_i v + b_i) are made of it, and
    each sees the channels of one head alone. The outputs are multiplied by GeLU of a linear map.

    Each channel's state is a number, and each channel is a head of the matrix.

    Args:
        d_model: width d.
        n_heads: blocks g of channels that gates are made of.
        d_inner: channels; None: d_model.
        conv_width: tokens that the convolution sums over; 0: none.
        gate: what multiplies the outputs (`lab.layers.recurrence.Shared`).

    Raises:
        ValueError: for channels that the heads do not divide, a size below its bound, or an unknown
            gate.

    Source: De et al. 2024 (2402.19427), eqs. 1–4 and § 2.3; Λ starts so that the fastest decay
        of each channel is drawn from [.9, .999].
    Departs: linear maps beside the gates' have no bias; eq. 4 holds for the first token, too, which
        their code and transformers' write without √(1 − a²).
    """

    usual = Shared(d_state=1, norm=False)
    per_channel = conv_bias = True
    matrix_form = "M, per channel"

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        d_inner: int | None = None,
        conv_width: int = 4,
        gate: Gate = "gelu",
    ):
        channels = d_model if d_inner is None else d_inner
        if n_heads < 1 or channels % n_heads:
            raise ValueError(f"d_inner={channels} must be a positive multiple of {n_heads=}")
        super().__init__(d_model, channels, d_value=channels, conv_width=conv_width, gate=gate)
        width = channels // n_heads
        self.gate_weight = nn.Parameter(torch.randn(2, n_heads, width, width) * width**-0.5)
        self.gate_bias = nn.Parameter(torch.zeros(2, n_heads, width))
        slowest = torch.empty(channels).uniform_(0.9, 0.999)
        self.rate = nn.Parameter((-slowest.log() / SHARPNESS).expm1().log())  # Λ

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h 1"],
        k: Float[Tensor, "b t h 1"],
        v: Float[Tensor, "b t h 1"],
    ) -> Terms:
        """Return ones to read with, the gated writes in place of keys, and the decays."""
        heads = rearrange(v, "b t (g w) 1 -> b t g w", g=self.gate_bias.shape[1])
        gates = torch.einsum("btgi,zgio->zbtgo", heads, self.gate_weight.to(v))
        i, r = (gates + self.gate_bias.to(v)[:, None, None]).sigmoid().flatten(-2)
        log_decay = self.hook_log_decay(-SHARPNESS * F.softplus(self.rate.to(v)) * r)
        written = (-(2 * log_decay).expm1()).clamp(min=WRITTEN_MIN).sqrt() * i
        return Terms(q, written[..., None] * k, v, log_decay)
