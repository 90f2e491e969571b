"""Gated DeltaProduct: several writes of the delta rule a token."""

from typing import Unpack

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lab.layers.family.gated_deltanet import GatedDeltaNet
from lab.layers.recurrence import Shared, Terms


class GatedDeltaProduct(GatedDeltaNet):
    """S_t = Π_j (I − β_tj k_tj k_tjᵀ) α_t S_{t−1} + …, y_t = S_tᵀ q_t / √n: m writes, then a read.

    A token decays the state once, as Gated DeltaNet's do, then writes m values v_tj one after
    another: each replaces what the state then holds at its own k_tj. With β near 2 each turns the
    state over along its key, and two of them together rotate it.

    Its matrix has a head for each write of each head, whose mixed values `project` adds up.

    Args:
        d_model: width d.
        n_heads: heads h.
        n_writes: m ≥ 1.
        negative: β in (0, 2): a token can turn the sign of what the state holds at its keys.
        shared: options of `lab.layers.recurrence.Shared`; there is no rotation to positions, and
            `chunk_len` counts writes.

    Raises:
        ValueError: for n_writes < 1, or a rotation.

    Source: Siems et al. 2025 (2502.10297), in the form of flash-linear-attention's code. Departs:
        values are as wide as keys; theirs are twice as wide.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        n_writes: int = 2,
        negative: bool = True,
        **shared: Unpack[Shared],
    ):
        if n_writes < 1:
            raise ValueError(f"{n_writes=} must be at least 1")
        self.n_writes = n_writes
        super().__init__(d_model, n_heads, negative=negative, **shared)
        if self.position != "none":
            raise ValueError(f"position={self.position!r} must be 'none': a token has many keys")

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t mh n"],
        v: Float[Tensor, "b t mh p"],
    ) -> Terms:
        """Return Gated DeltaNet's terms, with m keys and values for each token."""
        terms = super().decide(x, q, k, v)
        m = self.n_writes
        written = (rearrange(z, "b t (m h) n -> b t m h n", m=m) for z in (terms.k, terms.v, k))
        keys, values, match = written
        return terms._replace(k=keys, v=values, match=match)

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b heads t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the output for mixed values: of each head, or of each of its writes."""
        return super().project(x, z.unflatten(1, (-1, self.n_heads)).sum(1))
