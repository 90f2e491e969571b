"""How long the memory traffic of all operations but matrix products takes at the speed of copies.

No operation can be faster than a copy of as many bytes, so the products of a piece of work
(`lab.bench.products`) and these copies together bound its time from below, as long as each
operation writes its result to memory. Only fusing operations could pass that bound.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.bench.products import CPU, find_products
from lab.bench.replay import time_alone

PICKS = ("gather", "scatter", "index_select", "embedding")
"""Parts of the names of operations that touch no more numbers than their smallest tensor has."""


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


def count_traffic(func: Any, given: object, result: object) -> int:
    """Return how many bytes an operation of torch reads and writes; none for a view.

    Args:
        func: an overload of an operation, as a `TorchDispatchMode` is told.
        given: its arguments.
        result: what it returned.
    """
    name, given, made = func.overloadpacket.__name__, _list_tensors(given), _list_tensors(result)
    known = {tensor.untyped_storage()._cdata for tensor in given}
    changes = func._schema.is_mutable
    if not changes and all(tensor.untyped_storage()._cdata in known for tensor in made):
        return 0
    sizes = [_count_bytes(tensor) for tensor in (*given, *made)]
    if any(word in name for word in PICKS) and "backward" not in name:
        return 2 * min(sizes)
    return sum(sizes)


def _halve(traffic: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return how many bytes copies read, and as many write, and how often."""
    return [(-(-size // 2), count) for size, count in traffic.items()]


class _TrafficRecorder(TorchDispatchMode):
    """Records the bytes of what is called under it."""

    def __init__(self):
        super().__init__()
        self.traffic: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not find_products(func.overloadpacket.__name__, args):
            size = count_traffic(func, (args, kwargs or {}), result)
            if size:
                self.traffic[size] += 1
        return result


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers; those that are repeated by a view count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _list_tensors(values: object) -> list[Tensor]:
    """List the tensors in the arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
