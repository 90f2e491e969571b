"""Errata C1 to C5: the cross domain mixture of experts, as printed and as meant."""

import math

import pytest
import torch
from einops import einsum

from lab.layers.cdmoe import CDMoE
from lab.layers.printed import FloorSquareCDMoE
from lab.ops.product_keys import factor, product_topk
from tests.normal import draw_normal
from tests.paper.conftest import Run


def small(**options) -> CDMoE:
    sizes = {"n_experts": 12, "n_retrieval_heads": 2, "k": 3, "d_retrieval": 6, "d_ff": 5}
    torch.manual_seed(0)
    return CDMoE(8, **{**sizes, **options}).double()


def test_c1_printed_keys_address_a_root_of_the_experts(erratum: Run):
    h, side, d_retrieval = 2, 8, 6
    g = einsum(
        draw_normal(1, 4, h, d_retrieval),
        draw_normal(h, side, d_retrieval),
        "b t h r, h e r -> b t h e",
    )
    assert g.topk(1).indices.max() < side
    rows, columns = draw_normal(1, 4, h, side), draw_normal(1, 4, h, side, seed=1)
    reached = product_topk(rows, columns, side**2)[1][0, 0, 0].unique()
    assert reached.tolist() == list(range(side**2))
    found = erratum("C1")
    assert "8 of 64 experts" in found.printed_evidence


def test_c2_a_square_root_is_no_size(erratum: Run):
    with pytest.raises(TypeError, match="int"):
        torch.zeros(2, math.sqrt(1024), 2, 4)  # type: ignore[arg-type]
    layer = small(n_experts=1024)
    assert layer.row_keys.shape == layer.column_keys.shape == (2, 32, 3)
    found = erratum("C2")
    assert "name 'd_ff_private' is not defined" in found.printed_evidence
    assert "TypeError" in found.printed_evidence


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_c3_printed_experts_add_zero_and_only_keys_have_gradient(activation: str):
    layer, x = small(score="inside", key_init="zeros", activation=activation), draw_normal(4, 16, 8)
    assert torch.equal(layer(x), layer.cross_domain(x))
    layer(x).square().sum().backward()
    alive = {
        name
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }
    shared = {f"cross_domain.{name}.weight" for name in ("up", "down")}
    assert alive == shared | (set() if activation == "relu" else {"row_keys", "column_keys"})
    # Zero, not missing: every one of them has a path.
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_c3_normal_keys_outside_train_everything(erratum: Run):
    layer, x = small(), draw_normal(4, 16, 8)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    found = erratum("C3")
    assert "exactly 0" in found.printed_evidence


@pytest.mark.parametrize(("n_experts", "lost"), [(3072, 47), (8192, 92), (1024, 0)])
def test_c4_a_floored_square_loses_experts(n_experts: int, lost: int, erratum: Run):
    assert n_experts - math.floor(math.sqrt(n_experts)) ** 2 == lost
    rows, columns = factor(n_experts)
    assert rows * columns == n_experts
    side, other = FloorSquareCDMoE(4, n_experts=n_experts, k=1).shape
    assert side * other == n_experts - lost
    found = erratum("C4")
    assert "47 of 3072 and 92 of 8192" in found.printed_evidence


def test_c5_the_forms_differ_by_what_they_read_and_what_they_add():
    one, two, x = small(form="one"), small(form="two"), draw_normal(2, 5, 8)
    phi = two.cross_domain(x)
    # With up at zero the experts vanish: what is left is φ(x), in both forms.
    for layer in (one, two):
        layer.up.data.zero_()
        torch.testing.assert_close(layer(x), phi, rtol=0, atol=0)
    # Form two reads φ(x) alone: where φ(x) is zero, nothing comes out; form one still reads x.
    for layer in (one, two):
        layer.up.data.copy_(draw_normal(12, 8))
        layer.cross_domain.down.weight.data.zero_()
    assert not two(x).any()
    assert one(x).abs().max() > 0.1


def test_c5_a_gate_is_one_more_matrix():
    plain, gated = (sum(p.numel() for p in small(gated=g).parameters()) for g in (False, True))
    assert gated - plain == 8 * 5
