"""How long the memory traffic of all operations but matrix products takes at the speed of copies.

No operation can be faster than a copy of as many bytes, so the products of a piece of work
(`lab.bench.products`) and these copies together bound its time from below, as long as each
operation writes its result to memory. Only fusing operations could pass that bound.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.bench.ratio import time_median

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "flash_attention")
"""Parts of the names of matrix products."""
PICKS = ("gather", "scatter", "index_select", "embedding")
"""Parts of the names of operations that touch no more numbers than their smallest tensor has."""


def record_traffic(call: Callable[[], object]) -> Counter[int]:
    """Return how many bytes each operation of a call reads and writes, and how often that occurs.

    Matrix products and views are left out.
    """
    with _TrafficRecorder() as recorder:
        call()
    return recorder.traffic


def time_traffic(traffic: Mapping[int, int]) -> float:
    """Return the seconds of copies that read and write as many bytes as these operations do.

    Copies of one size follow one another and use the same memory, so that small ones stay in cache.
    """
    return sum(_time_copies(size, count) for size, count in traffic.items())


def _time_copies(size: int, count: int) -> float:
    source = torch.zeros(-(-size // 2), dtype=torch.uint8)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(count):
            target.copy_(source)

    return time_median(copy)


class _TrafficRecorder(TorchDispatchMode):
    """Records the bytes of what is called under it."""

    def __init__(self):
        super().__init__()
        self.traffic: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if any(word in name for word in PRODUCTS):
            return result
        given = _list_tensors((args, kwargs or {}))
        made = _list_tensors(result)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        changes = func._schema.is_mutable
        if not changes and all(tensor.untyped_storage()._cdata in known for tensor in made):
            return result  # a view
        sizes = [_count_bytes(tensor) for tensor in (*given, *made)]
        if any(word in name for word in PICKS) and "backward" not in name:
            self.traffic[2 * min(sizes)] += 1
        else:
            self.traffic[sum(sizes)] += 1
        return result


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers; those that are repeated by a view count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _list_tensors(values: object) -> list[Tensor]:
    """List the tensors in the arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
