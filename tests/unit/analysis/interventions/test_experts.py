"""Experts knocked out and transplanted: against loops, and undone bit for bit."""

import copy
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analysis.interventions import knock_out_experts, patch, transplant_experts
from lab.layers.cdmoe import CDMoE
from lab.layers.peer import PEER
from lab.layers.routed import RoutedMoE, SharedExpertMoE
from lab.models import Block, LanguageModel
from tests.intervened import TOKENS, every_experts, experts, stack


def loop_experts(mlp: nn.Module, x: Tensor, out: set[int]) -> Tensor:
    """Return what is left of a layer of experts [b t d], one choice at a time."""
    seen: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name in ("expert_indices", "expert_weights"):

            def look(point, args, tensor, name=name):
                seen[name] = tensor

            hooks.callback(getattr(mlp, f"hook_{name}").register_forward_hook(look).remove)
        mlp(x)
    y = torch.zeros_like(x)
    if isinstance(mlp, CDMoE):
        y += mlp.cross_domain(x)
    if isinstance(mlp, SharedExpertMoE):
        y += mlp.shared(x)
    for index in np.ndindex(*seen["expert_indices"].shape):
        expert, weight = int(seen["expert_indices"][index]), seen["expert_weights"][index]
        if expert in out:
            continue
        token = x[index[:2]]
        if isinstance(mlp, RoutedMoE):
            hidden = mlp.activation(token @ (mlp.up if mlp.gate is None else mlp.gate)[expert])
            if mlp.gate is not None:
                hidden = hidden * (token @ mlp.up[expert])
            y[index[:2]] += weight * (hidden @ mlp.down[expert])
        else:
            assert isinstance(mlp, CDMoE | PEER)
            y[index[:2]] += weight * mlp.up[expert]
    return y


def transformed(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """Return what the first block's MLP is given, and what it makes of it."""
    names = [f"blocks.0.hook_resid_{x}" for x in ("mid", "post")]
    _, cache = model.run_with_cache(TOKENS, names)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.norm_mlp is not None
    return block.norm_mlp(cache[names[0]]), cache[names[1]] - cache[names[0]]


@every_experts
@torch.no_grad()
def test_experts_that_are_knocked_out_add_nothing(kind):
    mlp = experts(kind)
    model = stack(mlps=(mlp,))
    x, plain = transformed(model)
    torch.testing.assert_close(plain, loop_experts(mlp, x, set()), rtol=1e-10, atol=1e-10)
    expected = loop_experts(mlp, x, {0, 1, 3})
    assert not torch.allclose(expected, plain)
    with knock_out_experts(model, 0, [1, 3]), knock_out_experts(model, 0, [0]):
        torch.testing.assert_close(transformed(model)[1], expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(transformed(model)[1], plain)


@torch.no_grad()
def test_a_knock_out_is_of_who_is_chosen_in_the_end():
    """Also where an inner hook chooses others."""
    mlp = experts("peer")
    model = stack(mlps=(mlp,))
    names = [f"blocks.0.mlp.hook_expert_{x}" for x in ("indices", "weights")]
    everyone = torch.full((3, 9, 2, 3), 5)
    with knock_out_experts(model, 0, [5]), patch(model, names[0], everyone):
        _, cache = model.run_with_cache(TOKENS, names[1])
    assert (cache[names[1]] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("one", [3, np.int64(3)])
def test_one_expert_may_be_named_by_its_number(one):
    model = stack(mlps=(experts("peer"),))
    with knock_out_experts(model, 0, [3]):
        expected = model(TOKENS)
    with knock_out_experts(model, 0, one):
        assert torch.equal(model(TOKENS), expected)
    giver = stack(mlps=(experts("peer", seed=3),))
    with transplant_experts(giver, model, 0, [3], into=[1]):
        expected = model(TOKENS)
    with transplant_experts(giver, model, 0, one, into=1):
        assert torch.equal(model(TOKENS), expected)
    with pytest.raises(ValueError, match="experts holds 99, must be below"):
        knock_out_experts(model, 0, 99).__enter__()


@every_experts
@torch.no_grad()
def test_transplanted_experts_compute_what_they_did(kind):
    """The taker computes as a copy does whose rows were set one by one; the tables come back."""
    giver, taker = (stack(mlps=(experts(kind, seed=seed),)) for seed in (2, 3))
    before = copy.deepcopy(taker.state_dict())
    plain = taker(TOKENS)
    by_hand = copy.deepcopy(taker)
    tables = [
        name
        for name in ("down", "up", "gate")
        if getattr(giver.blocks[0].mlp, name, None) is not None
    ]
    for expert, slot in ((0, 2), (3, 0)):
        for name in tables:
            getattr(by_hand.blocks[0].mlp, name)[slot] = getattr(giver.blocks[0].mlp, name)[expert]
    with transplant_experts(giver, taker, 0, [0, 3], into=[2, 0]) as model:
        assert model is taker
        assert torch.equal(taker(TOKENS), by_hand(TOKENS))
    assert not torch.equal(by_hand(TOKENS), plain)
    with (
        pytest.raises(RuntimeError, match="stop"),
        transplant_experts(giver, taker, 0, [1]),
        transplant_experts(giver, taker, 0, [2, 3], into=[1, 2]),
    ):
        raise RuntimeError("stop")
    assert all(torch.equal(a, before[name]) for name, a in taker.state_dict().items())


@torch.no_grad()
def test_experts_can_change_places_within_a_model():
    mlp = experts("cdmoe")
    model = stack(mlps=(mlp,))
    up = mlp.get_parameter("up").clone()
    with transplant_experts(model, model, 0, [0, 1], into=[1, 0]):
        assert torch.equal(mlp.get_parameter("up")[:2], up[[1, 0]])
    assert torch.equal(mlp.get_parameter("up"), up)
