"""The state of a foreign module, kept so that going on from it leaves it as it was."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

PATTERNS = ("left", "right", "scattered")
"""Where padding may stand: a decoder that says nothing of `paddings` promises all of it."""


class Carried(NamedTuple):
    """What a foreign module carries, and how much it has read.

    `position` [b] counts the tokens of each row without padding; `keep` [b s] is False where one of
    all s given so far was padded; `held` is the module's own, None before the first token, and
    `tensors` those within it.
    """

    position: Tensor
    keep: Tensor
    held: Any = None
    tensors: tuple[Tensor, ...] = ()


def before_any(batch: int, position: int, device: torch.device) -> Carried:
    """Return the state of rows that have read nothing."""
    nothing = torch.zeros(batch, 0, dtype=torch.bool, device=device)
    return Carried(torch.full((batch,), position, device=device), nothing)


def after(state: Carried, kept: Tensor, held: Any) -> Carried:
    """Return the state after further tokens, kept [b t] or padding."""
    keep = torch.cat([state.keep, kept], dim=1)
    return Carried(state.position + kept.sum(1), keep, held, tuple(tensors_in(held)))


def copied(held: Any) -> Any:
    """Return a copy, whose tensors are clones with the gradient's path to the originals."""
    return deepcopy(held, {id(x): x.clone() for x in tensors_in(held)})


def tensors_in(held: Any) -> list[Tensor]:
    """Return the tensors in containers, and in objects' fields, at any depth."""
    found, waiting, seen = [], [held], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif not callable(one):
            waiting += getattr(one, "__dict__", {}).values()
    return found


def all_kept(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return keep [b t], or that every token of x [b t …] is kept."""
    return x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep


def without_padding(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return that every token of x [b t …] is kept.

    Raises:
        ValueError: if one is not: the module was never told how to leave a token out.
    """
    if keep is not None and not keep.all():
        raise ValueError("keep has padding, and this module takes no mask of it")
    return all_kept(x, None)
