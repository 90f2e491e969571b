"""The dynamic mask: what each reading computes, and where its gradient goes."""

import pytest
import torch
from torch import nn

from lab.layers.attention import Attention, Mask
from lab.layers.mask import (
    LiteralMask,
    OracleMask,
    SoftMask,
    StraightThroughMask,
    ValueMask,
    reveal_stored,
)
from lab.ops.attention import MASKED
from tests.normal import draw_normal


def attention_pair(mask: Mask, max_seq_len: int = 64) -> tuple[Attention, Attention]:
    """An attention with a mask, and one without of the same weights."""
    masked, plain = Attention(8, 2, mask=mask, max_seq_len=max_seq_len), Attention(8, 2)
    plain.load_state_dict({n: p for n, p in masked.state_dict().items() if "mask" not in n})
    return masked.double(), plain.double()


@pytest.mark.parametrize("mask", ["literal", "straight-through", "soft", "value"])
def test_every_mask_starts_as_plain_causal_attention(mask: Mask):
    masked, plain = attention_pair(mask)
    x = draw_normal(2, 20, 8)
    torch.testing.assert_close(masked(x), plain(x), rtol=0, atol=1e-12)


def test_printed_mask_stays_plain_causal_attention():
    """Erratum D1: no gradient reaches l, so training moves everything else and never the mask."""
    masked, plain = attention_pair("literal")
    x, target = draw_normal(2, 20, 8), draw_normal(2, 20, 8, seed=1)
    for layer in (masked, plain):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            (layer(x) - target).square().mean().backward()
            optimizer.step()
    assert isinstance(masked.mask, LiteralMask)
    assert masked.mask.l.grad is None
    assert torch.equal(masked.mask.l, torch.ones_like(masked.mask.l))
    torch.testing.assert_close(masked(x), plain(x), rtol=0, atol=1e-12)


def test_literal_mask_removes_keys_that_round_to_zero():
    mask = LiteralMask(1, 4, 6).double()
    mask.l.data = torch.tensor([[1.0, 0.5, 0.51, -0.3, -0.7, 0.0]])
    bias = mask(draw_normal(3, 1, 6, 4), torch.arange(6))
    assert bias.shape == (3, 1, 6)
    assert bias[2, 0].tolist() == [0, MASKED, 0, MASKED, 0, MASKED]


def test_straight_through_hands_on_the_biass_gradient():
    masked, _ = attention_pair("straight-through", max_seq_len=10)
    assert isinstance(masked.mask, StraightThroughMask)
    masked.mask.l.data[:, 3] = 0.2
    x, against = draw_normal(2, 10, 8), draw_normal(2, 10, 8, seed=1)
    (masked(x) * against).sum().backward()
    found = masked.mask.l.grad
    assert found is not None
    # The same layer with the bias itself a leaf.
    bias = masked.mask(draw_normal(2, 2, 10, 4), torch.arange(10)).detach().requires_grad_()
    q, k = masked._project_and_rotate(x, torch.arange(10))
    z = masked._pattern(q, k, bias) @ masked.values(x)
    (right,) = torch.autograd.grad((masked.project(x, z) * against).sum(), bias)
    torch.testing.assert_close(found, right.sum(dim=0), rtol=0, atol=1e-12)
    assert not found[:, 3].any(), "a masked key has no attention and gets no gradient"
    assert found[:, [0, 1, 2, 4]].all()


def test_soft_mask_weighs_attention_by_sigma():
    masked, plain = attention_pair("soft", max_seq_len=12)
    assert isinstance(masked.mask, SoftMask)
    masked.mask.l.data = draw_normal(2, 12, seed=2)
    x = draw_normal(2, 12, 8)
    weighed = plain.matrix(x) * masked.mask.l.sigmoid()[None, :, None, :]
    weighed = weighed / weighed.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(masked.matrix(x), weighed, rtol=0, atol=1e-12)


def test_soft_mask_stays_above_padding():
    mask = SoftMask(1, 4, 3).double()
    mask.l.data = torch.tensor([[-1e6, -3000.0, -1.0]], dtype=torch.float64)
    bias = mask(draw_normal(1, 1, 3, 4), torch.arange(3))[0, 0]
    assert bias[:2].tolist() == [MASKED, MASKED]
    assert MASKED < bias[2] < 0
    layer = Attention(8, mask="soft", max_seq_len=8).double()
    layer.get_parameter("mask.l").data.fill_(-3000.0)
    x, left = draw_normal(1, 4, 8), torch.tensor([[False, False, True, True]])
    padded = layer.prefill(x, keep=left)[0][:, 2:]
    torch.testing.assert_close(padded, layer(x[:, 2:]), rtol=0, atol=1e-11)


def test_value_mask_formula():
    mask = ValueMask(2, 4, 99).double()
    mask.A.data = torch.tensor([-0.5, 0.25], dtype=torch.float64)
    v = draw_normal(1, 2, 5, 4)
    found = mask(v, torch.arange(5))
    flat = torch.cat([v[0, 0], v[0, 1]], dim=-1)
    for h in range(2):
        dt = (1 + (flat @ mask.dt.weight[h]).exp()).log()
        torch.testing.assert_close(found[0, h], (mask.A[h] * dt).exp())


def test_oracle_mask_is_deleting_the_other_keys():
    masked, plain = attention_pair("oracle")
    x, keep = draw_normal(2, 12, 8), draw_normal(2, 12, seed=1) > 0
    keep[:, 0] = True
    with reveal_stored(masked, keep):
        y, matrix = masked(x), masked.matrix(x)
    weighed = plain.matrix(x) * keep[:, None, None, :]
    weighed = weighed / weighed.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(matrix, weighed, rtol=0, atol=1e-12)
    torch.testing.assert_close(y, plain.project(x, weighed @ plain.values(x)), rtol=0, atol=1e-12)


def test_stored_is_undone():
    layer, x = Attention(8, mask="oracle"), torch.ones(1, 4, 8)
    mask, keep = layer.mask, torch.ones(1, 4, dtype=torch.bool)
    assert isinstance(mask, OracleMask)
    with reveal_stored(nn.Sequential(layer), keep):
        with reveal_stored(layer, ~keep):
            layer(x)
        assert mask.keep is keep
    short = "position 3 is beyond the 3 positions of keep"
    with pytest.raises(ValueError, match=short), reveal_stored(layer, keep[:, :3]):
        layer(x)
    other = "keep has a batch of 2, must have 1"
    with pytest.raises(ValueError, match=other), reveal_stored(layer, keep.expand(2, 4)):
        layer(x)
    assert mask.keep is None
    with pytest.raises(ValueError, match="inside `with reveal_stored"):
        layer(x)
    with (
        pytest.raises(ValueError, match="has no oracle mask"),
        reveal_stored(nn.Linear(2, 2), keep),
    ):
        pass


@pytest.mark.parametrize("mask", ["literal", "straight-through", "soft"])
def test_a_sequence_past_the_table_is_an_error(mask: Mask):
    """Erratum D3: as printed it fails inside an addition of shapes."""
    layer = Attention(8, mask=mask, max_seq_len=5)
    assert layer(torch.ones(1, 5, 8)).shape == (1, 5, 8)
    with pytest.raises(ValueError, match="position 5 is beyond the mask's table of max_seq_len=5"):
        layer(torch.ones(1, 6, 8))


@pytest.mark.parametrize("mask", ["literal", "straight-through", "soft"])
def test_a_table_is_read_where_keys_stand(mask: Mask):
    layer = Attention(8, 2, mask=mask, max_seq_len=7).double().mask
    assert layer is not None
    layer.get_parameter("l").data = draw_normal(2, 7)
    v, positions = draw_normal(2, 2, 3, 4), torch.tensor([[4, 5, 6], [0, 0, 1]])
    whole = layer(draw_normal(2, 2, 7, 4), torch.arange(7))
    found = layer(v, positions)
    for row in range(2):
        assert torch.equal(found[row], whole[row][:, positions[row]])
    with pytest.raises(ValueError, match="position 7 is beyond the mask's table of max_seq_len=7"):
        layer(v, positions + 1)


def test_the_oracle_is_told_of_positions():
    mask, keep = OracleMask(2, 4, 7), draw_normal(2, 7) > 0
    positions = torch.tensor([[4, 5, 6], [0, 0, 1]])
    with reveal_stored(mask, keep):
        found = mask(draw_normal(2, 2, 3, 4), positions)
        with pytest.raises(ValueError, match="position 7 is beyond the 7 positions of keep"):
            mask(draw_normal(2, 2, 3, 4), positions + 1)
    for row in range(2):
        assert torch.equal(found[row, 1] == 0, keep[row, positions[row]])
