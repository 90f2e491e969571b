import pytest
import torch
from torch.testing import assert_close

from lab.hooks import run_with_cache
from lab.layers.mlp import ACTIVATIONS, MLP


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_is_the_formula(activation, gated):
    torch.manual_seed(0)
    mlp, x = MLP(6, d_ff=10, activation=activation, gated=gated), torch.randn(2, 3, 6)
    hidden = x @ mlp.up.weight.T
    if mlp.gate is not None:
        expected = ACTIVATIONS[activation](x @ mlp.gate.weight.T) * hidden
    else:
        expected = ACTIVATIONS[activation](hidden)
    assert (mlp.gate is not None) == gated
    assert_close(mlp(x), expected @ mlp.down.weight.T)


@pytest.mark.parametrize(("gated", "matrices"), [(False, 2), (True, 3)])
def test_sizes(gated, matrices):
    sizes = [p.shape for p in MLP(8, gated=gated).parameters()]
    assert len(sizes) == matrices
    assert {s.numel() for s in sizes} == {8 * 32}


@pytest.mark.parametrize("gated", [False, True])
def test_every_parameter_gets_gradient(gated):
    torch.manual_seed(0)
    mlp = MLP(8, gated=gated)
    mlp(torch.randn(2, 3, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in mlp.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"d_model": 0}, "d_model=0: must be ≥ 1"),
        ({"d_model": 8, "d_ff": 0}, "d_ff=0: must be ≥ 1"),
        (
            {"d_model": 8, "activation": "swish"},
            "activation='swish': must be one of silu, gelu, relu",
        ),
    ],
)
def test_errors(unchecked, options, words):
    with pytest.raises(ValueError, match=words):
        MLP(**options)


@pytest.mark.parametrize("gated", [False, True])
def test_hook_points_hold_the_activations(gated):
    mlp, x = MLP(6, d_ff=10, gated=gated), torch.randn(2, 3, 6)
    _, seen = run_with_cache(mlp, x)
    pre = mlp.up(x) if mlp.gate is None else mlp.gate(x)
    assert_close(seen["hook_pre"], pre)
    assert_close(mlp.down(seen["hook_post"]), mlp(x))
    assert ("hook_pre_linear" in seen) == gated
    if gated:
        assert_close(seen["hook_pre_linear"], mlp.up(x))
