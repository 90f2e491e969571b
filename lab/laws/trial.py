"""One comparison that a law makes of a module."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Check = Callable[..., tuple[Tensor, Tensor]]
"""check(module, x, **given) → a difference [b t …] that a law says is zero, and its reference."""


@dataclass(frozen=True)
class Trial:
    """One comparison whose difference a law says is zero.

    Attributes:
        check: computes the difference; reproductions print its source.
        given: the check's further arguments, literals.
        words: describes a failure; {row} and {position} name where the difference is largest.
        refusable: whether a module may refuse the check's input, by its length or its rows.
    """

    check: Check
    given: Mapping[str, Any]
    words: str
    refusable: bool = False


Trials = Callable[[nn.Module, Tensor], Iterable[Trial]]
"""The trials of a law on one input of a module."""
