"""Errata I1 to I4: inner function attention, as printed and as meant."""

import pytest
import torch
from torch import Tensor, nn

from lab.layers.inner_function import InnerFunctionAttention, Retrieval
from lab.layers.printed import SoftSumAttention
from tests.normal import draw_normal
from tests.paper.conftest import Run


def retrieval_grads(layer: InnerFunctionAttention) -> list[Tensor | None]:
    layer(draw_normal(3, 9, 8)).square().sum().backward()
    return [layer.value_query.weight.grad, layer.value_keys.grad]


def test_i1_printed_retrieval_has_no_gradient_and_one_value(erratum: Run):
    layer = InnerFunctionAttention(8, retrieval="literal", key_init="zeros").double()
    assert retrieval_grads(layer) == [None, None]
    x = draw_normal(3, 9, 8, seed=1)
    per_channel = layer.values(x)[:, 0] / x
    torch.testing.assert_close(per_channel, per_channel[:1, :1].expand_as(x))
    # The tie itself, as the listing meets it.
    assert len(torch.zeros(3, 9, 16).topk(1).indices.unique()) == 1
    found = erratum("I1")
    assert "None" in found.printed_evidence


@pytest.mark.parametrize("retrieval", ["softmax", "sigmoid", "straight-through"])
def test_i1_every_other_retrieval_trains(retrieval: Retrieval):
    torch.manual_seed(0)
    for grad in retrieval_grads(InnerFunctionAttention(8, retrieval=retrieval).double()):
        assert grad is not None
        assert grad.abs().max() > 1e-3


@pytest.mark.parametrize(("n_heads", "n_values"), [(1, 2), (2, 6)])
def test_i2_rows_are_counted_by_values(n_heads: int, n_values: int, erratum: Run):
    with pytest.raises(IndexError, match="out of range"):
        nn.Embedding(n_heads, 8)(torch.tensor(n_values - 1))
    layer = InnerFunctionAttention(8, n_heads, n_values=n_values)
    assert layer.value_rows.shape == (n_values, 8)
    found = erratum("I2")
    # 320M: 12 heads, 6 values; 1.3B: 32 heads, 16 values.
    assert f"{12 - 6} and {32 - 16} are never read" in found.printed_evidence
    assert "a gradient reaches 6 and 16" in found.printed_evidence


def test_i3_the_equations_shapes_do_not_meet():
    scores, W_V = draw_normal(2, 5, 3), draw_normal(3, 8, seed=1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _ = scores @ W_V.T
    assert (scores @ W_V).shape == (2, 5, 8)


def test_i3_soft_sum_is_the_equation_without_its_transpose():
    torch.manual_seed(0)
    layer = SoftSumAttention(8, 2, n_values=3, d_retrieval=5).double()
    x = draw_normal(2, 4, 8)
    for b, t in [(b, t) for b in range(2) for t in range(4)]:
        scores = layer.value_keys @ (layer.value_query.weight @ x[b, t])
        right = sum(scores[i] * layer.value_rows[i] * x[b, t] for i in range(3))
        torch.testing.assert_close(layer.values(x)[b, :, t].flatten(), right)
    torch.testing.assert_close(layer.values(3 * x), 9 * layer.values(x))
    hard = InnerFunctionAttention(8, n_values=3, retrieval="straight-through").double()
    torch.testing.assert_close(hard.values(3 * x), 3 * hard.values(x))


def test_i4_both_widths_are_offered():
    with pytest.raises(RuntimeError, match="must match"):
        _ = torch.ones(128) * torch.ones(64)
    query = InnerFunctionAttention(128, d_retrieval=64)
    assert query.value_query.weight.shape == (64, 128)
    assert query.value_rows.shape == (2, 128)
    value = InnerFunctionAttention(128, value_map="linear", d_value=64)
    assert value.value_rows.shape == (2, 64)
    assert value.out.weight.shape == (128, 64)
    # The default is the table's, in which n_v · d_innerV = d_model in every row.
    for d_model, d_inner in ((32, 16), (64, 32), (128, 64), (256, 128)):
        layer = InnerFunctionAttention(d_model)
        assert layer.value_query.out_features == d_inner
        assert len(layer.value_rows) * layer.value_query.out_features == d_model
