"""Causal convolution: what it sums, the tail it carries, the padding it passes over."""

import pytest
import torch
import torch.nn.functional as F

from lab.layers.convolution import CausalConvolution
from tests.normal import draw_normal


def convolution(channels: int = 3, width: int = 4) -> CausalConvolution:
    torch.manual_seed(0)
    return CausalConvolution(channels, width).double()


@pytest.mark.parametrize("width", [1, 4])
def test_values_and_gradients_are_those_of_conv1d(width):
    conv, x = convolution(width=width), draw_normal(2, 7, 3).requires_grad_()
    leaves = (x, conv.weight, conv.bias)
    padded = F.pad(x.mT, (width - 1, 0))
    expected = F.conv1d(padded, conv.weight[:, None], conv.bias, groups=3).mT
    actual = conv(x)[0]
    torch.testing.assert_close(actual, expected)
    against = draw_normal(2, 7, 3, seed=1)
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaves, against), torch.autograd.grad(expected, leaves, against)
    )


def test_gradients_pass_through_the_tail():
    tail = draw_normal(2, 3, 3, seed=1).requires_grad_()
    conv = convolution()
    assert torch.autograd.gradcheck(lambda x, tail: conv(x, tail), (draw_normal(2, 2, 3), tail))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("cut", [1, 2, 6])
def test_the_tail_is_carried_over_any_split(width, cut):
    conv, x = convolution(width=width), draw_normal(2, 7, 3)
    whole, last = conv(x)
    first, tail = conv(x[:, :cut])
    second, tail = conv(x[:, cut:], tail)
    assert torch.equal(torch.cat([first, second], dim=1), whole)
    assert torch.equal(tail, last)
    assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


PADDED = {
    "left": [0, 0, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 0, 0],
    "between": [0, 1, 0, 0, 1, 1],
    "all but one": [0, 0, 0, 1, 0, 0],
    "all": [0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_passed_over(name):
    conv, x, tail = convolution(), draw_normal(2, 6, 3), draw_normal(2, 3, 3, seed=1)
    keep = torch.tensor([PADDED[name], [1] * 6]).bool()
    y, last = conv(x, tail, keep)
    for row in range(2):
        kept = x[row : row + 1, keep[row]]
        expected, expected_last = conv(kept, tail[row : row + 1])
        assert torch.equal(y[row : row + 1, keep[row]], expected)
        assert torch.equal(last[row : row + 1], expected_last)


def test_low_precision_weights_sum_in_the_inputs_precision():
    conv, x = convolution().bfloat16(), draw_normal(2, 7, 3).float()
    y, tail = conv(x)
    assert y.dtype == tail.dtype == torch.float32
    torch.testing.assert_close(y, conv.float()(x)[0])


@pytest.mark.parametrize("shape", [(1, 3, 3), (2, 2, 3), (2, 3, 4)])
def test_refuses_a_tail_of_another_shape(unchecked, shape):
    with pytest.raises(ValueError, match=r"tail is \[.*\], must be \[2, 3, 3\]"):
        convolution()(draw_normal(2, 6, 3), draw_normal(*shape))
