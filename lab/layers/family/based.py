"""Based: linear attention whose feature map is the Taylor series of softmax's exponential."""

import torch
from jaxtyping import Float
from torch import Tensor

from lab.layers.family.linear_attention import LinearAttention
from lab.layers.recurrence import Shared, Terms


class Based(LinearAttention):
    """S_t = S_{t−1} + φ(k_t) v_tᵀ, y_t = S_tᵀ φ(q_t) / Σ_{s≤t} φ(q_t)·φ(k_s).

    φ(q)·φ(k) = 1 + z + z²/2 with z = q·k/√n, which is exp(z) about 0, and positive everywhere. Each
    head's state holds 1 + n + n (n + 1) / 2 numbers a channel of its values.

    As published, layers of it stand among layers of sliding-window attention and of convolutions:
    `--stack "based+M window+M"`.

    Args:
        d_model: width d.
        n_heads: heads h.
        normalise: whether to divide by the sum of the weights.
        shared: options of `lab.layers.recurrence.Shared`.

    Source: Arora et al. 2024 (2402.18668), § 4.1. Departs: a product of
        two channels is held once, not in both orders; outputs are the same.
    """

    usual = Shared(d_state=16, norm=False)
    matrix_form = "1 + z + z²/2 with z = q·k/√n, rows sum to 1"

    @property
    def state_width(self) -> int:
        """Numbers that the state holds for each channel of the values: features of a key."""
        n = self.d_state
        return 1 + n + n * (n + 1) // 2

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return the features of q and k, and v."""
        return Terms(_expand(q), _expand(k), v)


def _expand(z: Float[Tensor, "b t h n"]) -> Float[Tensor, "b t h m"]:
    """Return 1, z / n^¼, and the products of two channels of that, each by its root of ½ or 1."""
    n = z.shape[-1]
    z = z * n**-0.25
    first, second = torch.triu_indices(n, n, device=z.device)
    weight = torch.ones_like(first, dtype=z.dtype).masked_fill(first == second, 0.5**0.5)
    return torch.cat([torch.ones_like(z[..., :1]), z, weight * z[..., first] * z[..., second]], -1)
