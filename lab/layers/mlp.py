"""The multilayer perceptron: the plain state transform, and the cross domain of CDMoE."""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lab.hooks import HookPoint
from tasks.bounds import check_choice

Activation = Literal["silu", "gelu", "relu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
}
"""Elementwise functions by name. All are 0 at 0; there SiLU and GELU have slope ½, ReLU 0."""


class MLP(nn.Module):
    """Two linear maps with an activation between them, position by position. [b t d] → [b t d].

        φ(x) = σ(x W) V,            gated: φ(x) = (σ(x G) ⊙ x W) V

    Hook points, as in TransformerLens, all [b t d_ff]: `hook_pre`, what σ is applied to;
    `hook_pre_linear`, x W of a gated one; `hook_post`, what V multiplies.

    Args:
        d_model: width of x, ≥ 1.
        d_ff: hidden width, ≥ 1; None is 4 · d_model. Gating adds G [d_model, d_ff] and keeps d_ff.
        activation: σ.
        gated: multiply the hidden layer by a second, activated one (SwiGLU with "silu").

    Raises:
        ValueError: for a width below 1 or an unknown activation.

    Source: φ of § Cross Domain; no biases (§ Architecture Design).
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_ff: int | None = None,
        activation: Activation = "silu",
        gated: bool = False,
    ):
        super().__init__()
        d_ff = 4 * d_model if d_ff is None else d_ff
        for field, width in (("d_model", d_model), ("d_ff", d_ff)):
            if width < 1:
                raise ValueError(f"{field}={width}: must be ≥ 1")
        check_choice("activation", activation, tuple(ACTIVATIONS))
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Linear(d_model, d_ff, bias=False) if gated else None
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()
        self.hook_pre_linear = HookPoint() if gated else None

    def extra_repr(self) -> str:
        """Return the layer's sizes."""
        return f"d_ff {self.up.out_features}" + ("" if self.gate is None else ", gated")

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return φ(x)."""
        if self.gate is None or self.hook_pre_linear is None:
            return self.down(self.hook_post(self.activation(self.hook_pre(self.up(x)))))
        gate, linear = self.hook_pre(self.gate(x)), self.hook_pre_linear(self.up(x))
        return self.down(self.hook_post(self.activation(gate) * linear))
