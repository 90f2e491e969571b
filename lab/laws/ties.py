"""Breaking ties in another order than torch does."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lab.laws.trace import find_place, list_callers

RANKING = {
    "topk": (2, -1),
    "kthvalue": (2, -1),
    "sort": (1, -1),
    "argsort": (1, -1),
    "argmax": (1, None),
    "argmin": (1, None),
    "max": (1, None),
    "min": (1, None),
    "median": (1, None),
}
"""Functions that return indices of entries by size: position of the axis argument, and its default
value."""


class Ties(TorchFunctionMode):
    """Permutes the entries that every ranking function sees.

    The indices are mapped back, so only the choice among equal entries changes.

    Args:
        order: 0 for the reverse order, otherwise the seed of a permutation.
        caller: id of the frame that calls the module; frames above it are not the module's.

    Attributes:
        places: the functions that ranked equal entries, with their lines.
    """

    def __init__(self, order: int, caller: int = 0):
        super().__init__()
        self.order, self.caller = order, caller
        self.places: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Rank in another order, or call another function as it is."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        plain = func(*args, **kwargs)
        indices = _get_indices(name, plain) if name in RANKING and args else None
        if indices is None or not args[0].ndim or "out" in kwargs:
            return plain
        position, dim = RANKING[name]
        dim = args[position] if len(args) > position else kwargs.get("dim", dim)
        x = args[0] if dim is not None else args[0].flatten()
        order = self._draw_order(x.shape[-1 if dim is None else dim], x.device)
        permuted = x.index_select(-1 if dim is None else dim, order)
        other = func(permuted.view(args[0].shape) if dim is None else permuted, *args[1:], **kwargs)
        found = _get_indices(name, other)
        assert found is not None
        found = order[found]
        if not torch.equal(found, indices):
            place = find_place(list_callers(sys._getframe(1), self.caller))
            words = f"{name} at {place}" if place else name
            self.places += [words] if words not in self.places else []
        return found if isinstance(other, Tensor) else type(plain)((other[0], found))

    def _draw_order(self, n: int, device: torch.device) -> Tensor:
        if not self.order:
            return torch.arange(n - 1, -1, -1, device=device)
        generator = torch.Generator().manual_seed(self.order)
        return torch.randperm(n, generator=generator).to(device)


def _get_indices(name: str, answer: Any) -> Tensor | None:
    """Return the indices in an answer; None if it has none, e.g. the maximum of all entries."""
    if isinstance(answer, tuple):
        return answer[1]
    return answer if name.startswith("arg") else None
