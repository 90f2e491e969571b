"""Attention by its explicit matrix, and the two printed readings of mask and values."""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from lab.ops.attention import attention_pattern
from lab.ops.rope import rotate


class PlainAttention(nn.Module):
    """Causal attention by its explicit matrix: what the printed readings each change in one place.

    The same function as `lab.layers.attention.Attention`, with the same parameters q, k, v, out.
    forward(x) = project(x, matrix(x) @ values(x)); quadratic memory.

    Args:
        d_model: width of the residual stream.
        n_heads: heads, each d_model / n_heads wide, which must be even.
        rope_base: wavelength base of the rotation.

    Raises:
        ValueError: for widths that the heads do not divide, or an odd head.

    Source: sec:methods:ifa.
    """

    def __init__(self, d_model: int, n_heads: int = 1, *, rope_base: float = 10000.0):
        super().__init__()
        if d_model < 1 or n_heads < 1 or d_model % n_heads:
            raise ValueError(f"{d_model=} must be a positive multiple of {n_heads=}")
        if d_model // n_heads % 2:
            raise ValueError(f"d_model / n_heads = {d_model // n_heads} must be even")
        self.n_heads, self.rope_base = n_heads, rope_base
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v: nn.Module = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the attention's output."""
        return self.project(x, self.matrix(x) @ self.values(x))

    def matrix(self, x: Float[Tensor, "b t d"], start: int = 0) -> Float[Tensor, "b h t s"]:
        """Return the attention matrix, the first token standing at position `start`."""
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        q, k = (
            self.turn(rearrange(f(x), "b t (h p) -> b t h p", h=self.n_heads), positions)
            for f in (self.q, self.k)
        )
        return self.pattern(q.transpose(1, 2), k.transpose(1, 2))

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return what the matrix mixes."""
        return rearrange(self.v(x), "b s (h p) -> b h s p", h=self.n_heads)

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the heads' mixed values as an output; attention adds nothing else from x."""
        return self.out(rearrange(z, "b h t p -> b t (h p)"))

    def turn(
        self, x: Float[Tensor, "b t h p"], positions: Int[Tensor, " t"]
    ) -> Float[Tensor, "b t h p"]:
        """Return queries or keys at their positions."""
        return rotate(x, positions, self.rope_base)

    def pattern(
        self, q: Float[Tensor, "b h t p"], k: Float[Tensor, "b h s p"]
    ) -> Float[Tensor, "b h t s"]:
        """Return the attention matrix of rotated queries and keys."""
        return attention_pattern(q, k)


class MaskAfterSoftmaxAttention(PlainAttention):
    """Attention masked after its softmax: M = L ∘ softmax(QKᵀ/√p), L = causal ∘ round(l).

    Rows of M sum to less than one, and to what the later keys leave over: the softmax divides by
    them too, so an output moves with tokens after it (erratum D2). l starts at ones; a step of
    gradient through round is exactly zero, so nothing but weight decay moves it (erratum D1).

    Args:
        max_seq_len: longest sequence, the width of l.

    Raises:
        ValueError: also, in the forward pass, for a sequence longer than max_seq_len.

    Source: eq. dynamic_mask and M = L ∘ A after it. Departs: divides the scores by √p, as
        lst:innerfuncattn does and the equation does not.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        rope_base: float = 10000.0,
        max_seq_len: int = 8192,
    ):
        super().__init__(d_model, n_heads, rope_base=rope_base)
        if max_seq_len < 1:
            raise ValueError(f"{max_seq_len=} must be at least 1")
        self.l = nn.Parameter(torch.ones(n_heads, max_seq_len))

    def pattern(
        self, q: Float[Tensor, "b h t p"], k: Float[Tensor, "b h s p"]
    ) -> Float[Tensor, "b h t s"]:
        """Return M."""
        t, p = q.shape[-2:]
        if t > self.l.shape[1]:
            raise ValueError(f"sequence length {t} exceeds max_seq_len={self.l.shape[1]}")
        A = (q @ k.mT * p**-0.5).softmax(dim=-1)
        return (A * self.l[:, None, :t].round()).tril()


class SoftSumAttention(PlainAttention):
    """Attention whose values are V = x ∘ (x W_vQ θ_vKᵀ) W_V: all n_v rows, by their raw scores.

    The equation without its last transpose, which is the only way its shapes meet. It is smooth,
    so everything trains, and has no choice in it: V is a quadratic form of x, where the top k of
    the steps below the equation is piecewise linear (erratum I3).

    Args:
        n_values: rows n_v of W_V [n_v d].
        d_retrieval: width of the scores' inner product; None: d_model / 2.

    Raises:
        ValueError: also for a width or count below one.

    Source: eq. inner_function_V. Departs: W_V in place of W_Vᵀ, and normal keys, not zeros.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        n_values: int = 2,
        d_retrieval: int | None = None,
        rope_base: float = 10000.0,
    ):
        super().__init__(d_model, n_heads, rope_base=rope_base)
        d_retrieval = max(1, d_model // 2) if d_retrieval is None else d_retrieval
        for field, value in (("n_values", n_values), ("d_retrieval", d_retrieval)):
            if value < 1:
                raise ValueError(f"{field}={value} must be at least 1")
        self.v = nn.Identity()
        self.value_query = nn.Linear(d_model, d_retrieval, bias=False)
        self.value_keys = nn.Parameter(torch.randn(n_values, d_retrieval) * d_retrieval**-0.5)
        self.value_rows = nn.Parameter(torch.randn(n_values, d_model))

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return x times the scored sum of all rows."""
        scores = self.value_query(x) @ self.value_keys.T
        return super().values(x * (scores @ self.value_rows))
