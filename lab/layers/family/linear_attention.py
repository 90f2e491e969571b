"""Linear attention: softmax's exponential replaced by a product of feature maps."""

from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from lab.layers.recurrence import Recurrence, Shared, Terms


class LinearAttention(Recurrence):
    """S_t = S_{t−1} + φ(k_t) v_tᵀ, y_t = S_tᵀ φ(q_t) / Σ_{s≤t} φ(q_t)·φ(k_s), φ(z) = elu(z) + 1.

    Nothing is forgotten and nothing replaced: the state is the sum of all that was written, and
    grows with the number of tokens, since no decay bounds it.

    Args:
        d_model: width d.
        n_heads: heads h.
        normalise: whether to divide by the sum of the weights.
        shared: options of `lab.layers.recurrence.Shared`.

    Source: Katharopoulos et al. 2020 (2006.16236), eqs. 7–12.
    """

    usual = Shared(activation="elu1", norm=False)
    matrix_form = "φ(Q)φ(K)ᵀ, rows sum to 1"

    def __init__(
        self, d_model: int, n_heads: int = 1, *, normalise: bool = True, **shared: Unpack[Shared]
    ):
        super().__init__(d_model, n_heads, **shared)
        self.normalised = normalise
        if not normalise:
            self.matrix_form = "φ(Q)φ(K)ᵀ"

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return q, k and v as they are."""
        return Terms(q, k, v)
