"""Modules and functions from a sequence to a sequence, in any order of the axes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


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
