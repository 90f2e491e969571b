"""Peak memory of a piece of work."""

import multiprocessing
import re
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.machine import give_back_freed_memory


def keep_pages() -> None:
    """Make malloc keep freed pages, as it does in training.

    A training step frees tensors larger than a batch; after that, malloc no longer returns pages to
    the system each time.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8).fill_(0)


def measure_peak_mib(work: Callable[[], Callable[[], object]]) -> float:
    """Return by how many MiB a new process grows at most while it computes (Linux).

    Args:
        work: a picklable function that prepares and returns the call to measure; the memory of
            the preparation is not counted.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _measure(work: Callable[[], Callable[[], object]], answer: Connection) -> None:
    call = work()
    give_back_freed_memory()  # or what the preparation has freed would be taken again, uncounted
    before = _read_status_mib("VmRSS")
    # Writing 5 resets the high-water mark to the current size (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    call()
    answer.send(_read_status_mib("VmHWM") - before)


def _read_status_mib(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure_peak(call: Callable[[], object]) -> int:
    """Return the peak of the bytes that the tensors of a call take, on any device."""
    with Allocations() as allocations:
        call()
    return allocations.peak


class Allocations(TorchDispatchMode):
    """Count the bytes of all tensors made inside a `with` block, on any device.

    What an operation takes and frees again within itself is not seen.

    Attributes:
        live: bytes of the tensors that exist now.
        peak: the most that existed at a time.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
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
