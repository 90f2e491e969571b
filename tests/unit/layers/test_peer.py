from itertools import product

import pytest
import torch
from torch.testing import assert_close

from lab.hooks import hook_points, hooks
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


@each_gate
def test_gradients_equal_finite_differences(score_activation):
    layer, x = small(score_activation=score_activation), draw_x(1, 2).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def call(x, *parameters):
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, named, (x,))

    torch.autograd.gradcheck(call, (x, *parameters), fast_mode=True)


@each_gate
def test_backends_agree(score_activation):
    x, results = draw_x().requires_grad_(), []
    for backend in ("gather", "dense"):
        layer = small(score_activation=score_activation, backend=backend)
        assert layer.backend == backend
        y = layer(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    assert_close(*results)


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


@pytest.mark.parametrize("k", [1, 6])
def test_the_chosen_backend_is_shown(k):
    layer = small(k=k)
    assert layer.extra_repr().endswith(f"experts, {layer.backend}")


def test_hook_points():
    layer, seen = small(), {}
    with hooks(layer, [(None, lambda tensor, point: seen.update({point.name: tensor}))]):
        y = layer(draw_x())
    assert_close(y, layer(draw_x()))
    assert {name: tuple(tensor.shape) for name, tensor in seen.items()} == {
        "hook_subkey_scores": (2, 5, 2, 3 + 4),
        "hook_expert_scores": (2, 5, 2, 3),
        "hook_expert_indices": (2, 5, 2, 3),
        "hook_expert_weights": (2, 5, 2, 3),
    }
    assert seen.keys() == hook_points(layer).keys()


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


# PyTorch 2.13's compiler instantiates any custom autograd.Function, against its own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("unchecked")  # the compiler cannot trace the tests' type checker
@pytest.mark.parametrize("backend", ["gather", "dense"])
def test_compiles_whole(backend):
    layer, x = small(backend=backend), draw_x()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads, expected = (
        torch.autograd.grad(f(x).square().sum(), list(layer.parameters()))
        for f in (compiled, layer)
    )
    assert_close(grads, expected)


@pytest.mark.parametrize("d_model", [1, 2, 6, 64])
def test_default_sizes_fit(d_model):
    layer = PEER(d_model)
    assert layer(torch.randn(1, 3, d_model)).shape == (1, 3, d_model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_experts": 13}, "n_experts=13: .* prime; near numbers that factor: 12 = 3 × 4 and 15"),
        ({"n_experts": 0}, "n_experts=0: must be in 1 …"),
        ({"k": 13}, "k=13: must be in 1 … n_experts=12"),
        ({"k": 0}, "k=0: must be in 1 … n_experts=12"),
        ({"d_retrieval": 5}, "d_retrieval=5: must be ≥ 2 and even"),
        ({"n_retrieval_heads": 0}, "n_retrieval_heads=0: must be ≥ 1"),
        ({"activation": "swish"}, "activation='swish': must be one of silu, gelu, relu"),
        ({"score_activation": "tanh"}, "score_activation='tanh': must be one of softmax, relu"),
        ({"query_norm": "layer"}, "query_norm='layer': must be one of none, batch"),
        ({"backend": "sparse"}, "backend='sparse': must be one of auto, gather, dense"),
    ],
)
def test_errors(unchecked, options, words):
    with pytest.raises(ValueError, match=words):
        small(**options)
