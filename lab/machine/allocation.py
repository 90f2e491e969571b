"""Count the bytes of the tensors that torch makes, as they come and go."""

import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.machine.memory import DoesNotFitError, format_bytes, measure_free_memory


class OverLimitError(MemoryError):
    """Tensors take more bytes than they may.

    Attributes:
        bytes: what they would take.
    """

    def __init__(self, count: int):
        super().__init__(f"tensors take {format_bytes(count)}")
        self.bytes = count


class Allocations(TorchDispatchMode):
    """Count the bytes of all tensors made inside a `with` block, on any device.

    What an operation takes and frees again within itself is not seen.

    Attributes:
        live: bytes of the tensors that exist now.
        peak: the most that existed at a time.

    Raises:
        OverLimitError: once there are more bytes than `limit`. Linux gives a large tensor its pages
            when they are first written to, so this comes before they are taken.
    """

    def __init__(self, limit: float = float("inf")):
        super().__init__()
        self.live = self.peak = 0
        self._limit = limit
        self._counted: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it would import torch._dynamo, which takes seconds

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Carry out an operation and count its results."""
        result = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for storage in _list_storages(result):
            if storage._cdata in self._counted:
                continue
            # torch.tensor makes a tensor of a list unseen, then calls lift_fresh on it.
            if given is None:
                lifts = func is torch.ops.aten.lift_fresh.default
                given = {each._cdata for each in _list_storages(() if lifts else (args, kwargs))}
            if storage._cdata not in given:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._counted.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size).atexit = False
        if self.live > self._limit:
            raise OverLimitError(self.live)

    def _forget(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


def _list_storages(values: object) -> Iterator[torch.UntypedStorage]:
    """List the memory of all tensors among the arguments or results of an operation."""
    # torch's own walk, tree_leaves, takes longer than most operations.
    if isinstance(values, Tensor):
        if values.device.type != "meta" and not values.is_sparse:
            yield values.untyped_storage()
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _list_storages(value)
    elif isinstance(values, dict):
        yield from _list_storages(tuple(values.values()))


@contextmanager
def refuse_more_than_free(what: str) -> Iterator[None]:
    """Refuse a tensor that memory has no room for, in a `with` block, before its pages are taken.

    Raises:
        DoesNotFitError: naming what is being done, and the free memory.
    """
    free = measure_free_memory()
    try:
        with Allocations(free):
            yield
    except OverLimitError as error:
        raise DoesNotFitError(
            f"{what}: does not fit in memory: takes {format_bytes(error.bytes)} or more, "
            f"{format_bytes(free)} are free; choose smaller sizes"
        ) from error


def measure_peak(call: Callable[[], object], limit: float = float("inf")) -> int:
    """Return the peak of the bytes that the tensors of a call take.

    Raises:
        OverLimitError: as soon as they take more than the limit.
    """
    with Allocations(limit) as allocations:
        call()
    return allocations.peak


class _WholeAllocations(Allocations):
    """Count what Python's own objects take, too, which tracemalloc traces.

    Attributes:
        whole: the most bytes of tensors and of Python's objects at a time.
    """

    def __init__(self, limit: float):
        super().__init__(limit)
        self._before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        self.whole = 0

    def take_stock(self) -> None:
        """Take in the peak of Python's own objects since tensors last came or went."""
        self.whole = max(self.whole, self.live + tracemalloc.get_traced_memory()[1] - self._before)
        tracemalloc.reset_peak()

    def _count(self, storage: torch.UntypedStorage) -> None:
        self.take_stock()
        super()._count(storage)

    def _forget(self, key: int, size: int) -> None:
        self.take_stock()
        super()._forget(key, size)


def measure_whole_peak(call: Callable[[], object], limit: float = float("inf")) -> int:
    """Return the peak of the bytes that a call's tensors and Python's own objects take.

    Raises:
        OverLimitError: as soon as the tensors take more than the limit.
    """
    traced = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        with _WholeAllocations(limit) as allocations:
            call()
        allocations.take_stock()
        return allocations.whole
    finally:
        if not traced:
            tracemalloc.stop()
