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
