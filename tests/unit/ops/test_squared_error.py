"""The squared error of a linear head, with and without positions that count for nothing."""

import math

import pytest
import torch
import torch.nn.functional as F

from lab.ops.squared_error import linear_squared_error


@pytest.mark.parametrize("padded", [0, 3])
def test_it_is_the_mean_over_scored_numbers(padded):
    torch.manual_seed(0)
    hidden = torch.randn(7, 4, requires_grad=True)
    weight = torch.randn(2, 4, requires_grad=True)
    targets = torch.randn(7, 2)
    usual = F.mse_loss(hidden[: 7 - padded] @ weight.T, targets[: 7 - padded])
    expected = torch.autograd.grad(usual, (hidden, weight))
    y = targets[: 7 - padded]
    explained = y.square().sum() - usual * y.numel()
    targets[7 - padded :] = math.nan
    loss, found = linear_squared_error(hidden, weight, targets)
    torch.testing.assert_close((loss, found), (usual, explained))
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), expected)


def test_nothing_scored_is_refused():
    with pytest.raises(ValueError, match="hidden has 0 rows: at least one position"):
        linear_squared_error(torch.zeros(0, 4), torch.zeros(1, 4), torch.zeros(0, 1))
