"""minGRU: a gated recurrent unit whose gate does not see the state, so that it can be scanned."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lab.layers.recurrence import Gate, Recurrence, Shared, Terms


class MinGRU(Recurrence):
    """h_t = (1 − z_t) ⊙ h_{t−1} + z_t ⊙ v_t, y_t = h_t, with z_t = σ(W_z x_t + b), v_t = W_v x_t.

    Each channel's state is a number: a mean of the values so far. Each channel is a head of the
    matrix, whose rows sum to at most 1.

    Args:
        d_model: width d.
        d_inner: channels; None: d_model.
        conv_width: tokens that a convolution of v sums over; 0: none.
        gate: what multiplies the outputs (`lab.layers.recurrence.Shared`).

    Raises:
        ValueError: for a size below its bound, or an unknown gate.

    Source: Feng et al. 2024 (2410.01201), § 3.1. Departs: values are not made positive, as their
        scan in logs needs; the outputs are mapped to d_model.
    """

    usual = Shared(d_state=1, norm=False)
    per_channel = conv_bias = True
    matrix_form = "M, rows sum to at most 1, per channel"

    def __init__(
        self,
        d_model: int,
        *,
        d_inner: int | None = None,
        conv_width: int = 0,
        gate: Gate = "none",
    ):
        channels = d_model if d_inner is None else d_inner
        super().__init__(d_model, channels, d_value=channels, conv_width=conv_width, gate=gate)
        self.z_proj = nn.Linear(d_model, channels)

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h 1"],
        k: Float[Tensor, "b t h 1"],
        v: Float[Tensor, "b t h 1"],
    ) -> Terms:
        """Return ones to read with, what is replaced in place of keys, and what is left of it."""
        logits = self.z_proj(x).to(q)
        replaced = self.hook_beta(logits.sigmoid())
        return Terms(q, replaced[..., None] * k, v, self.hook_log_decay(F.logsigmoid(-logits)))
