"""Causal attention: the folded bias is the explicit one, and the layer shows what it computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.hooks import hook_points, hooks, run_with_cache
from lab.layers.attention import Attention, Mask, Position
from lab.layers.mask import stored
from lab.ops.attention import (
    MASKED,
    attend,
    attention_pattern,
    attention_scores,
    causal_keep,
    top_keys,
)
from lab.ops.rope import Layout


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(t: int, s: int, p: int, p_v: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a bias with some keys masked."""
    q, k, v = drawn(2, 3, t, p), drawn(2, 3, s, p, seed=1), drawn(2, 3, s, p_v, seed=2)
    bias = drawn(2, 3, s, seed=3)
    return q, k, v, torch.where(bias > 0.7, MASKED, bias)


@pytest.mark.parametrize(
    ("biased", "window"), [(False, None), (True, None), (True, 1), (True, 3), (True, 50)]
)
@pytest.mark.parametrize(
    ("t", "s", "p", "p_v"), [(17, 17, 6, 6), (17, 17, 3, 11), (5, 17, 8, 4), (1, 9, 4, 4)]
)
def test_attend_is_the_explicit_form(
    t: int, s: int, p: int, p_v: int, biased: bool, window: int | None
):
    leaves = [x.requires_grad_() for x in inputs(t, s, p, p_v)]
    q, k, v, bias = leaves
    fast = attend(q, k, v, bias if biased else None, window)
    keep = None if window is None else top_keys(bias, window, t)
    slow = attention_pattern(q, k, bias if biased else None, keep) @ v
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    against, used = drawn(*fast.shape, seed=4), leaves if biased else leaves[:3]
    for mine, right in zip(
        torch.autograd.grad(fast, used, against),
        torch.autograd.grad(slow, used, against),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-11)


def test_bf16_keeps_the_bias_to_16_bits():
    """Within bf16's rounding of weights and output, which one bf16 column would not be.

    Weights and output are each rounded once (u = 2^-9); the low column moves a score by at most
    2^-17 of the largest bias, 0.0003 here: |Δ| ≤ (2·2^-9 + 2·0.0003) max|v| < 2^-7 max|v|.
    """
    q, k, v, bias = (x.bfloat16() for x in inputs(64, 64, 16, 16))
    bias = -40 + bias.double().clamp(-3, 3) / 7
    right = attention_pattern(q.double(), k.double(), bias) @ v.double()
    bound = 2**-7 * v.double().abs().max().item()
    assert (attend(q, k, v, bias).double() - right).abs().max() < bound
    coarse = (bias * 4).bfloat16().double() / 4
    assert (attend(q, k, v, coarse).double() - right).abs().max() > bound


def test_autocast_does_not_lose_the_low_column():
    q, k, v, bias = inputs(32, 32, 16, 16)
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    bias = (-40 + bias.clamp(-3, 3) / 7).float()
    right = attention_pattern(q, k, bias) @ v
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = attend(q, k, v, bias).float()
    assert (fast - right).abs().max() < 2**-7 * v.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_keys_weigh_exactly_nothing(dtype: torch.dtype):
    q, k, v, bias = (x.to(dtype) for x in inputs(12, 12, 4, 4))
    bias[..., 0] = 0
    masked = bias == MASKED
    assert masked.any()
    leaked = v.masked_fill(masked[..., None], 1e6)
    assert torch.equal(attend(q, k, leaked, bias), attend(q, k, v, bias))
    pattern = attention_pattern(q, k, bias)
    assert not pattern.mT[masked].any()
    row = (0, 1)
    kept = ~masked[row]
    alone = (q[row][-1] @ k[row][kept].T / 2 + bias[row][kept]).softmax(-1) @ v[row][kept]
    torch.testing.assert_close(attend(q, k, v, bias)[row][-1], alone)


def test_empty_rows_are_plain_causal_attention():
    """Erratum D3: a row whose every key is masked is finite, and so is its gradient."""
    q, k, v, _ = inputs(12, 12, 4, 4)
    bias = torch.full((2, 3, 12), MASKED, dtype=torch.float64)
    plain = attend(q, k, v)
    torch.testing.assert_close(attend(q, k, v, bias), plain, rtol=0, atol=1e-11)
    bias[..., 7:] = 0
    fast = attend(q.requires_grad_(), k, v, bias)
    torch.testing.assert_close(fast[..., :7, :], plain[..., :7, :], rtol=0, atol=1e-11)
    fast.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    none = torch.zeros(12, 12, dtype=torch.bool)
    assert torch.equal(attention_pattern(q, k, keep=none), attention_pattern(q, k))


def test_one_query_reads_every_key():
    """Erratum D3: decoding, the last query stands at the last key."""
    q, k, v, bias = inputs(9, 9, 4, 4)
    last = attend(q[..., -1:, :], k, v, bias)
    torch.testing.assert_close(last, attend(q, k, v, bias)[..., -1:, :], rtol=0, atol=1e-12)
    scores = attention_scores(q[..., -1:, :], k)
    assert scores.isfinite().all()
    with pytest.raises(ValueError, match="n_queries=3 must be at most n_keys=2"):
        causal_keep(3, 2, torch.device("cpu"))


@pytest.mark.parametrize("window", [1, 2, 5, 20])
def test_window_keeps_the_best_of_each_querys_past(window: int):
    bias = (drawn(2, 2, 14) * 2).round()  # with ties
    keep = top_keys(bias, window, 14)
    for b, h, t in [(b, h, t) for b in range(2) for h in range(2) for t in range(14)]:
        past = sorted(range(t + 1), key=lambda s: (bias[b, h, s].item(), s))
        assert keep[b, h, t].nonzero().flatten().tolist() == sorted(past[-window:])


def test_window_over_a_constant_bias_slides():
    keep = top_keys(torch.ones(1, 1, 9), 3, 9)[0, 0]
    assert torch.equal(
        keep, torch.ones(9, 9, dtype=torch.bool).tril() & ~keep.new_ones(9, 9).tril(-3)
    )


def test_the_layer_is_torchs_attention():
    layer, x = Attention(12, 3, position="none").double(), drawn(2, 10, 12)
    q, k, v = (m(x).view(2, 10, 3, 4).transpose(1, 2) for m in (layer.q, layer.k, layer.v))
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(layer(x), layer.out(z.transpose(1, 2).reshape(2, 10, 12)))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_shifting_positions_changes_nothing(layout: Layout):
    """Rotary positions are relative: behind seven keys that a mask removes, the same output."""
    shifted = Attention(8, 2, mask="oracle", rope_layout=layout, rope_base=50.0).double()
    x = drawn(2, 9, 8)
    longer = torch.cat([drawn(2, 7, 8, seed=1), x], dim=1)
    keep = (torch.arange(16) >= 7).expand(2, 16)
    with stored(shifted, keep):
        later = shifted(longer)[:, 7:]
        # Control: keys alone moved by one position.
        slip = ("hook_rot_k", lambda k, _: k.roll(1, dims=1))
        with hooks(shifted, [slip]):
            wrong = shifted(longer)[:, 7:]
    with stored(shifted, keep[:, 7:]):
        here = shifted(x)
    torch.testing.assert_close(later, here, rtol=0, atol=1e-12)
    assert (wrong - here).abs().max() > 1e-3


@pytest.mark.parametrize(("position", "same"), [("none", True), ("rope", False)])
def test_without_positions_the_past_is_a_set(position: Position, same: bool):
    layer, x = Attention(8, 2, position=position).double(), drawn(1, 6, 8)
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
    layer, x = Attention(8, 2, mask=mask).double(), drawn(2, 7, 8)
    y, cache = run_with_cache(layer, x)
    assert {name: tuple(tensor.shape) for name, tensor in cache.items()} == HOOKS
    torch.testing.assert_close(y, layer(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(cache["hook_pattern"], layer.matrix(x), rtol=0, atol=0)
    assert set(hook_points(layer)) == set(HOOKS)


@pytest.mark.parametrize("name", list(HOOKS))
def test_a_replacement_has_effect(name: str):
    layer, x = Attention(8, 2, mask="value").double(), drawn(2, 7, 8)
    nn.init.ones_(layer.get_parameter("mask.A"))
    with hooks(layer, [(name, lambda tensor, _: tensor.roll(1, dims=-1).nan_to_num(neginf=0.0))]):
        changed = layer(x)
    assert (changed - layer(x)).abs().max() > 1e-4


def test_a_hook_puts_a_mask_on_any_attention():
    layer, x = Attention(8, 2).double(), drawn(2, 7, 8)

    def remove_third(bias: Tensor, _: object) -> Tensor:
        bias = bias.clone()
        bias[..., 2] = MASKED
        return bias

    with hooks(layer, [("hook_dynamic_mask", remove_third)]):
        assert not layer.matrix(x)[..., 3:, 2].any()
        fast = layer(x)
        explicit = layer.project(x, layer.matrix(x) @ layer.values(x))
    torch.testing.assert_close(fast, explicit, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 9, "n_heads": 2}, "d_model=9 must be a positive multiple of n_heads=2"),
        ({"d_model": 8, "n_heads": 0}, "n_heads=0"),
        ({"d_model": 8, "n_heads": 2, "d_value": 3}, "d_value=3 must be a positive multiple"),
        ({"d_model": 9, "n_heads": 3}, "must be even for position='rope'"),
        ({"d_model": 8, "position": "alibi"}, "position='alibi' must be one of rope, none"),
        ({"d_model": 8, "rope_layout": "thirds"}, "must be one of half, interleaved"),
        ({"d_model": 8, "mask": "hard"}, "must be one of none, literal, straight-through, soft"),
        ({"d_model": 8, "window": 4}, "window=4 needs a mask"),
        ({"d_model": 8, "mask": "value", "window": 0}, "window=0 must be at least 1"),
    ],
)
def test_errors_name_field_value_and_bound(unchecked, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Attention(**options)


def test_a_window_needs_a_bias():
    q, k, v, _ = inputs(4, 4, 4, 4)
    with pytest.raises(ValueError, match="window=2 needs key_bias"):
        attend(q, k, v, window=2)
