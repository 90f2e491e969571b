"""What attention carries from token to token: a cache of keys, values and mask biases."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class AttentionState(NamedTuple):
    """The keys and values of the tokens read so far: a cache that grows with their number.

    Attributes:
        k: keys, rotated to their positions.
        v: values.
        bias: the keys' mask bias, `PADDED` at padding; None while there is neither.
        position: where each row's next token stands.
    """

    k: Float[Tensor, "b h_kv s p"]
    v: Float[Tensor, "b h_kv s p_v"]
    bias: Float[Tensor, "b h_kv s"] | None
    position: Int[Tensor, " b"]

    def check(self, n_heads: int, widths: tuple[int, int]) -> None:
        """Check that the state is of a layer with these heads of keys and values.

        Args:
            n_heads: heads of keys and values.
            widths: of a head's key and of its value.

        Raises:
            ValueError: naming the tensor, its shape, and the shape that it must have.
        """
        for field, cached, width in zip("kv", (self.k, self.v), widths, strict=True):
            shape = [self.position.shape[0], n_heads, self.k.shape[2], width]
            if list(cached.shape) != shape:
                raise ValueError(f"state.{field} is {list(cached.shape)}, must be {shape}")

    def append(
        self,
        k: Float[Tensor, "b h_kv t p"],
        v: Float[Tensor, "b h_kv t p_v"],
        bias: Float[Tensor, "b h_kv t"] | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and bias of all tokens, the new ones last.

        The bias is zero where the old or the new keys have none, and None if neither have one.
        """
        if self.bias is not None or bias is not None:
            old, new = (
                keys.new_zeros(keys.shape[:-1]) if given is None else given
                for given, keys in ((self.bias, self.k), (bias, k))
            )
            bias = torch.cat([old, new], dim=-1)
        k, v = (torch.cat([a.to(z.dtype), z], 2) for a, z in ((self.k, k), (self.v, v)))
        return k, v, bias
