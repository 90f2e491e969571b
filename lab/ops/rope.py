"""Rotary position embedding: pairs of channels turned by angles that grow with position.

Pair m of a vector at position j turns by j·θ_m, with θ_m = base^(−2m/n), m = 0 … n/2−1, so
that the inner product of two turned vectors depends on their positions by the difference only.
Axis letter of this file, besides the package's: m pair of channels.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.ops.constants import keep_on_accelerator
from lab.ops.derivatives import needs_plain
from tasks.bounds import check_choice

Layout = Literal["half", "interleaved"]
"""Which channels make pair m: (m, m + n/2), or (2m, 2m + 1)."""

Positions = Int[Tensor, " t"] | Int[Tensor, "b t"]
Table = Float[Tensor, "t m"] | Float[Tensor, "b t m"]


def rotate(
    x: Float[Tensor, "b t h n"],
    positions: Positions,
    base: float = 10000.0,
    layout: Layout = "half",
) -> Float[Tensor, "b t h n"]:
    """Return `x` turned to its positions; the same for every head.

    (x'₁, x'₂) = (x₁ cos α − x₂ sin α, x₂ cos α + x₁ sin α), α = position·θ_m, for each pair m.

    An inner product of turned vectors depends on the difference of their positions only:

    >>> q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)
    >>> turned = [rotate(q, torch.tensor([j + 5])) * rotate(k, torch.tensor([j])) for j in (0, 90)]
    >>> torch.allclose(turned[0].sum(), turned[1].sum())
    True

    Args:
        x: n even.
        positions: whole numbers, negative ones too; exact in fp32 up to ±2^24.
        base: > 0; the slowest pair's wavelength is near 2π·base.
        layout: how channels pair up; queries and keys, or C and B, must agree on it.

    Raises:
        ValueError: for odd n, a base out of range, positions of another shape, unknown layout.

    Source: eq. rope_cb, lst:rope, errata R1 and R3. Departs: angles and rotation in fp32 at
        least, whatever x's dtype (R7); the head axis is the third, never guessed (R5); the base
        does not follow the length (R6).
    """
    high = torch.promote_types(x.dtype, torch.float32)
    cos, sin = rotary_table(positions, x.shape[-1], base, high)
    return apply_rotary(x, cos, sin, layout)


def rotary_table(
    positions: Positions, n: int, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Table, Table]:
    """Return cos and sin of the angles position·θ_m, for `apply_rotary` to use many times.

    Raises:
        ValueError: for n that is odd or not positive, or base ≤ 0.
    """
    if n < 2 or n % 2:
        raise ValueError(f"n={n}: rotation pairs channels, so the width must be even and positive")
    if not 0 < base < float("inf"):
        raise ValueError(f"{base=} must be positive and finite")
    angles = positions[..., None].to(dtype) * _find_frequencies(positions.device, n, base, dtype)
    return angles.cos(), angles.sin()


@keep_on_accelerator
def _find_frequencies(device: torch.device, n: int, base: float, dtype: torch.dtype) -> Tensor:
    # θ rounds once, from fp64 on the CPU: not every accelerator has fp64.
    return (base ** -(torch.arange(0, n, 2, dtype=torch.float64) / n)).to(device, dtype)


def apply_rotary(
    x: Float[Tensor, "b t h n"], cos: Table, sin: Table, layout: Layout = "half"
) -> Float[Tensor, "b t h n"]:
    """Return `x` turned by tabled angles, in the table's dtype inside and x's own outside.

    Tables are constants: they get no gradient.

    Raises:
        ValueError: for a table of another shape than x's, or an unknown layout.
    """
    check_choice("layout", layout, get_args(Layout))
    b, t, _, n = x.shape
    if cos.shape not in {(t, n // 2), (b, t, n // 2)}:
        raise ValueError(
            f"positions are {list(cos.shape[:-1])} of width {2 * cos.shape[-1]}, "
            f"must be [{t}] or [{b}, {t}] of width {n}"
        )
    turned = _turn(x.to(cos.dtype), cos[..., None, :], sin[..., None, :], layout)
    return turned.to(x.dtype)


def rotate_by_matrix(
    x: Float[Tensor, "b t h n"],
    positions: Positions,
    base: float = 10000.0,
    layout: Layout = "half",
) -> Float[Tensor, "b t h n"]:
    """The obvious form, R_j x with the whole matrix: the reference for `rotate`."""
    R = rotation_matrix(positions, x.shape[-1], base, layout, x.dtype)
    return (R.expand(*x.shape[:2], -1, -1) @ x.mT).mT


def rotation_matrix(
    positions: Positions, n: int, base: float, layout: Layout, dtype: torch.dtype
) -> Float[Tensor, "*positions n n"]:
    """Return R_j for each position j: orthogonal, R_a R_b = R_{a+b}, R_0 = I."""
    R = torch.zeros(*positions.shape, n, n, dtype=dtype, device=positions.device)
    for m in range(n // 2):
        first, second = (m, m + n // 2) if layout == "half" else (2 * m, 2 * m + 1)
        angle = positions.to(dtype) * base ** (-2 * m / n)
        R[..., first, first] = R[..., second, second] = angle.cos()
        R[..., first, second] = -angle.sin()
        R[..., second, first] = angle.sin()
    return R


def _turn(x, cos, sin, layout):
    if needs_plain():
        shape, axis = _pair(layout)
        x1, x2 = x.unflatten(-1, shape).unbind(axis)
        return torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis).flatten(-2)
    return _Turn.apply(x, cos, sin, layout)


def _pair(layout):
    """Return how channels unflatten, and the axis on which the two of each pair then are."""
    return ((2, -1), -2) if layout == "half" else ((-1, 2), -1)


class _Turn(torch.autograd.Function):
    """The rotation in three passes over its result; its gradient is the rotation back.

    Plain autograd would keep both halves of x and join the parts by a copy: half as fast.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, layout):
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        half = layout == "half"
        # A factor for each channel: torch runs through whole rows, not through one half at a time.
        turned = x * (torch.cat([cos, cos], -1) if half else cos.repeat_interleave(2, -1))
        shape, axis = _pair(layout)
        (x1, x2), (y1, y2) = (z.unflatten(-1, shape).unbind(axis) for z in (x, turned))
        y1.addcmul_(x2, sin, value=-1)
        y2.addcmul_(x1, sin)
        return turned

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _Turn.apply(grad, cos, -sin, ctx.layout), None, None, None
