"""HGRN2: a gated RNN whose state is a matrix; what a channel forgets, it writes."""

from typing import Unpack

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lab.layers.recurrence import Recurrence, Shared, Terms


class HGRN2(Recurrence):
    """S_t = diag(f_t) S_{t−1} + (1 − f_t) v_tᵀ, y_t = S_tᵀ SiLU(q_t) / √n, f = β + (1 − β) σ(k_t).

    The forget gate f decides alone: what it leaves of 1 is the key, so there is no other key.

    Args:
        d_model: width d.
        n_heads: heads h.
        lower_bound: β in [0, 1), below which no forget gate falls.
        shared: options of `lab.layers.recurrence.Shared`; the forget gate takes the key's place,
            so that there is neither a norm of q and k nor a rotation.

    Raises:
        ValueError: for a bound outside [0, 1), or a norm or rotation.

    Source: Qin et al. 2024 (2404.07904); the factor 1/√n is their code's.
    Departs: β is an option; theirs is learned, and grows from layer to layer.
    """

    channel_decay = True
    normed = "all heads"

    def __init__(
        self, d_model: int, n_heads: int = 1, *, lower_bound: float = 0.0, **shared: Unpack[Shared]
    ):
        super().__init__(d_model, n_heads, **shared)
        if not 0 <= lower_bound < 1:
            raise ValueError(f"{lower_bound=} must be in [0, 1)")
        for name, chosen in (("qk_norm", self.qk_norm), ("position", self.position)):
            if chosen != "none":
                raise ValueError(f"{name}={chosen!r} must be 'none': keys are what gates leave")
        self.lower_bound = lower_bound

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return 1 − f as keys, and f as the decay of each of their channels."""
        left = (1 - self.lower_bound) * (-k).sigmoid()
        log_decay = F.logsigmoid(k) if self.lower_bound == 0 else (-left).log1p()
        return Terms(F.silu(q) * q.shape[-1] ** -0.5, left, v, self.hook_log_decay(log_decay))
