"""Modules and functions from a sequence to a sequence, whichever way its axes lie."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    """A module or function as one from [b t d] to [b t e].

    Args:
        module: the foreign one.
        output: which item of a tuple, or field of an object, is the sequence; None for a tensor.
        layout: how the foreign one wants its axes and gives them: "btd", "tbd" or "bdt".
    """

    def __init__(self, module: Any, output: int | str | None = None, layout: str = "btd"):
        super().__init__()
        self.module = module
        self.output, self.layout = output, layout
        self.training = getattr(module, "training", True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence [b t e]."""
        return self.sequence(self.called(x))

    def called(self, x: Tensor) -> Any:
        """Return what the foreign one does."""
        return self.module(laid(x, self.layout))

    def sequence(self, found: Any) -> Tensor:
        """Return the sequence [b t e] among what the foreign one returned."""
        y = laid(item(found, self.output), self.layout)
        return y.reshape(*y.shape[:2], -1)


class Positioned(Plain):
    """A module that is told where its tokens stand: at 0, 1, 2 …

    Args:
        name: of its parameter for the positions.
        batched: whether it wants them as [b t], not [t].
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

    def called(self, x: Tensor) -> Any:
        """Return what the foreign one does with the positions."""
        positions = torch.arange(x.shape[1], device=x.device)
        if self.batched:
            positions = positions.expand(x.shape[0], -1)
        return self.module(laid(x, self.layout), **{self.name: positions})


def laid(x: Tensor, layout: str) -> Tensor:
    """Return x [b t …] with its axes in the layout, or one in the layout as [b t …]."""
    if layout == "tbd":
        return x.transpose(0, 1)
    return x.transpose(1, 2) if layout == "bdt" else x


def item(found: Any, output: int | str | None) -> Any:
    """Return an item of a tuple, an entry of a dict or a field of an object; None: all of it."""
    if output is None:
        return found
    if isinstance(output, int) or isinstance(found, Mapping):
        return found[output]
    return getattr(found, output)
