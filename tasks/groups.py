"""Finite groups as numbered elements and multiplication tables.

The elements of "Z2" and "Z60" are residues; their product is the sum. Those of "S5" and "A5" are
the permutations of 0 … 4 and the even ones among them; the product p·q is p first, then q:
(p·q)(i) = q(p(i)). Elements are numbered in lexicographic order, so that the identity is 0.
"""

from functools import lru_cache
from itertools import combinations, permutations
from typing import Literal

from jaxtyping import Int64

from tasks.lazy import Tensor, torch

Group = Literal["Z2", "Z60", "S5", "A5"]
RESIDUES = {"Z2": 2, "Z60": 60}
POINTS = 5
"""The number of points that S5 and A5 permute."""


@lru_cache
def list_elements(group: str) -> tuple[tuple[int, ...], ...]:
    """List the elements of a group in order: (residue,), or (p(0), …, p(4))."""
    if group in RESIDUES:
        return tuple((residue,) for residue in range(RESIDUES[group]))
    every = permutations(range(POINTS))
    return tuple(p for p in every if group == "S5" or _is_even(p))


@lru_cache
def tabulate_products(group: str, device: "torch.device") -> Int64[Tensor, " products"]:
    """Tabulate the products of a group: entry a·|G| + b is the number of a·b."""
    element = torch.tensor(list_elements(group))
    order = len(element)
    if group in RESIDUES:
        product = (element + element.T) % order
    else:
        left = element[:, None].expand(-1, order, -1)
        right = element[None].expand(order, -1, -1)
        # As numbers in base 5 permutations come in lexicographic order.
        digits = POINTS ** torch.arange(POINTS - 1, -1, -1)
        code, wanted = (element * digits).sum(1), (right.gather(2, left) * digits).sum(2)
        product = torch.searchsorted(code, wanted)
    return product.flatten().to(device)


def _is_even(permutation: tuple[int, ...]) -> bool:
    """Whether an even number of pairs are in the wrong order."""
    return sum(left > right for left, right in combinations(permutation, 2)) % 2 == 0
