"""The norm against torch's, with and without hooks, and what its points hold."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from lab.hooks import hooks, run_with_cache
from lab.layers.norm import HookedRMSNorm, rms_norm


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


def differentiate(form, x, weight, against):
    y = form(x, weight)
    return y, *torch.autograd.grad((y * against).sum(), (x, weight))


def draw_wide(shape, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x, against = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator, dtype=torch.float64)
    x, weight = (scale * x).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    return x, weight, against.to(dtype)


@pytest.mark.parametrize("shape", [(7,), (3, 1), (2, 5, 8), (2, 0, 8)])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_values_and_gradients_equal_torchs(shape, eps):
    given = draw_wide(shape)
    ours = differentiate(lambda x, w: rms_norm(x, w, eps), *given)
    theirs = differentiate(lambda x, w: F.rms_norm(x, w.shape, w, eps), *given)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 33, 64, 256])
def test_a_row_has_the_same_bits_in_any_batch(width, dtype):
    x, weight, _ = draw_wide((5, 6, width), dtype)
    whole = rms_norm(x, weight)
    for rows, columns in ((slice(1, 2), slice(2, 3)), (slice(3, 5), slice(0, 6)), (0, slice(1, 4))):
        assert torch.equal(rms_norm(x[rows, columns], weight), whole[rows, columns])
        assert torch.equal(rms_norm(x[rows, columns].contiguous(), weight), whole[rows, columns])


def test_zeros_have_a_gradient():
    ours = differentiate(rms_norm, *draw_wide((2, 3, 8), scale=0.0))
    theirs = differentiate(lambda x, w: F.rms_norm(x, w.shape, w), *draw_wide((2, 3, 8), scale=0.0))
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_fp32_is_as_exact_as_torchs_and_autocast_changes_nothing():
    exact = differentiate(rms_norm, *draw_wide((64, 64, 32)))
    low = draw_wide((64, 64, 32), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = differentiate(rms_norm, *low)
    theirs = differentiate(lambda x, w: F.rms_norm(x, w.shape, w), *low)
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        bound = 4 * (other - right).abs().max() + 2.0**-22 * right.abs().max()
        assert (mine - right).abs().max() <= bound
