"""Errata D1 to D3: the dynamic mask, as printed and as meant."""

import pytest
import torch
from torch import nn

from lab.errata.mask import build_printed_mask
from lab.layers.attention import Attention, Mask
from lab.layers.printed import MaskAfterSoftmaxAttention
from lab.ops.attention import attend
from tests.normal import draw_normal
from tests.paper.conftest import Run


def test_d1_no_gradient_reaches_the_printed_mask():
    table = nn.Parameter(torch.ones(2, 7))
    bias = build_printed_mask(torch.ones(3, 7), table, 7, 7)
    assert not bias.requires_grad
    plain = torch.full((7, 7), -torch.inf).triu(1)
    assert torch.equal(bias, plain.expand(3, 2, 7, 7))
    masked = Attention(8, 2, mask="literal", max_seq_len=7).double()
    masked(draw_normal(3, 7, 8)).square().sum().backward()
    assert masked.mask is not None
    assert [p.grad for p in masked.mask.parameters()] == [None]
    # By the equation's product there is a gradient, and round makes it zero.
    (grad,) = torch.autograd.grad((table.round() * draw_normal(2, 7)).sum(), table)
    assert torch.equal(grad, torch.zeros(2, 7))


def test_d1_weight_decay_moves_a_gradient_of_zero_and_not_a_missing_one():
    listing = Attention(8, mask="literal", max_seq_len=7)
    equation = MaskAfterSoftmaxAttention(8, max_seq_len=7)
    assert listing.mask is not None
    for layer, table, left in (
        (listing, next(listing.mask.parameters()), 1.0),
        (equation, equation.l, 1 - 0.1 * 0.5),
    ):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
        layer(draw_normal(1, 7, 8).float()).square().sum().backward()
        optimizer.step()
        torch.testing.assert_close(table, torch.full_like(table, left))


@pytest.mark.parametrize("mask", ["straight-through", "soft", "value"])
def test_d1_every_other_reading_learns(mask: Mask):
    torch.manual_seed(0)
    layer = Attention(8, 2, mask=mask, max_seq_len=7).double()
    layer(draw_normal(3, 7, 8)).square().sum().backward()
    assert layer.mask is not None
    grads = [p.grad.abs().max().item() for p in layer.mask.parameters() if p.grad is not None]
    assert max(grads) > 1e-4


def test_d2_masked_after_the_softmax_rows_lose_weight_to_later_keys(erratum: Run):
    torch.manual_seed(0)
    layer = MaskAfterSoftmaxAttention(8, 2, max_seq_len=10).double()
    layer.l.data[0, 3] = 0.2
    x = draw_normal(2, 10, 8)
    q, k = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (layer.q, layer.k))
    positions = torch.arange(10)
    q, k = (layer.turn(y.transpose(1, 2), positions).transpose(1, 2) for y in (q, k))
    every = (q @ k.mT / 2).softmax(-1)
    M = layer.matrix(x)
    torch.testing.assert_close(M[:, 1], every[:, 1].tril())
    assert not M[:, 0, :, 3].any(), "l rounds to zero there"
    sums = M[:, 1].sum(-1)
    torch.testing.assert_close(sums[:, -1], torch.ones(2).double())
    assert sums[:, 0].max() < 0.7
    meant = Attention(8, 2).double().matrix(x).sum(-1)
    torch.testing.assert_close(meant, torch.ones_like(meant), rtol=0, atol=1e-14)
    found = erratum("D2")
    assert "not causal" in found.printed_evidence


def test_d3_one_query_sees_the_first_key_alone():
    one = build_printed_mask(torch.ones(1, 5), torch.ones(1, 5), 1, 5)[0, 0, 0]
    assert one.tolist() == [0.0] + 4 * [-torch.inf]
    k = draw_normal(1, 1, 5, 4)
    q, whole = k[:, :, -1:], attend(k, k, k)
    torch.testing.assert_close(attend(q, k, k), whole[:, :, -1:])
    assert (q @ k.mT + one).softmax(-1)[0, 0, 0].tolist() == [1, 0, 0, 0, 0]


def test_d3_left_padding_empties_rows():
    padding = torch.tensor([[0.0, 0, 0, 1, 1]])
    pattern = build_printed_mask(padding, torch.ones(1, 5), 5, 5).softmax(-1)[0, 0]
    assert pattern.isnan().any(-1).tolist() == [True, True, True, False, False]
    assert pattern[3:, :3].eq(0).all()
    layer, x = Attention(8, 2, mask="soft").double(), draw_normal(2, 5, 8)
    keep = torch.tensor([[False, False, False, True, True], [True] * 5])
    y = layer.prefill(x, keep=keep)[0]
    assert y.isfinite().all()
    torch.testing.assert_close(y[:1, 3:], layer(x[:1, 3:]))
    torch.testing.assert_close(y[1:], layer(x[1:]))


def test_d3_a_long_sequence_meets_a_short_table(unchecked, erratum: Run):
    with pytest.raises(RuntimeError, match="size of tensor"):
        build_printed_mask(torch.ones(1, 12), torch.ones(2, 9), 12, 12)
    with pytest.raises(ValueError, match="table of max_seq_len=9"):
        Attention(8, mask="literal", max_seq_len=9)(torch.ones(1, 12, 8))
    found = erratum("D3")
    assert "sees only [0]" in found.printed_evidence
    assert "2 rows NaN" in found.printed_evidence
