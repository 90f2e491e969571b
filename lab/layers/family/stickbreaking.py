"""Stick-breaking attention: each key takes a share of what nearer keys have left."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lab.layers.attention import Attention
from lab.ops.attention import attention_scores


class StickBreakingAttention(Attention):
    """y_t = Σ_{s<t} A_ts v_s, then `out`; A_ts = σ(z_ts) Π_{s<r<t} (1 − σ(z_tr)), z = q·k/√p.

    A query goes back from its own token; at each key it takes the share σ(z) of the weight that is
    left. Rows sum to at most 1, and nearness alone tells order. It computes matrices [b h t s].

    Args:
        d_model: width d.
        n_heads: heads h.
        current: whether a query may take its own token too: s ≤ t in place of s < t.

    Source: Tan et al. 2024 (2410.17980).
    """

    matrix_form = "A, rows sum to at most 1"
    # No softmax makes the matrix of the scores.
    scores_hook = None

    def __init__(self, d_model: int, n_heads: int = 1, *, current: bool = False):
        super().__init__(d_model, n_heads, position="none")
        self.current = current

    def _mix(
        self,
        q: Float[Tensor, "b h t p"],
        k: Float[Tensor, "b h s p"],
        v: Float[Tensor, "b h s p_v"],
        bias: Float[Tensor, "b h s"] | None,
        at: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t p_v"]:
        return self._pattern(q, k, bias, at) @ v

    def _pattern(
        self,
        q: Float[Tensor, "b h t p"],
        k: Float[Tensor, "b h s p"],
        bias: Float[Tensor, "b h s"] | None,
        at: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """Return A, computed in logs: what a far key gets is a sum over all that are nearer."""
        if at is None:
            at = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
            at = at.expand(len(q), -1)
        last = at if self.current else at - 1
        scores = self.hook_attn_scores(attention_scores(q, k, bias, at=last))
        left = F.logsigmoid(-scores)
        nearer = F.pad(left[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
        return self.hook_pattern((F.logsigmoid(scores) + nearer).exp().to(q.dtype))
