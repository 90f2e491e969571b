"""Causal attention, with rotary positions and a dynamic mask as options."""

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.mask import MASKS, Positions
from lab.layers.mixer import Mixer, RotaryPairs, take_positions
from lab.layers.state import check_decoding, next_position, token_positions
from lab.ops.attention import (
    PADDED,
    Backend,
    attend,
    attention_scores,
    repeat_heads,
    resolve_attention_backend,
)
from lab.ops.rope import Layout, Table, apply_rotary, rotary_table
from lab.ops.top_keys import top_keys, top_keys_at
from tasks.bounds import check_choice


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


Position = Literal["rope", "none"]
Mask = Literal["none", "literal", "straight-through", "soft", "value", "oracle"]


class Attention(Mixer):
    """Causal softmax attention: y_t = Σ_{s≤t} softmax_s(q_t·k_s/√p + b_s) v_s, then `out`.

    q, k, v and out are linear maps without bias; q and k are rotated to their positions; b is
    the mask's bias. As one matrix: forward(x) = project(x, matrix(x) @ values(x)).

    Query head i reads key and value head i // (n_heads / n_kv_heads), h_kv of them; the mask
    belongs to those.

    Args:
        d_model: width of the residual stream.
        n_heads: heads of queries; each d_model / n_heads wide.
        n_kv_heads: heads of keys and values, a divisor of n_heads; None: n_heads.
        position: "rope" rotates queries and keys; "none" gives them no position.
        rope_base: wavelength base of the rotation.
        rope_layout: which channels pair up: "half" the two halves, "interleaved" neighbours.
        mask: reading of the dynamic mask (`lab.layers.mask.MASKS`), or "none".
        window: keep for each query only this many keys, those of highest mask bias; of equal
            ones the latest.
        max_seq_len: longest sequence for the masks that learn a table.
        d_value: width of all query heads' values together; None: d_model.
        backend: who computes it (`lab.ops.attention.resolve_attention_backend`).

    Raises:
        ValueError: for widths the heads do not divide, unknown names, or a window without a mask.

    Source: sec:methods:ifa. Departs: masked before the softmax (erratum D2).
    """

    # What the layer offers (`lab.layers.mixer`).
    matrix_form = "pattern A, rows sum to 1"
    takes_rows = takes_positions = True
    heads_hook = "hook_z"
    input_hooks = ("hook_q", "hook_k", "hook_v")
    scores_hook = "hook_attn_scores"
    bias_hook = "hook_dynamic_mask"

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
        n_kv_heads: int | None = None,
        backend: Backend = "auto",
    ):
        super().__init__()
        d_value = d_model if d_value is None else d_value
        for name, width in (("d_model", d_model), ("d_value", d_value)):
            if width < 1 or n_heads < 1 or width % n_heads:
                raise ValueError(f"{name}={width} must be a positive multiple of {n_heads=}")
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ValueError(f"{n_kv_heads=} must divide {n_heads=}")
        d_head = d_model // n_heads
        check_choice("position", position, get_args(Position))
        check_choice("rope_layout", rope_layout, get_args(Layout))
        check_choice("mask", mask, get_args(Mask))
        check_choice("backend", backend, get_args(Backend))
        if position == "rope" and d_head % 2:
            raise ValueError(f"d_model / n_heads = {d_head} must be even for position='rope'")
        if window is not None and mask == "none":
            raise ValueError(f"{window=} needs a mask: with mask='none' no key outranks another")
        if window is not None and window < 1:
            raise ValueError(f"{window=} must be at least 1")
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.position = position
        self.rope_base = rope_base
        self.rope_layout: Layout = rope_layout
        self.window = window
        self.backend: Backend = backend

        d_kv_value = d_value // n_heads * n_kv_heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_head * n_kv_heads, bias=False)
        self.v: nn.Module = nn.Linear(d_model, d_kv_value, bias=False)
        self.out = nn.Linear(d_value, d_model, bias=False)
        self.mask = None
        if mask != "none":
            self.mask = MASKS[mask](n_kv_heads, d_value // n_heads, max_seq_len)

        # Of keys, values and the mask, a hook sees the given tokens, not those of the state.
        self.hook_q = HookPoint()  # [b t h p]
        self.hook_k = HookPoint()  # [b t h_kv p]
        self.hook_v = HookPoint()  # [b t h_kv p]
        self.hook_rot_q = HookPoint()  # [b t h p]
        self.hook_rot_k = HookPoint()  # [b t h_kv p]
        self.hook_dynamic_mask = HookPoint()  # [b h_kv 1 t]
        self.hook_attn_scores = HookPoint()  # [b h t s]
        self.hook_pattern = HookPoint()  # [b h t s]
        self.hook_z = HookPoint()  # [b t h p]

    @property
    def relative(self) -> bool:
        """Whether shifting all positions changes nothing."""
        return self.mask is None or self.mask.relative

    @property
    def rotary_pairs(self) -> RotaryPairs | None:
        """How queries and keys are rotated; None with position="none"."""
        if self.position != "rope":
            return None
        width = self.q.out_features // self.n_heads
        return RotaryPairs(
            sides="Q/K",
            target_hook="hook_q",
            source_hook="hook_k",
            decay_hook=None,
            source_of=tuple(h * self.n_kv_heads // self.n_heads for h in range(self.n_heads)),
            comparison_of=tuple(range(self.n_heads)),
            n_pairs=width // 2,
            base=self.rope_base,
            layout=self.rope_layout,
            scale=width**-0.5,
        )

    def extra_repr(self) -> str:
        """Return the layer's sizes and readings."""
        p = self.k.out_features // self.n_kv_heads
        grouped = "" if self.n_kv_heads == self.n_heads else f" on {self.n_kv_heads} of keys"
        mask = next((name for name, cls in MASKS.items() if type(self.mask) is cls), "no")
        window = "" if self.window is None else f", top {self.window} keys"
        # What "auto" is depends on the inputs.
        backend = "" if self.backend == "auto" else f", {self.backend}"
        position = f"position {self.position}"
        return f"{self.n_heads} × {p}{grouped}, {position}, {mask} mask{window}{backend}"

    def forward(
        self, x: Float[Tensor, "b t d"], at: Int[Tensor, "b q"] | None = None
    ) -> Float[Tensor, "b q d"]:
        """Return the outputs; with `at` [b q], only those at some positions, the only queries."""
        if at is None:
            return self.prefill(x)[0]
        if self._runs_flex(x, at):
            return take_positions(self.prefill(x)[0], at)
        positions = token_positions(x.shape[1], x.device)
        q, k = self._project_and_rotate(x, positions, at)
        v = self._head_values(x)
        return self.project(x, self._mix(q, k, v, self._key_bias(x, v, positions), at))

    def start(self, batch: int, position: int = 0) -> AttentionState:
        """Return the state before the first token, which will stand at `position`."""
        weight = self.k.weight
        k, v = (weight.new_zeros(batch, self.n_kv_heads, 0, p) for p in self._cached_widths)
        return AttentionState(k, v, None, torch.full((batch,), position, device=weight.device))

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: AttentionState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], AttentionState]:
        """Return the outputs of further tokens, and the state after them.

        Args:
            x: the tokens, read after those of the state.
            state: what `start`, `prefill` or `step` returned.
            keep: False at padding, which no real token reads and which counts no position.

        Raises:
            ValueError: for a state of another batch or layer, a mask of another shape, or a
                position outside the dynamic mask's table.
        """
        check_decoding(x, state, keep, AttentionState)
        if state is not None:
            state.check(self.n_kv_heads, self._cached_widths)
        positions = token_positions(x.shape[1], x.device, state, keep)
        q, k = self._project_and_rotate(x, positions)
        v = self._head_values(x)
        bias = self._key_bias(x, v, positions, keep)
        if keep is not None:
            # Padding may hold anything, even NaN: it must not reach a score or value.
            k, v = (z.masked_fill(~keep[:, None, :, None], 0.0) for z in (k, v))
        if state is not None:
            k, v, bias = state.append(k, v, bias)
        after = AttentionState(k, v, bias, next_position(x, state, keep))
        return self.project(x, self._mix(q, k, v, bias)), after

    def step(
        self, x: Float[Tensor, "b d"], state: AttentionState
    ) -> tuple[Float[Tensor, "b d"], AttentionState]:
        """Return the output of one further token, and the state after it."""
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return the attention pattern, or some of its rows; quadratic, for analysis."""
        first, last, _ = (rows or slice(None)).indices(x.shape[1])
        positions = token_positions(x.shape[1], x.device)
        q, k = self._project_and_rotate(x, positions)
        bias = self._key_bias(x, self._head_values(x), positions)
        # The rows' queries stand at the last of the keys, as in decoding.
        bias = None if bias is None else bias[..., :last]
        pattern = self._pattern(q[:, :, first:last], k[:, :, :last], bias)
        return F.pad(pattern, (0, x.shape[1] - last))

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return what the matrix mixes, for each query head."""
        return repeat_heads(self._head_values(x), self.n_heads)

    def project(
        self, x: Float[Tensor, "b _ d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the heads' mixed values as an output; attention adds nothing else from x."""
        z = self.hook_z(rearrange(z, "b h t p -> b t h p"))
        return self.out(rearrange(z, "b t h p -> b t (h p)"))

    @property
    def _cached_widths(self) -> tuple[int, int]:
        """Widths of a head's key and of its value."""
        return self.k.out_features // self.n_kv_heads, self.out.in_features // self.n_heads

    def _value_vectors(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b s d_value"]:
        """Return all value heads' values side by side."""
        return self.v(x)

    def _head_values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h_kv s p"]:
        """Return the values as they are cached."""
        v = rearrange(self._value_vectors(x), "b s (h p) -> b s h p", h=self.n_kv_heads)
        return rearrange(self.hook_v(v), "b s h p -> b h s p")

    def _runs_flex(self, x: Float[Tensor, "b t d"], at: Int[Tensor, "b q"]) -> bool:
        """Whether flex_attention computes this, which has no form for some positions."""
        keep_bytes = 0 if self.window is None else at.numel() * self.n_heads * x.shape[1]
        return resolve_attention_backend(self.backend, x.device, keep_bytes) == "flex"

    def _queries(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h p"]:
        return rearrange(self.q(x), "b t (h p) -> b t h p", h=self.n_heads)

    def _keys(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h_kv p"]:
        return rearrange(self.k(x), "b t (h p) -> b t h p", h=self.n_kv_heads)

    @property
    def _rotary_width(self) -> int:
        """How many channels of a head are rotated."""
        return self.k.out_features // self.n_kv_heads

    def _rotate(self, x: Float[Tensor, "b t h p"], cos: Table, sin: Table) -> Tensor:
        return apply_rotary(x, cos, sin, self.rope_layout)

    def _project_and_rotate(
        self,
        x: Float[Tensor, "b t d"],
        positions: Positions,
        at: Int[Tensor, "b q"] | None = None,
    ) -> tuple[Float[Tensor, "b h q p"], Float[Tensor, "b h_kv t p"]]:
        """Return queries and keys at their positions, the queries of some alone with `at`."""
        q = self.hook_q(self._queries(x if at is None else take_positions(x, at)))
        k = self.hook_k(self._keys(x))
        if self.position == "rope":
            precise = torch.promote_types(q.dtype, torch.float32)
            table = rotary_table(positions, self._rotary_width, self.rope_base, precise)
            k = self._rotate(k, *table)
            cos, sin = table if at is None else (z[at] for z in table)
            q = self._rotate(q, cos, sin)
        q, k = self.hook_rot_q(q), self.hook_rot_k(k)
        return rearrange(q, "b t h p -> b h t p"), rearrange(k, "b t h p -> b h t p")

    def _key_bias(
        self,
        x: Float[Tensor, "b s d"],
        v: Float[Tensor, "b h_kv s p"],
        positions: Positions,
        keep: Bool[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "b h_kv s"] | None:
        """Return the mask's bias; without a mask a hook may still put one in place of zeros."""
        bias = None
        if self.mask is not None:
            bias = self.mask(v, positions)
        elif self.hook_dynamic_mask.active or keep is not None:
            bias = v.new_zeros(v.shape[:-1])
        if bias is None:
            return None
        bias = self.hook_dynamic_mask(bias[:, :, None, :])[:, :, 0, :]
        return bias if keep is None else torch.where(keep[:, None, :], bias, PADDED)

    def _mix(
        self,
        q: Float[Tensor, "b h t p"],
        k: Float[Tensor, "b h_kv s p"],
        v: Float[Tensor, "b h_kv s p_v"],
        bias: Float[Tensor, "b h_kv s"] | None,
        at: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t p_v"]:
        """Return the mixed values, by the explicit matrix where a hook needs it."""
        if self.hook_attn_scores.active or self.hook_pattern.active:
            return self._pattern(q, k, bias, at) @ repeat_heads(v, self.n_heads)
        return attend(q, k, v, bias, self.window, self.backend, at)

    def _pattern(
        self,
        q: Float[Tensor, "b h t p"],
        k: Float[Tensor, "b h_kv s p"],
        bias: Float[Tensor, "b h_kv s"] | None,
        at: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """Return the explicit attention matrix, through its hooks."""
        keep = None
        if self.window is not None:
            assert bias is not None
            if at is None:
                keep = top_keys(bias, self.window, q.shape[-2])
            else:
                keep = top_keys_at(bias, self.window, at)
            keep = repeat_heads(keep, self.n_heads)
        scores = self.hook_attn_scores(attention_scores(q, k, bias, keep, at))
        return self.hook_pattern(scores.softmax(dim=-1).to(q.dtype))
