"""Causal attention, with rotary positions and a dynamic mask as options."""

from typing import Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.choices import one_of
from lab.layers.mask import MASKS
from lab.ops.attention import attend, attention_scores, top_keys
from lab.ops.rope import Layout, apply_rotary, rotary_table

Position = Literal["rope", "none"]
Mask = Literal["none", "literal", "straight-through", "soft", "value", "oracle"]


class Attention(nn.Module):
    """Causal softmax attention: y_t = Σ_{s≤t} softmax_s(q_t·k_s/√p + b_s) v_s, then `out`.

    q, k, v and out are linear maps without bias; q and k are rotated to their positions; b is
    the mask's bias. As one matrix: forward(x) = project(x, matrix(x) @ values(x)).

    Args:
        d_model: width of the residual stream.
        n_heads: heads; each d_model / n_heads wide.
        position: "rope" rotates queries and keys; "none" gives them no position.
        rope_base: wavelength base of the rotation.
        rope_layout: which channels pair up: "half" the two halves, "interleaved" neighbours.
        mask: reading of the dynamic mask (`lab.layers.mask.MASKS`), or "none".
        window: keep for each query only this many keys, those of highest mask bias; of equal
            ones the latest.
        max_seq_len: longest sequence for the masks that learn a table.
        d_value: width of all heads' values together; None: d_model.

    Raises:
        ValueError: for widths the heads do not divide, unknown names, or a window without a mask.

    Source: sec:methods:ifa. Departs: masked before the softmax (erratum D2).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        position: Position = "rope",
        rope_base: float = 10000.0,
        rope_layout: Layout = "half",
        mask: Mask = "none",
        window: int | None = None,
        max_seq_len: int = 8192,
        d_value: int | None = None,
    ):
        super().__init__()
        d_value = d_model if d_value is None else d_value
        for name, width in (("d_model", d_model), ("d_value", d_value)):
            if width < 1 or n_heads < 1 or width % n_heads:
                raise ValueError(f"{name}={width} must be a positive multiple of {n_heads=}")
        d_head = d_model // n_heads
        one_of("position", position, get_args(Position))
        one_of("rope_layout", rope_layout, get_args(Layout))
        one_of("mask", mask, get_args(Mask))
        if position == "rope" and d_head % 2:
            raise ValueError(f"d_model / n_heads = {d_head} must be even for position='rope'")
        if window is not None and mask == "none":
            raise ValueError(f"{window=} needs a mask: with mask='none' no key outranks another")
        if window is not None and window < 1:
            raise ValueError(f"{window=} must be at least 1")
        self.n_heads = n_heads
        self.position = position
        self.rope_base = rope_base
        self.rope_layout: Layout = rope_layout
        self.window = window

        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v: nn.Module = nn.Linear(d_model, d_value, bias=False)
        self.out = nn.Linear(d_value, d_model, bias=False)
        self.mask = None
        if mask != "none":
            self.mask = MASKS[mask](n_heads, d_value // n_heads, max_seq_len)

        self.hook_q = HookPoint()  # [b t h p], as the next four
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        self.hook_rot_q = HookPoint()
        self.hook_rot_k = HookPoint()
        self.hook_dynamic_mask = HookPoint()  # [b h 1 s]
        self.hook_attn_scores = HookPoint()  # [b h t s]
        self.hook_pattern = HookPoint()  # [b h t s]
        self.hook_z = HookPoint()  # [b t h p]

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the attention's output, by the explicit matrix where a hook looks at it."""
        q, k = self._rotated(x)
        v = self.values(x)
        bias = self._key_bias(v)
        if self.hook_attn_scores.active or self.hook_pattern.active:
            z = self._pattern(q, k, bias) @ v
        else:
            z = attend(q, k, v, bias, self.window)
        return self.project(x, z)

    def matrix(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b h t s"]:
        """Return the attention pattern; quadratic, for analysis."""
        q, k = self._rotated(x)
        return self._pattern(q, k, self._key_bias(self.values(x)))

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return what the matrix mixes."""
        v = rearrange(self._value_vectors(x), "b s (h p) -> b s h p", h=self.n_heads)
        return rearrange(self.hook_v(v), "b s h p -> b h s p")

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the heads' mixed values as an output; attention adds nothing else from x."""
        z = self.hook_z(rearrange(z, "b h t p -> b t h p"))
        return self.out(rearrange(z, "b t h p -> b t (h p)"))

    def _value_vectors(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b s d_value"]:
        """Return all heads' values side by side."""
        return self.v(x)

    def _rotated(
        self, x: Float[Tensor, "b t d"]
    ) -> tuple[Float[Tensor, "b h t p"], Float[Tensor, "b h t p"]]:
        """Return queries and keys at their positions."""
        q = self.hook_q(rearrange(self.q(x), "b t (h p) -> b t h p", h=self.n_heads))
        k = self.hook_k(rearrange(self.k(x), "b t (h p) -> b t h p", h=self.n_heads))
        if self.position == "rope":
            positions = torch.arange(x.shape[1], device=x.device)
            precise = torch.promote_types(q.dtype, torch.float32)
            cos, sin = rotary_table(positions, q.shape[-1], self.rope_base, precise)
            q, k = (apply_rotary(y, cos, sin, self.rope_layout) for y in (q, k))
        q, k = self.hook_rot_q(q), self.hook_rot_k(k)
        return rearrange(q, "b t h p -> b h t p"), rearrange(k, "b t h p -> b h t p")

    def _key_bias(self, v: Float[Tensor, "b h s p"]) -> Float[Tensor, "b h s"] | None:
        """Return the mask's bias; without a mask a hook may still put one in place of zeros."""
        if self.mask is not None:
            bias = self.mask(v)
        elif self.hook_dynamic_mask.active:
            bias = v.new_zeros(v.shape[:-1])
        else:
            return None
        return self.hook_dynamic_mask(bias[:, :, None, :])[:, :, 0, :]

    def _pattern(
        self,
        q: Float[Tensor, "b h t p"],
        k: Float[Tensor, "b h s p"],
        bias: Float[Tensor, "b h s"] | None,
    ) -> Float[Tensor, "b h t s"]:
        """Return the explicit attention matrix, through its hooks."""
        keep = None
        if self.window is not None:
            assert bias is not None
            keep = top_keys(bias, self.window, q.shape[-2])
        scores = self.hook_attn_scores(attention_scores(q, k, bias, keep))
        return self.hook_pattern(scores.softmax(dim=-1).to(q.dtype))
