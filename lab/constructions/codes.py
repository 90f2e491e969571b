"""Token codes: unit vectors as far from one another as their width allows."""

from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

MANY = 1024
"""Codes up to which spreading them costs less than a second; more stay as drawn."""
STEPS = 150


class Cosines(NamedTuple):
    """How alike codes are.

    Attributes:
        own: the least of a code with itself: 1, or less where something came between the two.
        highest: the largest of two codes, 0 at least.
        lowest: the smallest of two codes, 0 at most.
    """

    own: float
    highest: float
    lowest: float


@lru_cache(maxsize=32)
def spread(count: int, width: int) -> Float64[Tensor, "count width"]:
    """Return `count` unit vectors of `width` channels, always the same ones; not to be changed.

    The axes where they suffice. Else vectors drawn at random that then repel one another, each
    step the most alike the most, opposites too: the largest |cosine| comes near Welch's bound,
    √((count − width) / (width (count − 1))), below which no vectors are.
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
        # Sharper and sharper: in the end only the nearest neighbours push.
        push = (10 * (1 + 40 * step / STEPS) * alike.abs()).softmax(1) * alike.sign()
        codes = codes - 0.1 * (push @ codes)
        codes = codes / codes.norm(dim=1, keepdim=True)
    return best


@lru_cache(maxsize=32)
def compare_spread_codes(count: int, width: int) -> Cosines:
    """Return how alike the codes of `spread` are."""
    return compare(spread(count, width), spread(count, width))


def compare(codes: Float64[Tensor, "count a"], others: Float64[Tensor, "count a"]) -> Cosines:
    """Return the products of codes with what became of them, by blocks of rows."""
    own = (codes * others).sum(1).min().item()
    highest = lowest = 0.0
    for start in range(0, len(codes), MANY):
        product = codes[start : start + MANY] @ others.T
        product.diagonal(start).fill_(0)
        low, high = product.aminmax()
        highest, lowest = max(highest, high.item()), min(lowest, low.item())
    return Cosines(own, highest, lowest)


def welch(count: int, width: int) -> float:
    """Return Welch's bound: among `count` unit vectors some two have at least this |cosine|."""
    if count <= width:
        return 0.0
    return ((count - width) / (width * (count - 1))) ** 0.5
