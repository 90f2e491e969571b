"""Rotary positions in the layers themselves: what SSD, attention and IFA read depends on j − i.

The bounds are those of `test_rope`: a pair turned at a position is off by the angle's error, two
roundings of θ · position, and by ten roundings of the turn, all in fp32 at least, and by one
rounding of the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.layers.attention import Attention
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.ssd import SSD
from lab.ops.rope import rotate_by_matrix

LONGEST = 131_072
D_MODEL = 16
POINTS = {
    SSD: (("hook_C_pre", "hook_C_rot"), ("hook_B_pre", "hook_B_rot")),
    Attention: (("hook_q", "hook_rot_q"), ("hook_k", "hook_rot_k")),
    InnerFunctionAttention: (("hook_q", "hook_rot_q"), ("hook_k", "hook_rot_k")),
}
"""Hook points of what is rotated, before and after."""
KINDS = tuple(POINTS)
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16)}


@dataclass(frozen=True)
class Drawn:
    """How to build a layer with its input, and the position of its first token.

    They are built by the test: checks of shapes draw random numbers, which a strategy must not.
    """

    kind: Any
    n_heads: int
    options: dict[str, Any]
    seed: int
    seq_len: int
    start: int
    dtype: torch.dtype

    @cached_property
    def _built(self) -> tuple[Any, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            layer = self.kind(D_MODEL, self.n_heads, **self.options)
            x = torch.randn(2, self.seq_len, D_MODEL, dtype=torch.float64)
        return layer.to(self.dtype).eval(), x.to(self.dtype)

    @property
    def layer(self) -> Any:
        """The layer."""
        return self._built[0]

    @property
    def x(self) -> Tensor:
        """Its input [2 t d]."""
        return self._built[1]

    def record(self, *names: str) -> dict[str, Tensor]:
        """Run the layer from its first position and return what passes hook points."""
        seen: dict[str, Tensor] = {}
        handles = [
            getattr(self.layer, name).register_forward_hook(
                lambda _, __, out, name=name: seen.__setitem__(name, out.detach())
            )
            for name in names
        ]
        self.layer.prefill(self.x, self.layer.start(len(self.x), self.start))
        for handle in handles:
            handle.remove()
        return seen


@st.composite
def layers(draw: st.DrawFn, *dtypes: torch.dtype, kinds: Sequence[Any] = KINDS) -> Drawn:
    """Layers of every kind: groups, layouts, bases, precisions and offsets."""
    kind = draw(st.sampled_from(kinds))
    groups, per_group = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    options: dict[str, Any] = {
        "rope_base": draw(st.sampled_from([2.0, 100.0, 10_000.0, 500_000.0])),
        "rope_layout": draw(st.sampled_from(["half", "interleaved"])),
    }
    if kind is SSD:
        options |= {"n_groups": groups, "d_state": draw(st.sampled_from([2, 6]))}
        options |= {"chunk_len": draw(st.sampled_from([3, 64]))}
    else:
        options |= {"n_kv_heads": groups}
    if kind is InnerFunctionAttention:
        options |= {"value_map": "linear"}
    seed, t = draw(st.integers(0, 2**32)), draw(st.integers(3, 12))
    start = draw(st.integers(0, LONGEST))
    dtype = draw(st.sampled_from(dtypes))
    return Drawn(kind, groups * per_group, options, seed, t, start, dtype)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@torch.no_grad()
def test_both_sides_turn_by_the_layer_s_base_at_their_positions(kind: Any, data: st.DataObject):
    drawn = data.draw(layers(torch.float64, torch.float32, torch.bfloat16, kinds=[kind]))
    # The options asked for: the layer's own could be lost at construction.
    base, layout = drawn.options["rope_base"], drawn.options["rope_layout"]
    pairs = drawn.layer.rotary_pairs
    assert (pairs.base, pairs.layout) == (base, layout)
    at = drawn.start + torch.arange(drawn.x.shape[1])
    seen = drawn.record(*(name for names in POINTS[type(drawn.layer)] for name in names))
    for before, after in POINTS[type(drawn.layer)]:
        given, turned = seen[before].double(), seen[after]
        expected = rotate_by_matrix(given, at, base, layout)
        n = given.shape[-1]
        theta = base ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
        high = EPS[torch.promote_types(drawn.x.dtype, torch.float32)]
        angle = (theta * at[:, None]).max(-1, keepdim=True).values[:, None]
        inside = given.norm(dim=-1, keepdim=True) * high * (angle + 5)
        bound = inside + EPS[turned.dtype] / 2 * (expected.abs() + inside)
        assert ((turned.double() - expected).abs() <= bound).all(), before


@given(layers(torch.float64))
@torch.no_grad()
def test_layers_do_not_see_where_positions_start(drawn: Drawn):
    y = drawn.layer(drawn.x)
    shifted, _ = drawn.layer.prefill(drawn.x, drawn.layer.start(2, drawn.start))
    # Products of pairs err by four roundings of each angle, at most 131,084 · 2⁻⁵².
    assert (shifted - y).abs().max() <= 1e-9 * max(1.0, y.abs().max())


@given(layers(torch.float64), st.data())
@torch.no_grad()
def test_some_positions_are_answered_as_among_all(drawn: Drawn, data: st.DataObject):
    few = st.lists(st.integers(0, drawn.x.shape[1] - 1), min_size=2, max_size=2)
    at = torch.tensor([data.draw(few), data.draw(few)])
    y = drawn.layer(drawn.x)
    some = y.gather(1, at[..., None].expand(-1, -1, D_MODEL))
    assert (drawn.layer(drawn.x, at) - some).abs().max() <= 1e-9 * max(1.0, y.abs().max())


@given(layers(torch.float64), st.data())
@torch.no_grad()
def test_a_carried_state_goes_on_at_its_position(drawn: Drawn, data: st.DataObject):
    cut = data.draw(st.integers(1, drawn.x.shape[1] - 1))
    whole, _ = drawn.layer.prefill(drawn.x, drawn.layer.start(2, drawn.start))
    head, state = drawn.layer.prefill(drawn.x[:, :cut], drawn.layer.start(2, drawn.start))
    assert state.position.tolist() == [drawn.start + cut] * 2
    tail, _ = drawn.layer.prefill(drawn.x[:, cut:], state)
    step, after = drawn.layer.step(drawn.x[:, cut], state)
    assert after.position.tolist() == [drawn.start + cut + 1] * 2
    rest, padding = whole[:, cut:], data.draw(st.integers(1, 3))
    padded = torch.cat([drawn.x[:, :1].expand(-1, padding, -1), drawn.x[:, cut:]], 1)
    keep = torch.arange(padded.shape[1]).expand(2, -1) >= padding
    behind, after = drawn.layer.prefill(padded, state, keep)
    assert after.position.tolist() == [drawn.start + drawn.x.shape[1]] * 2
    found = {"prefill": torch.cat([head, tail], 1), "step": step, "padded": behind[:, padding:]}
    expected = {"prefill": whole, "step": rest[:, 0], "padded": rest}
    for name, y in found.items():
        assert (y - expected[name]).abs().max() <= 1e-9 * max(1.0, whole.abs().max()), name


@given(layers(torch.float64))
@torch.no_grad()
def test_constant_content_is_toeplitz_in_the_layer_s_matrix(drawn: Drawn):
    layer, x = drawn.layer, drawn.x[:, :1].expand_as(drawn.x)
    if isinstance(layer, SSD):
        matrix = layer.matrix(x).tril(-1)
    else:
        # Weights are scores that each row normalises: differences of logs along a row are left.
        log = layer.matrix(x).clamp(min=1e-300).log()
        matrix = (log[..., 1:] - log[..., :-1]).tril(-1)
    same = matrix[..., 1:, 1:] - matrix[..., :-1, :-1]
    assert same.tril(-1).abs().max() <= 1e-9 * max(1.0, matrix.abs().max())
