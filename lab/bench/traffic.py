"""How long the memory traffic of all operations but matrix products takes at the speed of copies.

No operation can be faster than a copy of as many bytes, so the products of a piece of work
(`lab.bench.products`) and these copies together bound its time from below, as long as each
operation writes its result to memory. Only fusing operations could pass that bound.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.bench.products import CPU, find_products
from lab.bench.replay import time_alone

PICKS = ("gather", "index_select", "embedding", "index")
"""Operations that read few rows of a large tensor: as much as they return."""
PLACES = ("scatter", "index_add", "index_copy", "index_put")
"""Beginnings of the names of operations that write few rows of a large tensor in place: as much as
their last argument has."""
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_")
"""Operations that write a tensor without reading it."""


def record_traffic(call: Callable[[], object]) -> Counter[int]:
    """Return how many bytes each operation of a call reads and writes, and how often that occurs.

    Matrix products and views are left out.
    """
    with _TrafficRecorder() as recorder:
        call()
    return recorder.traffic


def time_traffic(traffic: Mapping[int, int], device: torch.device = CPU) -> float:
    """Return the seconds of copies that read and write as many bytes as these operations do.

    Copies of one size follow one another, and all use the same memory, so that small ones stay in
    cache. On a GPU they are one CUDA graph.
    """
    source = torch.zeros(-(-max(traffic, default=0) // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = [(source[:size], target[:size], n) for size, n in _halve(traffic)]

    def copy() -> None:
        for read, written, count in copies:
            for _ in range(count):
                written.copy_(read)

    return time_alone(copy, device)


def count_traffic(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> int:
    """Return how many bytes an operation of torch reads and writes; none for a view or new memory.

    Args:
        func: an overload of an operation, as a `TorchDispatchMode` is told.
        args: its arguments.
        kwargs: those given by name.
        result: what it returned.
    """
    name = func.overloadpacket.__name__
    given, made = _list_tensors((args, kwargs)), _list_tensors(result)
    if name.removeprefix("new_").startswith("empty"):
        return 0
    if func._schema.is_mutable:
        if name.startswith(PLACES):
            return _count(given[1:]) + _count(given[-1:])
        written, out = _list_written(func, args, kwargs)
        unread = written if name in OVERWRITES else out
        return _count(given) - _count(unread) + _count(written)
    known = {tensor.untyped_storage()._cdata for tensor in given}
    if all(tensor.untyped_storage()._cdata in known for tensor in made):
        return 0
    if name.endswith("_like") or name.startswith("new_"):
        return _count(made)
    if name.startswith("_embedding_bag") and "backward" not in name:
        table, picked = given[:2]
        row = table.shape[-1] * table.element_size()
        return picked.numel() * row + _count(given[1:]) + _count(made[:1])  # the rest is small
    if name in PICKS:
        return _count(given[1:]) + 2 * _count(made)
    return _count(given) + _count(made)


def _list_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation writes, and those that it was given for results."""
    written, out = [], []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _list_tensors(value)
            out += _list_tensors(value) if argument.is_out else []
    return written, out


def _halve(traffic: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the bytes that each copy reads, and how often; it writes as many."""
    return [(-(-size // 2), count) for size, count in traffic.items()]


class _TrafficRecorder(TorchDispatchMode):
    """Records the bytes of what is called under it."""

    def __init__(self):
        super().__init__()
        self.traffic: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not find_products(func.overloadpacket.__name__, args):
            size = count_traffic(func, args, kwargs or {}, result)
            if size:
                self.traffic[size] += 1
        return result


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(map(_count_bytes, tensors))


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers; those that are repeated by a view count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _list_tensors(values: object) -> list[Tensor]:
    """List the tensors in the arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
