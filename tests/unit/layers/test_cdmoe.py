from itertools import product
from math import exp

import pytest
import torch
from torch.testing import assert_close

from lab.hooks import hook_points, hooks
from lab.layers.cdmoe import CDMoE
from lab.layers.mlp import ACTIVATIONS

FORMS, SCORES = ("one", "two"), ("inside", "outside", "raw")


def small(**options) -> CDMoE:
    """Return a seeded fp64 layer of 12 = 3 × 4 experts; options go before its sizes."""
    torch.manual_seed(0)
    sizes = {"n_experts": 12, "n_retrieval_heads": 2, "k": 3, "d_retrieval": 6, "d_ff": 5}
    return CDMoE(8, **{**sizes, **options}).double()


def draw_x(b=2, t=5, d=8):
    return torch.randn(b, t, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def looped(layer: CDMoE, x: torch.Tensor) -> torch.Tensor:
    """The layer one position, head and expert at a time, over all experts' scores."""
    shared = layer.cross_domain(x)
    rows, columns = layer.shape
    width = layer.row_keys.shape[-1]
    y = torch.empty_like(x)
    for i, j in product(*map(range, x.shape[:2])):
        z = x[i, j] if layer.form == "one" else shared[i, j]
        queries = layer.query(z).reshape(2, layer.n_retrieval_heads, width)
        y[i, j] = shared[i, j]
        for h in range(layer.n_retrieval_heads):
            score = {
                row * columns + column: float(
                    queries[0, h] @ layer.row_keys[h, row]
                    + queries[1, h] @ layer.column_keys[h, column]
                )
                for row, column in product(range(rows), range(columns))
            }
            chosen = sorted(score, key=score.__getitem__, reverse=True)[: layer.k]
            total = sum(exp(score[e]) for e in chosen)
            for e in chosen:
                affinity = z @ layer.down[e]
                weight = {
                    "inside": layer.activation(affinity * score[e]),
                    "outside": layer.activation(affinity) * exp(score[e]) / total,
                    "raw": layer.activation(affinity) * score[e],
                }[layer.score]
                y[i, j] += weight * layer.up[e]
    return y


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("activation", "gated"), [("silu", False), ("gelu", True)])
@torch.no_grad()
def test_equals_the_loop(form, score, activation, gated):
    layer = small(form=form, score=score, activation=activation, gated=gated)
    assert_close(layer(draw_x()), looped(layer, draw_x()))


KEYS = {"row_keys", "column_keys"}
TABLES = {"down", "up"}
DEAD_WITH_ZERO_KEYS = {
    ("inside", "silu"): {"query.weight"} | TABLES,
    ("inside", "gelu"): {"query.weight"} | TABLES,
    ("inside", "relu"): {"query.weight"} | TABLES | KEYS,
    ("outside", "silu"): {"query.weight"},
    ("outside", "gelu"): {"query.weight"},
    ("outside", "relu"): {"query.weight"},
    ("raw", "silu"): {"query.weight"} | TABLES,
    ("raw", "gelu"): {"query.weight"} | TABLES,
    ("raw", "relu"): {"query.weight"} | TABLES,
}
"""Erratum C3: which parameters get a gradient of exactly zero at the start."""


def dead_parameters(layer: CDMoE) -> set[str]:
    layer.zero_grad()
    layer(draw_x(4, 16)).square().sum().backward()
    dead = set()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if not parameter.grad.any():
            dead.add(name)
    return dead


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("score", "activation"), DEAD_WITH_ZERO_KEYS)
@pytest.mark.parametrize("key_init", ["normal", "zeros"])
def test_gradient_reach(form, score, activation, key_init):
    layer = small(form=form, score=score, activation=activation, key_init=key_init)
    expected = DEAD_WITH_ZERO_KEYS[score, activation] if key_init == "zeros" else set()
    assert dead_parameters(layer) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_printed_experts_add_nothing_at_the_start(form, activation):
    # Erratum C3.
    layer = small(form=form, score="inside", key_init="zeros", activation=activation)
    x = draw_x()
    assert_close(layer(x), layer.cross_domain(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("activation", "dead_later"), [("silu", set()), ("relu", {"query.weight"} | TABLES | KEYS)]
)
def test_the_printed_reading_wakes_up_only_where_the_slope_at_zero_is_not_zero(
    activation, dead_later
):
    layer = small(form="two", score="inside", key_init="zeros", activation=activation)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        dead_parameters(layer)
        optimizer.step()
    assert dead_parameters(layer) == dead_later


def test_one_softmaxed_expert_leaves_the_retrieval_untrained():
    assert dead_parameters(small(score="outside", k=1)) == {"query.weight"} | KEYS


def test_hook_points():
    layer, seen = small(), {}
    with hooks(layer, [(None, lambda tensor, point: seen.update({point.name: tensor}))]):
        layer(draw_x())
    assert seen.keys() == hook_points(layer).keys()
    assert {name: tuple(tensor.shape) for name, tensor in seen.items()} == {
        "hook_subkey_scores": (2, 5, 2, 3 + 4),
        "hook_expert_scores": (2, 5, 2, 3),
        "hook_expert_indices": (2, 5, 2, 3),
        "hook_expert_weights": (2, 5, 2, 3),
        "cross_domain.hook_pre": (2, 5, 5),
        "cross_domain.hook_post": (2, 5, 5),
    }
    assert seen["hook_expert_indices"].dtype == torch.int64
    rows, columns = seen["hook_subkey_scores"].split((3, 4), dim=-1)
    sums = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
    assert_close(sums.gather(-1, seen["hook_expert_indices"]), seen["hook_expert_scores"])


def test_replaced_subkey_scores_choose_the_experts():
    layer, chosen = small(), []

    def row_2_column_1(scores, point):
        return torch.zeros_like(scores).index_fill_(-1, torch.tensor([2, 3 + 1]), 1.0)

    with hooks(
        layer,
        [
            ("hook_subkey_scores", row_2_column_1),
            ("hook_expert_indices", lambda indices, _: chosen.append(indices)),
        ],
    ):
        layer(draw_x())
    assert (chosen[0][..., 0] == 2 * 4 + 1).all()


def test_replaced_indices_are_used():
    layer = small()
    with hooks(layer, [("hook_expert_indices", lambda indices, _: torch.full_like(indices, 7))]):
        layer(draw_x()).square().sum().backward()
    for table in (layer.down, layer.up):
        assert table.grad is not None
        assert table.grad.any(dim=1).nonzero().flatten().tolist() == [7]
