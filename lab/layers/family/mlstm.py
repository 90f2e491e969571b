"""mLSTM: an LSTM whose cell is a matrix, with an exponential input gate."""

from typing import Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lab.layers.recurrence import Recurrence, Shared, Terms
from lab.ops.precision import promote


class MLSTM(Recurrence):
    """C_t = f_t C_{t−1} + i_t k_t v_tᵀ, y_t = C_tᵀ q_t / max(|n_tᵀ q_t|, 1), with q over √n.

    n_t = f_t n_{t−1} + i_t k_t is what C_t would be for values of 1. A head's gates f = σ(f̃) and
    i = exp(ĩ) have logits linear in x, capped by c tanh(·/c). The state holds exp(−m_t) C_t and
    exp(−m_t) n_t, with the stabiliser

        m_t = max(log f_t + m_{t−1}, ĩ_t, 0),

    so that it is decayed by f_t exp(m_{t−1} − m_t) ≤ 1 and written with exp(ĩ_t − m_t) ≤ 1, and the
    divisor is at least exp(−m_t). Outputs do not depend on m.

    Args:
        d_model: width d.
        n_heads: heads h.
        gate_cap: c > 0, which the gates' logits do not exceed.
        shared: options of `lab.layers.recurrence.Shared`.

    Raises:
        ValueError: for a cap that is not positive.

    Source: Beck et al. 2024 (2405.04517), eqs. 15 and 19–27; the layer around it, without
        convolution, and the cap are xLSTM 7B's (2503.14427). Biases start as in the former's code.
    Departs: m is never below 0, where the divisor's bound would overflow; keys are as wide as
        values, theirs half as wide.
    """

    usual = Shared(gate="sigmoid")
    normalised = True
    normed = "centred head"
    matrix_form = "M, what each token reads of each value; sums of rows are at most 1 in size"

    def __init__(
        self, d_model: int, n_heads: int = 1, *, gate_cap: float = 15.0, **shared: Unpack[Shared]
    ):
        super().__init__(d_model, n_heads, **shared)
        if not gate_cap > 0:
            raise ValueError(f"{gate_cap=} must be positive")
        self.gate_cap = gate_cap
        self.carry_width = n_heads
        self.i_proj, self.f_proj = nn.Linear(d_model, n_heads), nn.Linear(d_model, n_heads)
        with torch.no_grad():
            self.i_proj.bias.zero_()
            self.f_proj.bias.copy_(torch.linspace(3, 6, n_heads))

    def prepare(
        self,
        x: Float[Tensor, "b t d"],
        carry: Float[Tensor, "b h"],
        keep: Bool[Tensor, "b t"] | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Float[Tensor, "b h"]]:
        """Return x thrice; the logs of decay, write and divisor's bound, side by side; and m."""
        i, f = (
            self.gate_cap * (g(x).to(promote(x)) / self.gate_cap).tanh()
            for g in (self.i_proj, self.f_proj)
        )
        log_f = F.logsigmoid(f)
        if keep is not None:
            log_f = log_f.masked_fill(~keep[..., None], 0)
        with torch.no_grad():  # nothing depends on m
            sums, limits = log_f.double().cumsum(1), i.double().clamp(min=0)
            if keep is not None:
                limits = limits.masked_fill(~keep[..., None], -torch.inf)
            before = carry.double()[:, None]
            m = sums + torch.maximum((limits - sums).cummax(1).values, before)
            rise = (m - torch.cat([before, m[:, :-1]], 1)).to(i)
            m = m.to(i)
        return (x, x, x, torch.cat([log_f - rise, i - m, -m], -1)), m[:, -1]

    def decide(
        self,
        x: Float[Tensor, "b t g"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return q / √n, keys scaled by the input gate, the decay, and what bounds the divisor."""
        log_decay, log_write, log_floor = x.chunk(3, -1)
        log_decay = self.hook_log_decay(log_decay)
        return Terms(
            q * q.shape[-1] ** -0.5,
            k * log_write.exp()[..., None],
            v,
            log_decay,
            log_floor=log_floor,
        )
