"""Token codes: unit vectors that are as different as their width allows."""

from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

MANY = 1024
"""Maximum number of codes that are spread, which takes less than a second; more stay random."""
STEPS = 150


class Cosines(NamedTuple):
    """How alike codes are.

    Attributes:
        own: the least cosine of a code with itself: 1, or less where one of the two was rotated.
        highest: the largest cosine of two codes, at least 0.
        lowest: the smallest cosine of two codes, at most 0.
    """

    own: float
    highest: float
    lowest: float


@lru_cache(maxsize=32)
def spread(count: int, width: int) -> Float64[Tensor, "count width"]:
    """Return `count` unit vectors of `width` channels, always the same ones. Do not change them.

    These are the axes if there are enough. Else they start random and repel one another, the most
    similar and the most opposite ones the most, until the largest |cosine| is near Welch's bound,
    √((count − width) / (width (count − 1))), the least that is possible.
    """
    if count <= width:
        return torch.eye(count, width, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(count, width, generator=generator, dtype=torch.float64)
    codes = codes / codes.norm(dim=1, keepdim=True)
    if count > MANY:
        return codes
    best, least = codes, 1.0
    for step in range(STEPS):
        alike = (codes @ codes.T).fill_diagonal_(0)
        largest = alike.abs().max().item()
        if largest < least:
            best, least = codes, largest
        # The softmax gets sharper, so that in the end only the nearest neighbours push.
        push = (10 * (1 + 40 * step / STEPS) * alike.abs()).softmax(1) * alike.sign()
        codes = codes - 0.1 * (push @ codes)
        codes = codes / codes.norm(dim=1, keepdim=True)
    return best


@lru_cache(maxsize=32)
def compare_spread_codes(count: int, width: int) -> Cosines:
    """Return the cosines among the codes of `spread`."""
    return compare(spread(count, width), spread(count, width))


def compare(codes: Float64[Tensor, "count a"], others: Float64[Tensor, "count a"]) -> Cosines:
    """Return the cosines of codes with `others`, their rotated versions; computed in blocks."""
    own = (codes * others).sum(1).min().item()
    highest = lowest = 0.0
    for start in range(0, len(codes), MANY):
        product = codes[start : start + MANY] @ others.T
        product.diagonal(start).fill_(0)
        low, high = product.aminmax()
        highest, lowest = max(highest, high.item()), min(lowest, low.item())
    return Cosines(own, highest, lowest)


def welch(count: int, width: int) -> float:
    """Return Welch's bound: of any `count` unit vectors, two have at least this |cosine|."""
    if count <= width:
        return 0.0
    return ((count - width) / (width * (count - 1))) ** 0.5
