"""State space duality at some positions, against the token-by-token form."""

import pytest
import torch

from lab.layers.mixer import take_positions
from lab.ops.ssd_chunked import ssd_at
from lab.ops.ssd_forms import ssd_recurrent


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_len", [1, 3, 8, 64])
@pytest.mark.parametrize(
    "at", [[[13], [0]], [[5, 5, 2], [13, 12, 11]], [[7, 8, 13, 7], [12, 10, 9, 13]]]
)
def test_outputs_and_gradients_are_the_recurrences(at, chunk_len, dtype):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    x, B, C = draw(2, 14, 4, 3), draw(2, 14, 2, 5), draw(2, 14, 2, 5)
    dt, A = draw(2, 14, 4).exp(), -draw(4).exp()
    leaves = [z.requires_grad_() for z in (x, dt, A, B, C)]
    places = torch.tensor(at)
    got = ssd_at(x, dt, dt * A, B, take_positions(C, places), places, chunk_len)
    whole = take_positions(ssd_recurrent(x, dt, A, B, C)[0], places)
    against = draw(*got.shape)
    rtol, atol = (1e-10, 1e-12) if dtype == torch.float64 else (1e-4, 1e-4)
    torch.testing.assert_close(got, whole, rtol=rtol, atol=atol)
    for mine, other in zip(
        torch.autograd.grad((got * against).sum(), leaves),
        torch.autograd.grad((whole * against).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)
