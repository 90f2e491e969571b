import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from lab.hooks import hook_points, hooks
from lab.layers.mlp import ACTIVATIONS, MLP
from lab.layers.routed import RoutedMoE, collect_balance_losses, imbalance, measure_share
from lab.ops.grouped import (
    ExpertWeights,
    apply_experts,
    apply_experts_naively,
    resolve_grouped_backend,
)

SHAPES = [(1, 4, 8, 1, 1), (13, 4, 8, 3, 2), (9, 8, 4, 4, 4), (0, 4, 4, 3, 1)]
"""tokens, d, f, e, k, rows of 16 bytes in float32; the last of no tokens."""

each_backend = pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
each_shape = pytest.mark.parametrize("shape", SHAPES)


def draw(shape, gated, dtype):
    """Return x, weights, indices and experts; expert 0 is chosen by nobody where there are more."""
    n, d, f, e, k = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=dtype).requires_grad_()

    experts = ExpertWeights(normal(e, d, f), normal(e, f, d), normal(e, d, f) if gated else None)
    likes = torch.rand(n, e, generator=generator)
    if e > k:
        likes[:, 0] = -1
    return normal(n, d), normal(n, k), likes.topk(k).indices, experts


@each_shape
@each_backend
@pytest.mark.parametrize("gated", [False, True])
def test_values_and_gradients_equal_the_oracles(shape, backend, gated):
    dtype = torch.float32 if backend == "grouped_mm" else torch.float64
    x, weights, indices, experts = draw(shape, gated, dtype)
    inputs = [x, weights, *(w for w in experts if w is not None)]
    results = []
    for y in (
        apply_experts(x, weights, indices, experts, F.silu, backend),
        apply_experts_naively(x, weights, indices, experts, F.silu),
    ):
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for result, expected in zip(*results, strict=True):
        # Sums of up to some hundred products in another order, against the largest of them.
        scale = max(1.0, float(expected.detach().abs().max())) if len(expected) else 1.0
        assert_close(result, expected, rtol=0, atol=100 * torch.finfo(dtype).eps * scale)


def test_auto_takes_grouped_mm_where_it_runs():
    def auto(dtype, *widths):
        return resolve_grouped_backend("auto", dtype=dtype, widths=widths)

    assert auto(torch.float32, 4, 8) == auto(torch.bfloat16, 8, 16) == "grouped_mm"
    assert auto(torch.float64, 4, 8) == auto(torch.float32, 4, 6) == "loop"
    assert auto(torch.bfloat16, 4, 8) == "loop"


@pytest.mark.parametrize(
    ("backend", "dtype", "words"),
    [
        ("sorted", torch.float32, "backend='sorted': must be one of auto, loop, grouped_mm"),
        ("grouped_mm", torch.float64, "backend='grouped_mm' takes float32, .* not float64"),
        ("grouped_mm", torch.bfloat16, "rows of a multiple of 16 bytes, not the 8 of width 4"),
    ],
)
def test_backends_that_cannot_run(backend, dtype, words):
    x, weights, indices, experts = draw(SHAPES[1], gated=False, dtype=dtype)
    with pytest.raises(ValueError, match=words):
        apply_experts(x, weights, indices, experts, F.silu, backend)


@each_backend
def test_autocast_multiplies_in_its_dtype(backend):
    x, weights, indices, experts = draw((13, 8, 16, 3, 2), gated=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = apply_experts(x, weights, indices, experts, F.silu, backend)
    exact = apply_experts(x, weights, indices, experts, F.silu, backend)
    error = (y - exact).norm() / exact.norm()
    # Each of three products rounds to 8 bits: more than fp32's 2⁻²⁴, less than a tenth.
    assert 1e-4 < error < 0.03


def small(**options) -> RoutedMoE:
    torch.manual_seed(0)
    return RoutedMoE(8, **{"n_experts": 5, "k": 2, "d_ff": 6, **options}).double()


def draw_x(b=2, t=7, d=8):
    return torch.randn(b, t, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def looped(layer: RoutedMoE, x: torch.Tensor) -> torch.Tensor:
    """The layer one token and expert at a time."""
    y = torch.zeros_like(x)
    for i, j in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
        p = (x[i, j] @ layer.router.weight.T).softmax(0)
        chosen = p.argsort(descending=True)[: layer.k].tolist()
        total = sum(p[e] for e in chosen) if layer.normalise else 1
        for e in chosen:
            hidden = x[i, j] @ layer.up[e]
            if layer.gate is None:
                hidden = layer.activation(hidden)
            else:
                hidden = layer.activation(x[i, j] @ layer.gate[e]) * hidden
            y[i, j] += p[e] / total * (hidden @ layer.down[e])
    return y


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@torch.no_grad()
def test_equals_the_loop(activation, gated, normalise):
    layer = small(activation=activation, gated=gated, normalise=normalise)
    assert_close(layer(draw_x()), looped(layer, draw_x()))


@pytest.mark.parametrize("used", [1, 2, 5])
def test_imbalance_is_one_where_all_experts_are_used_alike(used):
    # All tokens on `used` of five experts in turn, k = 1, with a router that is sure of it.
    indices = (torch.arange(20) % used).view(2, 10, 1)
    scores = F.one_hot(indices[..., 0], 5).double()
    found = imbalance(scores, measure_share(indices, scores))
    assert_close(found, torch.tensor(5 / used, dtype=torch.float64))


def test_imbalance_does_not_grow_with_k():
    scores = torch.full((2, 10, 5), 0.2, dtype=torch.float64)
    for k in (1, 3, 5):
        indices = torch.randint(5, (2, 10, k), generator=torch.Generator().manual_seed(k))
        found = imbalance(scores, measure_share(indices, scores))
        assert_close(found, torch.tensor(1.0, dtype=torch.float64))


def test_balance_losses_are_collected_and_nothing_is_kept():
    last = small(balance_weight=0.5)
    layers = torch.nn.Sequential(small(), last, MLP(8).double())
    seen = []
    names = ["1.hook_router_scores", "1.hook_expert_share"]
    with (
        collect_balance_losses(layers) as losses,
        hooks(layers, [(names, lambda tensor, _: seen.append(tensor))]),
    ):
        layers(draw_x())
    assert len(losses) == 2
    assert_close(losses[1], 0.5 * imbalance(*seen))
    assert 0.01 * 0.5 < losses[0] < 0.01 * 5
    (grad,) = torch.autograd.grad(losses[1], last.router.weight)
    assert grad.any()
    layers(draw_x())
    assert len(losses) == 2
    kept = [value for module in layers.modules() for value in vars(module).values()]
    assert not any(isinstance(value, torch.Tensor) for value in kept)
    assert not list(layers.buffers())


def test_the_balance_loss_evens_out_the_experts():
    layer, x = small(n_experts=4, k=1, balance_weight=1.0), draw_x(8, 32)
    x[..., 0] = 1
    with torch.no_grad():
        layer.router.weight[0, 0] = 3  # expert 0 for nearly every token
    optimizer = torch.optim.Adam([layer.router.weight], lr=0.05)
    steps = []
    for _ in range(60):
        with collect_balance_losses(layer) as losses:
            layer(x)
        optimizer.zero_grad()
        losses[0].backward()
        optimizer.step()
        steps.append(losses[0].item())
    assert steps[0] > 2
    assert steps[-1] < 1.02


def test_hook_points():
    layer, seen = small(), {}
    with hooks(layer, [(None, lambda tensor, point: seen.update({point.name: tensor}))]):
        layer(draw_x())
    assert seen.keys() == hook_points(layer).keys()
    assert seen["hook_router_scores"].shape == (2, 7, 5)
    assert_close(seen["hook_router_scores"].sum(-1), torch.ones(2, 7, dtype=torch.float64))
    best = seen["hook_router_scores"].topk(2, dim=-1)
    assert_close(seen["hook_expert_indices"], best.indices)
    assert_close(seen["hook_expert_weights"], best.values)
    assert seen["hook_balance_loss"].shape == ()
    chosen = F.one_hot(seen["hook_expert_indices"], 5).double()
    assert_close(seen["hook_expert_share"], chosen.mean((0, 1, 2)))


def test_replaced_scores_choose_the_experts():
    layer, x = small(k=1), draw_x()
    only = F.one_hot(torch.tensor(3), 5).double()
    with hooks(layer, [("hook_router_scores", lambda p, _: only.expand_as(p))]):
        y = layer(x)
    assert_close(y, F.silu(x @ layer.up[3]) @ layer.down[3])
