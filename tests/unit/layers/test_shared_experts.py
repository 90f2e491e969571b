import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from lab.hooks import hook_points
from lab.layers.routed import RoutedMoE, SharedExpertMoE, collect_balance_losses


def small(**options) -> SharedExpertMoE:
    torch.manual_seed(0)
    return SharedExpertMoE(8, **{"n_experts": 5, "k": 2, "d_ff": 6, **options}).double()


def draw_x(b=2, t=7, d=8):
    return torch.randn(b, t, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_is_each_shared_expert_plus_the_routed_ones(gated):
    layer, x = small(n_shared=3, gated=gated), draw_x()
    routed = RoutedMoE(8, n_experts=5, k=2, d_ff=6, gated=gated).double()
    routed.load_state_dict(
        {name: p for name, p in layer.state_dict().items() if not name.startswith("shared.")}
    )
    expected = routed(x)
    for units in torch.arange(18).split(6):
        hidden = x @ layer.shared.up.weight[units].T
        if layer.shared.gate is None:
            hidden = F.silu(hidden)
        else:
            hidden = F.silu(x @ layer.shared.gate.weight[units].T) * hidden
        expected += hidden @ layer.shared.down.weight[:, units].T
    assert_close(layer(x), expected)


def test_the_defaults_have_a_plain_mlps_hidden_units_a_token():
    layer = SharedExpertMoE(16)
    assert layer.shared.up.out_features + layer.k * layer.up.shape[-1] == 4 * 16
    assert layer(torch.randn(1, 3, 16)).shape == (1, 3, 16)


def test_hooks_and_balance_loss_are_the_routed_halfs():
    layer = small()
    shared = {"shared.hook_pre", "shared.hook_post"}
    assert hook_points(layer).keys() == hook_points(RoutedMoE(8)).keys() | shared
    with collect_balance_losses(layer) as losses:
        layer(draw_x())
    assert len(losses) == 1
