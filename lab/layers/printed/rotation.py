"""Attention under the rotations as printed. Axis letter, besides the package's: m a pair."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.layers.printed.attention import PlainAttention
from lab.ops.rope import apply_rotary, rotary_table, rotate


def rotate_skewed(
    x: Float[Tensor, "b t h n"], positions: Int[Tensor, " t"], base: float = 10000.0
) -> Float[Tensor, "b t h n"]:
    """Return R_j x with the matrix R as printed, whose last block has two angles.

    Pair m < n/2 − 1 turns by j·θ_m, θ_m = base^(−2m/n). In the last pair the first column has
    θ_{n/2} and the second θ_{n/2−1}: with α and β these angles times j,

        y₁ = cos α · x₁ − sin β · x₂,   y₂ = sin α · x₁ + cos β · x₂

    Source: the matrix at eq. rope_cb and at the end of its proof, erratum R1.
    """
    n = x.shape[-1]
    second = base ** -(torch.arange(0, n, 2, dtype=torch.float64) / n)
    first = second.clone()
    first[-1] = 1 / base  # θ_{n/2}
    high = torch.promote_types(x.dtype, torch.float32)
    j = positions.to(high)[:, None, None]
    alpha, beta = (j * theta.to(x.device, high) for theta in (first, second))  # [t 1 m]
    x1, x2 = x.to(high).unflatten(-1, (-1, 2)).unbind(-1)
    y1 = alpha.cos() * x1 - beta.sin() * x2
    y2 = alpha.sin() * x1 + beta.cos() * x2
    return torch.stack([y1, y2], dim=-1).flatten(-2).to(x.dtype)


def dynamic_base(
    base: float, seq_len: int, n: int, max_position: int, scaling: float = 1.0
) -> float:
    """Return the base that dynamic NTK gives a sequence: it grows once T exceeds max_position.

        base · (scaling · T/max_position − (scaling − 1))^(n/(n−2))

    Raises:
        ZeroDivisionError: for n = 2 and T > max_position, as printed (erratum R4).

    Source: lst:rope, erratum R6.
    """
    if seq_len <= max_position:
        return base
    return base * (scaling * seq_len / max_position - (scaling - 1)) ** (n / (n - 2))


class SkewedRotationAttention(PlainAttention):
    """Attention whose q and k are turned by the printed matrix (`rotate_skewed`).

    Its last block is not orthogonal: the norm of the slowest pair changes with the position, and
    scores depend on where two tokens stand, not on their distance alone (erratum R1).

    Source: the matrix at eq. rope_cb. Departs: its first angle is θ_0 = 1, which Θ beside it,
        counted from 1, does not have.
    """

    def turn(
        self, x: Float[Tensor, "b t h p"], positions: Int[Tensor, " t"]
    ) -> Float[Tensor, "b t h p"]:
        """Return queries or keys at their positions."""
        return rotate_skewed(x, positions, self.rope_base)


class HeadRotatedAttention(PlainAttention):
    """Attention whose angles are laid along the heads: head h is turned by h, as if it were t.

    The listing gives cos and sin [b t p] a new axis 2, for x [b t h p], and multiplies x [b h t p]:
    position meets head. It runs to the end where there are as many heads as tokens, and there q
    and k of a head turn by one angle, which their product cancels: attention without positions.
    With one head the shapes broadcast to [b t t p], with any other number they refuse (erratum R5).

    Raises:
        ValueError: also, in the forward pass, where t is not n_heads.

    Source: lst:rope and lst:innerfuncattn. Departs: angles in fp32 at least (erratum R7); other
        numbers of heads are refused in words.
    """

    def turn(
        self, x: Float[Tensor, "b t h p"], positions: Int[Tensor, " t"]
    ) -> Float[Tensor, "b t h p"]:
        """Return queries or keys, each head turned by the position of its own number."""
        if x.shape[1] != self.n_heads:
            raise ValueError(
                f"n_heads={self.n_heads} must equal the sequence length {x.shape[1]}: the listing "
                "multiplies [b h t p] by angles [b t 1 p]"
            )
        return rotate(x.transpose(1, 2), positions, self.rope_base).transpose(1, 2)


class DynamicBaseAttention(PlainAttention):
    """Attention whose rotation slows down as the sequence grows past max_position (dynamic NTK).

    Every length has another base, so what an earlier token reads changes when later ones come
    (the outputs of a prefix are not the prefix of the outputs), and keys turned at one length do
    not fit queries turned at another. Positions are relative within one call alone (erratum R6).

    Args:
        max_position: length up to which the base stays.
        scaling: the factor of dynamic NTK.

    Raises:
        ValueError: also for max_position < 1, scaling < 1, or heads 2 wide, whose exponent
            divides by zero (erratum R4).

    Source: lst:rope. Departs: the length is the sequence's, the same for all rows, as no position
        ids are given; angles in fp32 at least (erratum R7).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        rope_base: float = 10000.0,
        max_position: int = 32,
        scaling: float = 1.0,
    ):
        super().__init__(d_model, n_heads, rope_base=rope_base)
        if d_model // n_heads < 4:
            raise ValueError(f"d_model / n_heads = {d_model // n_heads} must be at least 4")
        if max_position < 1:
            raise ValueError(f"{max_position=} must be at least 1")
        if scaling < 1:
            raise ValueError(f"{scaling=} must be at least 1")
        self.max_position, self.scaling = max_position, scaling

    def turn(
        self, x: Float[Tensor, "b t h p"], positions: Int[Tensor, " t"]
    ) -> Float[Tensor, "b t h p"]:
        """Return queries or keys at their positions, by the base of the last position."""
        seq_len = int(positions[-1]) + 1
        base = dynamic_base(self.rope_base, seq_len, x.shape[-1], self.max_position, self.scaling)
        return rotate(x, positions, base)


class RoundedRotationAttention(PlainAttention):
    """Attention whose rotation is as exact as its input: in bf16, hardly.

    As printed cos and sin are rounded to the input's type, half a unit in the last place: 0.002
    in bf16. Where the whole module is in bf16, its frequencies and positions are too, and then
    the angles themselves: 7 radians off at T = 2048, so that cosines are off by all of 2. In fp32
    and fp64 this is attention (erratum R7).

    Args:
        round_angles: whether the angles are rounded too, as in a module that is all bf16.

    Source: lst:rope. Departs: positions are cast, where the printed product refuses integers
        (erratum R4).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        rope_base: float = 10000.0,
        round_angles: bool = True,
    ):
        super().__init__(d_model, n_heads, rope_base=rope_base)
        self.round_angles = round_angles

    def turn(
        self, x: Float[Tensor, "b t h p"], positions: Int[Tensor, " t"]
    ) -> Float[Tensor, "b t h p"]:
        """Return queries or keys turned by a table in their own type."""
        p, high = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
        cos, sin = rotary_table(
            positions, p, self.rope_base, x.dtype if self.round_angles else high
        )
        return apply_rotary(x, cos.to(x.dtype), sin.to(x.dtype))
