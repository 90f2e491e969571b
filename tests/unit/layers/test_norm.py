"""The norm against torch's, with and without hooks, and what its points hold."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lab.hooks import hooks, run_with_cache
from lab.layers.norm import HookedRMSNorm


def draw(dtype=torch.float32):
    torch.manual_seed(0)
    norm = HookedRMSNorm(8, 0.5)
    nn.init.uniform_(norm.weight)
    return norm.to(dtype), torch.randn(2, 3, 8).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_torchs_norm_times_the_factor_also_under_hooks(dtype):
    norm, x = draw(dtype)
    theirs = nn.RMSNorm(8, dtype=dtype)
    theirs.load_state_dict(norm.state_dict())
    expected = 0.5 * theirs(x)
    assert_close(norm(x), expected)
    watched, cache = run_with_cache(norm, x)
    assert watched.dtype == dtype
    assert_close(watched, expected)
    scale, normalized = cache["hook_scale"], cache["hook_normalized"]
    assert scale.shape == (2, 3, 1)
    wide = x.to(scale.dtype)
    assert_close(scale, wide.square().mean(-1, keepdim=True).sqrt(), rtol=1e-5, atol=1e-5)
    assert_close(normalized, wide / scale)


def test_gradients_agree_with_torchs():
    norm, x = draw(torch.float64)
    x.requires_grad_()
    inputs = (x, norm.weight)
    plain = torch.autograd.grad(norm(x).square().sum(), inputs)
    with hooks(norm, [("hook_scale", lambda tensor, hook: None)]):
        watched = torch.autograd.grad(norm(x).square().sum(), inputs)
    assert_close(plain, watched)


def test_a_frozen_scale_makes_it_linear():
    norm, x = draw(torch.float64)
    with hooks(norm, [("hook_scale", lambda tensor, hook: torch.full_like(tensor, 2.0))]):
        assert_close(norm(3 * x), 3 * norm(x))
        assert_close(norm(x), x / 2 * norm.gain)
