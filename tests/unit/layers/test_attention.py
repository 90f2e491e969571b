"""The attention layer: torch's own, grouped heads, positions, hooks, what is refused."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.hooks import hook_points, hooks, run_with_cache
from lab.layers.attention import Attention, Mask, Position
from lab.layers.mask import reveal_stored
from lab.ops.attention import MASKED, attention_pattern
from lab.ops.rope import rotate
from lab.ops.top_keys import top_keys
from tests.normal import draw_normal


def test_the_layer_is_torchs_attention():
    layer, x = Attention(12, 3, position="none").double(), draw_normal(2, 10, 12)
    q, k, v = (m(x).view(2, 10, 3, 4).transpose(1, 2) for m in (layer.q, layer.k, layer.v))
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(layer(x), layer.out(z.transpose(1, 2).reshape(2, 10, 12)))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "value"])
def test_grouped_heads_are_repeated_ones(mask: Mask, n_kv_heads: int):
    """Query head i reads key head i // (4 / n_kv_heads): an attention of repeated weights."""
    layer = Attention(
        16, 4, n_kv_heads=n_kv_heads, mask=mask, window=3 if mask == "value" else None
    )
    assert layer.k.weight.shape == (4 * n_kv_heads, 16)
    layer, x = layer.double(), draw_normal(2, 9, 16)
    z = []
    q = layer.q(x).unflatten(-1, (4, 4))
    k, v = (f(x).unflatten(-1, (n_kv_heads, 4)) for f in (layer.k, layer.v))
    bias = draw_normal(2, n_kv_heads, 9)
    if layer.mask is not None:
        nn.init.ones_(layer.get_parameter("mask.A"))
        bias = layer.mask(v.transpose(1, 2), torch.arange(9))
        assert bias.shape == (2, n_kv_heads, 9)
    for i in range(4):
        j = i // (4 // n_kv_heads)
        turned_q, turned_k = (rotate(y, torch.arange(9)).transpose(1, 2) for y in (q, k))
        key_bias = None if layer.mask is None else bias[:, [j]]
        keep = None if layer.mask is None else top_keys(bias[:, [j]], 3, 9)
        pattern = attention_pattern(turned_q[:, [i]], turned_k[:, [j]], key_bias, keep)
        z.append(pattern @ v[:, :, j][:, None])
    right = layer.out(torch.cat(z, dim=1).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), right, rtol=0, atol=1e-12)
    applied = layer.project(x, layer.matrix(x) @ layer.values(x))
    torch.testing.assert_close(applied, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "rows", [slice(0, 5), slice(4, 9), slice(6, 7), slice(9, None), slice(3, 3)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position": "none", "n_kv_heads": 1},
        {"rope_layout": "interleaved", "d_value": 8},
        {"mask": "value", "n_kv_heads": 2, "window": 3},
        {"mask": "value", "window": 1},
        {"mask": "soft", "window": 4},
        {"mask": "straight-through"},
        {"mask": "literal"},
        {"mask": "oracle"},
    ],
    ids=str,
)
def test_some_rows_of_the_matrix_are_those_of_the_whole(options: dict, rows: slice):
    layer, x = Attention(16, 4, **options).double(), draw_normal(2, 13, 16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    keep = torch.arange(13) % 3 != torch.tensor([[0], [1]])
    with reveal_stored(layer, keep) if options.get("mask") == "oracle" else nullcontext():
        some, whole = layer.matrix(x, rows=rows), layer.matrix(x)
    torch.testing.assert_close(some, whole[:, :, rows], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("position", "same"), [("none", True), ("rope", False)])
def test_without_positions_the_past_is_a_set(position: Position, same: bool):
    layer, x = Attention(8, 2, position=position).double(), draw_normal(1, 6, 8)
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    assert torch.allclose(layer(x)[:, 2:], layer(swapped)[:, 2:], atol=1e-12) == same


HOOKS = {
    "hook_q": (2, 7, 2, 4),
    "hook_k": (2, 7, 2, 4),
    "hook_v": (2, 7, 2, 4),
    "hook_rot_q": (2, 7, 2, 4),
    "hook_rot_k": (2, 7, 2, 4),
    "hook_dynamic_mask": (2, 2, 1, 7),
    "hook_attn_scores": (2, 2, 7, 7),
    "hook_pattern": (2, 2, 7, 7),
    "hook_z": (2, 7, 2, 4),
}


@pytest.mark.parametrize("mask", ["none", "soft", "value"])
def test_hooks_see_every_tensor_and_change_nothing(mask: Mask):
    layer, x = Attention(8, 2, mask=mask).double(), draw_normal(2, 7, 8)
    y, cache = run_with_cache(layer, x)
    assert {name: tuple(tensor.shape) for name, tensor in cache.items()} == HOOKS
    torch.testing.assert_close(y, layer(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(cache["hook_pattern"], layer.matrix(x), rtol=0, atol=0)
    assert set(hook_points(layer)) == set(HOOKS)


@pytest.mark.parametrize("name", list(HOOKS))
def test_a_replacement_has_effect(name: str):
    layer, x = Attention(8, 2, mask="value").double(), draw_normal(2, 7, 8)
    nn.init.ones_(layer.get_parameter("mask.A"))
    with hooks(layer, [(name, lambda tensor, _: tensor.roll(1, dims=-1).nan_to_num(neginf=0.0))]):
        changed = layer(x)
    assert (changed - layer(x)).abs().max() > 1e-4


def test_a_hook_puts_a_mask_on_any_attention():
    layer, x = Attention(8, 2).double(), draw_normal(2, 7, 8)

    def remove_third(bias: Tensor, _: object) -> Tensor:
        bias = bias.clone()
        bias[..., 2] = MASKED
        return bias

    with hooks(layer, [("hook_dynamic_mask", remove_third)]):
        assert not layer.matrix(x)[..., 3:, 2].any()
        fast = layer(x)
        explicit = layer.project(x, layer.matrix(x) @ layer.values(x))
    torch.testing.assert_close(fast, explicit, rtol=0, atol=1e-12)
