"""Linear attention is its definition, token by token, and refuses the state of another layer."""

import pytest
import torch
import torch.nn.functional as F

from lab.layers.family.linear_attention import LinearAttention
from lab.layers.recurrence import DIVISOR_EPS


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("t", [1, 7, 70, 130])
def test_it_is_the_definition(normalise, t):
    torch.manual_seed(0)
    layer, x = LinearAttention(12, 3, normalise=normalise).double(), torch.randn(2, t, 12).double()
    q, k, v = (f(x).unflatten(-1, (3, 4)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    expected = []
    for i in range(t):
        weights = torch.einsum("bhn,bshn->bhs", q[:, i], k[:, : i + 1])
        total = torch.einsum("bhs,bshp->bhp", weights, v[:, : i + 1])
        expected.append(
            total / (weights.sum(-1, keepdim=True) + DIVISOR_EPS) if normalise else total
        )
    torch.testing.assert_close(layer(x), layer.out_proj(torch.stack(expected, 1).flatten(2)))
    matrix = layer.matrix(x)
    torch.testing.assert_close(layer.matrix(x, slice(t // 2, t)), matrix[:, :, t // 2 :])
    if normalise:
        torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 3, t).double(), atol=1e-5, rtol=0)


def test_a_state_of_another_layer_is_refused():
    state = LinearAttention(12, 3).start(2)
    with pytest.raises(ValueError, match=r"state.memory is \[2, 3, 4, 5\], must be \[2, 2, 6, 7\]"):
        LinearAttention(12, 2).prefill(torch.zeros(2, 1, 12), state)
    with pytest.raises(ValueError, match="d_model=12 must be a positive multiple of n_heads=5"):
        LinearAttention(12, 5)


def test_its_state_has_one_size():
    layer = LinearAttention(12, 3)
    for t in (1, 100):
        state = layer.prefill(torch.randn(1, t, 12))[1]
        assert state.memory.shape == (1, 3, 4, 5)
    assert LinearAttention(12, normalise=False).start(1).memory.shape == (1, 1, 12, 12)
