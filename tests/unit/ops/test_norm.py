"""The RMSNorm with its own backward pass, against torch's."""

import pytest
import torch
import torch.nn.functional as F

from lab.layers.norm import rms_norm


def differentiate(form, x, weight, against):
    y = form(x, weight)
    return y, *torch.autograd.grad((y * against).sum(), (x, weight))


def draw(shape, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x, against = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator, dtype=torch.float64)
    x, weight = (scale * x).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    return x, weight, against.to(dtype)


@pytest.mark.parametrize("shape", [(7,), (3, 1), (2, 5, 8), (2, 0, 8)])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_values_and_gradients_equal_torchs(shape, eps):
    given = draw(shape)
    ours = differentiate(lambda x, w: rms_norm(x, w, eps), *given)
    theirs = differentiate(lambda x, w: F.rms_norm(x, w.shape, w, eps), *given)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 33, 64, 256])
def test_a_row_has_the_same_bits_in_any_batch(width, dtype):
    x, weight, _ = draw((5, 6, width), dtype)
    whole = rms_norm(x, weight)
    for rows, columns in ((slice(1, 2), slice(2, 3)), (slice(3, 5), slice(0, 6)), (0, slice(1, 4))):
        assert torch.equal(rms_norm(x[rows, columns], weight), whole[rows, columns])
        assert torch.equal(rms_norm(x[rows, columns].contiguous(), weight), whole[rows, columns])


def test_zeros_have_a_gradient():
    ours = differentiate(rms_norm, *draw((2, 3, 8), scale=0.0))
    theirs = differentiate(lambda x, w: F.rms_norm(x, w.shape, w), *draw((2, 3, 8), scale=0.0))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_fp32_is_as_exact_as_torchs_and_autocast_changes_nothing():
    exact = differentiate(rms_norm, *draw((64, 64, 32)))
    low = draw((64, 64, 32), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = differentiate(rms_norm, *low)
    theirs = differentiate(lambda x, w: F.rms_norm(x, w.shape, w), *low)
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        bound = 4 * (other - right).abs().max() + 2.0**-22 * right.abs().max()
        assert (mine - right).abs().max() <= bound
