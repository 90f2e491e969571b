from itertools import product

import pytest
import torch
from torch.testing import assert_close

from lab.layers.mlp import ACTIVATIONS
from lab.layers.peer import PEER, SCORE_ACTIVATIONS

each_gate = pytest.mark.parametrize("score_activation", SCORE_ACTIVATIONS)


def small(**options) -> PEER:
    """Return a seeded fp64 layer of 12 = 3 × 4 experts."""
    torch.manual_seed(0)
    sizes = {"n_experts": 12, "n_retrieval_heads": 2, "k": 3, "d_retrieval": 6}
    return PEER(8, **{**sizes, **options}).double()


def draw_x(b=2, t=5, d=8):
    return torch.randn(b, t, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def looped(layer: PEER, x: torch.Tensor) -> torch.Tensor:
    """The layer one position, head and expert at a time, over all experts' scores."""
    rows, columns = layer.shape
    y = torch.zeros_like(x)
    for i, j in product(*map(range, x.shape[:2])):
        queries = layer.query(x[i, j]).reshape(2, layer.n_retrieval_heads, -1)
        for h in range(layer.n_retrieval_heads):
            scores = torch.stack(
                [
                    queries[0, h] @ layer.row_keys[h, row]
                    + queries[1, h] @ layer.column_keys[h, column]
                    for row, column in product(range(rows), range(columns))
                ]
            )
            chosen = scores.argsort(descending=True)[: layer.k]
            gates = layer.score_activation(scores[chosen])
            for gate, e in zip(gates, chosen.tolist(), strict=True):
                y[i, j] += gate * layer.activation(x[i, j] @ layer.down[e]) * layer.up[e]
    return y


@each_gate
@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.no_grad()
def test_equals_the_loop(score_activation, activation):
    layer = small(score_activation=score_activation, activation=activation)
    assert_close(layer(draw_x()), looped(layer, draw_x()))


KEYS = {"query.weight", "row_keys", "column_keys"}


@pytest.mark.parametrize(
    ("options", "dead"),
    [
        *[({"score_activation": name}, set()) for name in SCORE_ACTIVATIONS],
        ({"k": 1}, KEYS),
        ({"k": 1, "score_activation": "relu"}, set()),
        ({"k": 1, "score_activation": "sigmoid"}, set()),
    ],
)
def test_gradient_reach(options, dead):
    layer = small(**options)
    layer(draw_x(4, 16)).square().sum().backward()
    assert {
        name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()
    } == dead


def test_query_norm_evens_out_queries_and_reads_other_tokens_only_while_training():
    layer, x = small(query_norm="batch"), draw_x(4, 32)
    x = x * torch.arange(1, 9)
    queries = []
    assert layer.query_norm is not None
    layer.query_norm.register_forward_hook(lambda _, args, output: queries.append(output))
    later = x.clone()
    later[:, -1] += 1
    assert not torch.equal(layer(x)[:, 0], layer(later)[:, 0])
    assert_close(queries[0].mean(0), torch.zeros(12, dtype=torch.float64))
    # BatchNorm adds 1e-5 to a variance of at least some hundredths.
    assert_close(
        queries[0].var(0, correction=0), torch.ones(12, dtype=torch.float64), rtol=0, atol=1e-3
    )
    layer.eval()
    assert torch.equal(layer(x)[:, 0], layer(later)[:, 0])
