"""Attention with one change each, for the trainability map: `--model lab.studies.variants:CLASS`.

The first four are subclasses of attention and can decode. The last two use projections of earlier
tokens, which attention's state does not hold, so they read whole sequences only.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab.layers.attention import Attention
from lab.layers.convolution import CausalConvolution
from lab.layers.state import token_positions
from lab.ops.attention import attend
from lab.ops.rope import Table, apply_rotary, rotary_table


class PartialRotary(Attention):
    """Attention that rotates the first `share` of each head's channels and leaves the others.

    Args:
        d_model: width of the residual stream.
        n_heads: heads.
        share: of a head's channels, in (0, 1]; they are rotated like a head of that width.

    Raises:
        ValueError: for a share that is not an even number of channels above 0.

    Source: GPT-NeoX, `rotary_pct`.
    """

    def __init__(self, d_model: int, n_heads: int = 1, *, share: float = 0.25):
        super().__init__(d_model, n_heads)
        rotated = share * d_model / n_heads
        if not 0 < share <= 1 or rotated % 2:
            raise ValueError(
                f"share={share}: must be in (0, 1] and an even number of channels, is {rotated:g}"
            )
        self.rotated = int(rotated)

    @property
    def _rotary_width(self) -> int:
        return self.rotated

    def _rotate(self, x: Float[Tensor, "b t h p"], cos: Table, sin: Table) -> Tensor:
        turned = apply_rotary(x[..., : self.rotated], cos, sin)
        return torch.cat([turned, x[..., self.rotated :]], -1)


class NormedAttention(Attention):
    """Attention on q / rms(q) ⊙ g and k / rms(k) ⊙ g', normalised before rotation (QK-norm).

    Args:
        d_model: width of the residual stream.
        n_heads: heads, which share the gains.

    Source: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters".
        Departs: RMSNorm in place of LayerNorm, as Qwen3 and OLMo 2 have it.
    """

    def __init__(self, d_model: int, n_heads: int = 1):
        super().__init__(d_model, n_heads)
        self.q_norm, self.k_norm = (nn.RMSNorm(d_model // n_heads) for _ in range(2))

    def _queries(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h p"]:
        return self.q_norm(super()._queries(x))

    def _keys(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h_kv p"]:
        return self.k_norm(super()._keys(x))


class NearIdentityAttention(Attention):
    """Attention whose values and output start near the identity, so that it copies what it reads.

    Args:
        d_model: width of the residual stream.
        n_heads: heads.
        noise: share of the usual initial weights that is added.
    """

    def __init__(self, d_model: int, n_heads: int = 1, *, noise: float = 0.1):
        super().__init__(d_model, n_heads)
        _start_near_identity((self.get_parameter("v.weight"), self.out.weight), noise)


class AlignedAttention(Attention):
    """Attention whose queries and keys start near the identity, so a token looks for its like.

    Args:
        d_model: width of the residual stream.
        n_heads: heads.
        noise: share of the usual initial weights that is added.
    """

    def __init__(self, d_model: int, n_heads: int = 1, *, noise: float = 0.1):
        super().__init__(d_model, n_heads)
        _start_near_identity((self.q.weight, self.k.weight), noise)


class ShiftedKeys(nn.Module):
    """Attention whose keys take half of their channels from the token before.

    The slower half of RoPE's pairs is shifted, both channels of a pair together. Before the first
    token come zeros.

    Args:
        d_model: width of the residual stream.
        n_heads: heads; each has a multiple of four channels.

    Raises:
        ValueError: for heads of another width.
    """

    def __init__(self, d_model: int, n_heads: int = 1):
        super().__init__()
        if d_model % (4 * n_heads):
            raise ValueError(f"d_model={d_model}: must be a multiple of 4 · {n_heads=}")
        self.attention = Attention(d_model, n_heads)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the attention's output."""
        k = rearrange(
            self.attention.k(x), "b t (h n q p) -> b t h n q p", h=self.attention.n_heads, n=2, q=2
        )
        here, before = k.unbind(-2)
        before = F.pad(before, (0, 0, 0, 0, 0, 0, 1, -1))
        k = rearrange(torch.stack([here, before], -2), "b t h n q p -> b t (h n q p)")
        return _attend(self.attention, x, self.attention.q(x), k, self.attention.v(x))


class ConvolvedAttention(nn.Module):
    """Attention whose queries, keys and values each pass through a short causal convolution.

    Args:
        d_model: width of the residual stream.
        n_heads: heads.
        width: tokens in a sum, including the current one.

    Source: Mamba-2's convolution of x, B and C. Departs: no SiLU after it.
    """

    def __init__(self, d_model: int, n_heads: int = 1, *, width: int = 4):
        super().__init__()
        self.attention = Attention(d_model, n_heads)
        self.convolution = CausalConvolution(3 * d_model, width)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the attention's output."""
        projected = [self.attention.q(x), self.attention.k(x), self.attention.v(x)]
        q, k, v = self.convolution(torch.cat(projected, -1))[0].chunk(3, -1)
        return _attend(self.attention, x, q, k, v)


@torch.no_grad()
def _start_near_identity(weights: Iterable[Float[Tensor, "d d"]], noise: float) -> None:
    for weight in weights:
        weight.mul_(noise).add_(torch.eye(len(weight)))


def _attend(
    attention: Attention,
    x: Float[Tensor, "b t d"],
    q: Float[Tensor, "b t d"],
    k: Float[Tensor, "b t d"],
    v: Float[Tensor, "b t d"],
) -> Float[Tensor, "b t d"]:
    """Return the output of an attention layer on given queries, keys and values."""
    q, k, v = (rearrange(y, "b t (h p) -> b t h p", h=attention.n_heads) for y in (q, k, v))
    precise = torch.promote_types(q.dtype, torch.float32)
    positions = token_positions(x.shape[1], x.device)
    cos, sin = rotary_table(positions, q.shape[-1], attention.rope_base, precise)
    q, k = (apply_rotary(y, cos, sin) for y in (q, k))
    q, k, v = (rearrange(y, "b t h p -> b h t p") for y in (q, k, v))
    return attention.project(x, attend(q, k, v, None))
