"""Sliding-window attention: softmax over the last w tokens, whose state does not grow."""

from jaxtyping import Bool, Float
from torch import Tensor

from lab.layers.attention import Attention, AttentionState, Position
from lab.layers.mask import Positions


class SlidingWindowAttention(Attention):
    """y_t = Σ_{t−w<s≤t} softmax_s(q_t·k_s/√p) v_s, then `out`.

    The state holds w keys and values. Layers above see further: l of them l (w − 1) tokens back.

    Args:
        d_model: width d.
        n_heads: heads h.
        window: tokens w that a query reads, itself among them.
        position: "rope" rotates queries and keys; "none" gives no order within the window.

    Raises:
        ValueError: for a window below one.

    Source: Beltagy et al. 2020 (2004.05150), sec. 3.1, as Mistral 7B has it (2310.06825).
    """

    def __init__(
        self, d_model: int, n_heads: int = 1, *, window: int = 64, position: Position = "rope"
    ):
        super().__init__(d_model, n_heads, position=position)
        if window < 1:
            raise ValueError(f"{window=} must be at least 1")
        self.window = window

    def extra_repr(self) -> str:
        """Return the layer's sizes."""
        width = self.q.out_features // self.n_heads
        return f"{self.n_heads} × {width}, position {self.position}, last {self.window} tokens"

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: AttentionState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], AttentionState]:
        """Return the outputs of further tokens, and the state: what the next token may read."""
        y, after = super().prefill(x, state, keep)
        assert after.bias is not None
        # Those of highest bias, of equal ones the latest: padding goes before any token.
        kept = after.bias.argsort(dim=-1, stable=True)[..., -self.window :].sort(dim=-1).values
        k, v = (z.take_along_dim(kept[..., None], 2) for z in (after.k, after.v))
        return y, after._replace(k=k, v=v, bias=after.bias.take_along_dim(kept, 2))

    def _key_bias(
        self,
        x: Float[Tensor, "b s d"],
        v: Float[Tensor, "b h s p"],
        positions: Positions,
        keep: Bool[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "b h s"]:
        """Return zeros where a mask has none: of equal keys the window keeps the latest."""
        bias = super()._key_bias(x, v, positions, keep)
        return v.new_zeros(v.shape[:-1]) if bias is None else bias
