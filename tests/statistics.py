"""Whether draws are what they should be."""

from math import sqrt

import torch
from torch import Tensor


def assert_uniform(drawn: Tensor, low: int, high: int) -> None:
    """Chi-square against low … high − 1: within 5 standard deviations, as in test_counter."""
    counts = torch.bincount(drawn.flatten() - low, minlength=high - low).double()
    assert len(counts) == high - low
    expected, freedom = counts.sum() / len(counts), high - low - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert statistic < freedom + 5 * sqrt(2 * freedom)
