"""Attention whose scores fall with distance: by a fixed slope (ALiBi) or by forget gates (FoX).

Both add d_s − d_t ≤ 0 to the score of key s for query t, where d never falls along a row. What
belongs to the query cancels in the softmax, so a bias d_s of the keys is enough. It grows with the
row, so it is kept in fp64, and each block of queries sees it as a difference from its own last key.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.attention import Attention, AttentionState, Position
from lab.layers.mask import Positions
from lab.ops.precision import disable_autocast

BLOCK = 64
"""Queries that share an origin of the bias: its rounding in fp32 grows with the distance."""


class DistanceAttention(Attention):
    """Attention with a bias of the keys that never falls along a row, exact over long rows.

    A hook on `hook_dynamic_mask` adds a bias to it. Heads of keys are as many as of queries.
    """

    @abstractmethod
    def _place(
        self,
        x: Float[Tensor, "b s d"],
        positions: Positions,
        keep: Bool[Tensor, "b s"] | None,
    ) -> Float[Tensor, "#b h s"]:
        """Return d_s in fp64, which begins at 0 or above."""

    def _key_bias(
        self,
        x: Float[Tensor, "b s d"],
        v: Float[Tensor, "b h s p"],
        positions: Positions,
        keep: Bool[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "b h s"]:
        """Return where the keys stand, with the bias of padding or a hook if there is one."""
        place = self._place(x, positions, keep).expand(v.shape[:-1])
        bias = super()._key_bias(x, v, positions, keep)
        return place if bias is None else place + bias

    def _mix(
        self,
        q: Float[Tensor, "b h t p"],
        k: Float[Tensor, "b h s p"],
        v: Float[Tensor, "b h s p_v"],
        bias: Float[Tensor, "b h s"] | None,
        at: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t p_v"]:
        """Return the mixed values; queries at some positions have no common origin."""
        assert bias is not None
        if at is not None or self.hook_attn_scores.active or self.hook_pattern.active:
            return self._pattern(q, k, bias, at) @ v
        mixed, ahead = [], k.shape[2] - q.shape[2]
        for first in range(0, q.shape[2], BLOCK):
            block = q[:, :, first : first + BLOCK]
            end = ahead + first + block.shape[2]
            near = bias[..., :end] - bias[..., :end].detach().amax(-1, keepdim=True)
            near = near.to(torch.promote_types(q.dtype, torch.float32))
            mixed.append(super()._mix(block, k[:, :, :end], v[:, :, :end], near))
        return torch.cat(mixed, dim=2)


class ALiBi(DistanceAttention):
    """y_t = Σ_{s≤t} softmax_s(q_t·k_s/√p − m_h (t − s)) v_s, then `out`; m_h = 2^(−8h/H).

    A token's position enters through its distance alone. Heads h = 1 … H have other slopes m_h.

    Args:
        d_model: width d.
        n_heads: heads H.

    Source: Press et al. 2022 (2108.12409), sec. 3. Departs: the formula for every H; their code
        mixes two series where H is no power of two.
    """

    def __init__(self, d_model: int, n_heads: int = 1):
        super().__init__(d_model, n_heads, position="none")
        self.slopes = [2.0 ** (-8 * (h + 1) / n_heads) for h in range(n_heads)]

    def _place(
        self,
        x: Float[Tensor, "b s d"],
        positions: Positions,
        keep: Bool[Tensor, "b s"] | None,
    ) -> Float[Tensor, "#b h s"]:
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=x.device)
        place = slopes[:, None] * positions.unsqueeze(-2)
        return place if place.ndim == 3 else place[None]


class ForgettingAttention(DistanceAttention):
    """y_t = Σ_{s≤t} softmax_s(q_t·k_s/√p + Σ_{s<r≤t} log f_r) v_s, then `out`.

    f_t = σ(W_f x_t + c) in each head says how much of all that came before token t remains.

    Args:
        d_model: width d.
        n_heads: heads h.
        position: "none", as the gates tell order; "rope" rotates queries and keys besides.

    Source: Lin et al. 2025 (2503.02130).
    """

    input_hooks = ("hook_q", "hook_k", "hook_v", "hook_log_forget")

    def __init__(self, d_model: int, n_heads: int = 1, *, position: Position = "none"):
        super().__init__(d_model, n_heads, position=position)
        self.f = nn.Linear(d_model, n_heads)
        self.hook_log_forget = HookPoint()  # [b t h], ≤ 0

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: AttentionState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], AttentionState]:
        """Return the outputs of further tokens, and the state; its bias counts from their last."""
        # Before the outputs: what a hook keeps last is what they are made of.
        total = self._sum_gates(x, keep)[..., -1:]
        y, after = super().prefill(x, state, keep)
        assert after.bias is not None
        return y, after._replace(bias=after.bias + total)

    def _place(
        self,
        x: Float[Tensor, "b s d"],
        positions: Positions,
        keep: Bool[Tensor, "b s"] | None,
    ) -> Float[Tensor, "b h s"]:
        return -self._sum_gates(x, keep)

    def _sum_gates(
        self, x: Float[Tensor, "b t d"], keep: Bool[Tensor, "b t"] | None
    ) -> Float[Tensor, "b h t"]:
        """Return the running sum of log f in fp64; padding forgets nothing."""
        with disable_autocast(x):
            logits = self.f(x).double()
        gates = self.hook_log_forget(F.logsigmoid(logits))
        if keep is not None:
            gates = gates.masked_fill(~keep[..., None], 0.0)
        return gates.cumsum(1).mT
