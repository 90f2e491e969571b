"""Convolutions as long as a row: by blocks and transforms, and directly."""

import pytest
import torch

from lab.ops.long_convolution import LEAF, convolve, convolve_directly
from tests.normal import draw_normal


@pytest.mark.parametrize("t", [1, 2, LEAF - 1, LEAF, LEAF + 1, 100, 8 * LEAF])
def test_both_agree_with_their_gradients(t: int):
    inputs = [z.requires_grad_() for z in (draw_normal(2, t, 3), draw_normal(t, 3, seed=1))]
    found = []
    for form in (convolve, convolve_directly):
        y = form(*inputs)
        found.append([y, *torch.autograd.grad((y * draw_normal(2, t, 3, seed=2)).sum(), inputs)])
    torch.testing.assert_close(*found)


def test_nothing_comes_back_from_later_tokens():
    x, taps = draw_normal(1, 200, 2), draw_normal(200, 2, seed=1)
    spoilt = x.clone()
    spoilt[:, 77:] *= 1e12
    assert torch.equal(convolve(spoilt, taps)[:, :77], convolve(x, taps)[:, :77])


def test_shapes_are_checked(unchecked):
    with pytest.raises(ValueError, match=r"taps is \[3, 2\], must be \[4, 2\]"):
        convolve(torch.ones(1, 4, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="t=0 tokens"):
        convolve_directly(torch.ones(1, 0, 2), torch.ones(0, 2))
