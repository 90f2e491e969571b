"""Count the bytes of the tensors that torch makes, as they come and go."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
        given = {_identify(each) for each in tree_leaves((args, kwargs)) if _holds_bytes(each)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if _holds_bytes(each) and _identify(each) not in given | self._counted:
                self._count(each.untyped_storage())
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


def _holds_bytes(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "meta" and not value.is_sparse


def _identify(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


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


def measure_peak(call: Callable[[], object]) -> int:
    """Return the most bytes that the tensors of a call take at a time."""
    with Allocations() as allocations:
        call()
    return allocations.peak
