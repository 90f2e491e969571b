"""PEER and CDMoE against PEER-pytorch 0.2.2, with its weights: values and gradients."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lab.bench.experts import PeerCDMoE, pair_parameters, take_weights
from lab.layers.cdmoe import CDMoE
from lab.layers.peer import PEER
from lab.peers import load

D_MODEL, N_EXPERTS, HEADS, D_HALF = 12, 36, 3, 5
OURS: dict[str, Any] = {
    "n_experts": N_EXPERTS,
    "n_retrieval_heads": HEADS,
    "d_retrieval": 2 * D_HALF,
}


def theirs(**options) -> nn.Module:
    """Return their layer in fp64, its keys spread out, so that experts differ in score."""
    torch.manual_seed(0)
    sizes = {"heads": HEADS, "num_experts": N_EXPERTS, "dim_key": D_HALF}
    layer = load("PEER_pytorch.PEER").PEER(D_MODEL, **sizes, **options).double()
    with torch.no_grad():
        layer.keys.normal_()
    return layer


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_same(ours: nn.Module, other: nn.Module, peer: nn.Module) -> None:
    """Hold values and all gradients to each other; `peer` is PEER-pytorch's part of the other."""
    x = torch.randn(2, 17, D_MODEL, dtype=torch.float64)
    results = []
    for layer in (ours, other):
        entered = x.clone().requires_grad_()
        y = layer(entered)
        y.square().sum().backward()
        results.append((y, entered.grad))
    assert_close(*results)
    for mine, given in pair_parameters(gradients(ours), gradients(peer)):
        assert_close(mine, given)


@pytest.mark.parametrize("backend", ["gather", "dense"])
@pytest.mark.parametrize(
    ("their_options", "our_options"),
    [
        ({"num_experts_per_head": 4, "non_competing_scores": False}, {"k": 4}),
        # Non-competing, their default: one expert a head, whatever num_experts_per_head says.
        ({"num_experts_per_head": 4}, {"k": 1, "score_activation": "relu"}),
        ({"num_experts_per_head": 1}, {"k": 1, "score_activation": "relu"}),
    ],
)
def test_peer(their_options, our_options, backend):
    peer = theirs(**their_options)
    layer = PEER(D_MODEL, **OURS, backend=backend, **our_options).double()
    take_weights(layer, peer)
    assert_same(layer, peer, peer)


@pytest.mark.parametrize("backend", ["gather", "dense"])
def test_cdmoe_is_their_layer_behind_a_shared_mlp(backend):
    peer = theirs(num_experts_per_head=4, non_competing_scores=False)
    layer = CDMoE(D_MODEL, **OURS, k=4, activation="gelu", backend=backend).double()
    take_weights(layer, peer)
    assert_same(layer, PeerCDMoE(layer.cross_domain, peer), peer)


def test_they_need_a_square_number_of_experts_and_we_a_product():
    with pytest.raises(AssertionError, match="needs to be a square"):
        load("PEER_pytorch.PEER").PEER(D_MODEL, num_experts=3072)
    assert PEER(D_MODEL, n_experts=3072).shape == (48, 64)
