"""What every adapter is built on: a module that is called, and a state that is carried."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PATTERNS = ("left", "right", "scattered")
"""Where padding may stand; a decoder without the attribute `paddings` supports all patterns."""


class Carried(NamedTuple):
    """The state of a foreign module, and how much it has read.

    Attributes:
        position: tokens of each row without padding [b].
        keep: False for padding among all s tokens given so far [b s].
        held: the module's own state; None before the first token.
        tensors: the tensors within `held`.
    """

    position: Tensor
    keep: Tensor
    held: Any = None
    tensors: tuple[Tensor, ...] = ()


def make_start_state(batch: int, position: int, device: torch.device) -> Carried:
    """Return the state of rows that have read no token."""
    nothing = torch.zeros(batch, 0, dtype=torch.bool, device=device)
    return Carried(torch.full((batch,), position, device=device), nothing)


def extend_state(state: Carried, kept: Tensor, held: Any) -> Carried:
    """Return the state after further tokens; `kept` [b t] is False for padding."""
    keep = torch.cat([state.keep, kept], dim=1)
    return Carried(state.position + kept.sum(1), keep, held, tuple(list_tensors(held)))


def copy_state(held: Any) -> Any:
    """Return a copy whose tensors are clones, through which gradients reach the originals."""
    return deepcopy(held, {id(x): x.clone() for x in list_tensors(held)})


def lend_state(held: Any, name: str = "state") -> Any:
    """Return what a call is given of a state: a cache's copy, and any other state itself.

    A call must leave a state as it is: tensors, or tuples and lists of them. By design a call may
    write into a cache: a dict, an object of another class, or what the parameter's name calls so.
    """
    return copy_state(held) if "cache" in name or not _is_plain(held) else held


def _is_plain(held: Any) -> bool:
    """Whether a state is made of tensors and numbers, at any depth of tuples and lists."""
    if isinstance(held, tuple | list):
        return all(map(_is_plain, held))
    return held is None or isinstance(held, Tensor | int | float)


def list_tensors(held: Any) -> list[Tensor]:
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


def keep_all(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return the mask `keep` [b t], or one that keeps every token of x [b t …]."""
    return x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep


def refuse_padding(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return a mask that keeps every token of x [b t …].

    Raises:
        ValueError: if `keep` has padding, which the module cannot leave out.
    """
    if keep is not None and not keep.all():
        raise ValueError("keep has padding, but this module takes no padding mask")
    return keep_all(x, None)


class PlainAdapter(nn.Module):
    """A foreign module or function, called as one from [b t d] to [b t e].

    Args:
        module: the foreign module or function.
        output: which item of a tuple, or field of an object, is the sequence; None for a tensor.
        layout: order of its axes, in and out: "btd", "tbd" or "bdt".
    """

    def __init__(self, module: Any, output: int | str | None = None, layout: str = "btd"):
        super().__init__()
        self.module = module
        self.output, self.layout = output, layout
        self.training = getattr(module, "training", True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence [b t e]."""
        return self.take_sequence(self.call(x))

    def call(self, x: Tensor) -> Any:
        """Return what the foreign module returns."""
        return self.module(lay_out(x, self.layout))

    def take_sequence(self, found: Any) -> Tensor:
        """Return the sequence [b t e] among what the foreign module returned."""
        y = lay_out(get_item(found, self.output), self.layout)
        return y.reshape(*y.shape[:2], -1)


class Positioned(PlainAdapter):
    """A module that is given the positions of its tokens: 0, 1, 2 …

    Args:
        name: name of its parameter for the positions.
        batched: whether positions are [b t] instead of [t].
    """

    def __init__(
        self,
        module: Any,
        name: str,
        batched: bool = False,
        output: int | str | None = None,
        layout: str = "btd",
    ):
        super().__init__(module, output, layout)
        self.name, self.batched = name, batched

    def call(self, x: Tensor) -> Any:
        """Return what the foreign module returns, given the positions."""
        positions = torch.arange(x.shape[1], device=x.device)
        if self.batched:
            positions = positions.expand(x.shape[0], -1)
        return self.module(lay_out(x, self.layout), **{self.name: positions})


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Return x [b t …] in a layout, or x in that layout as [b t …]."""
    if layout == "tbd":
        return x.transpose(0, 1)
    return x.transpose(1, 2) if layout == "bdt" else x


def get_item(found: Any, output: int | str | None) -> Any:
    """Return an item of a tuple, an entry of a dict or a field of an object; None: all of it."""
    if output is None:
        return found
    if isinstance(output, int) or isinstance(found, Mapping):
        return found[output]
    return getattr(found, output)
