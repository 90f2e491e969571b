"""Calls on a GPU that are recorded once as a CUDA graph and replayed as a whole."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class RecordedCall(Generic[T]):
    """A call whose kernels a GPU starts by itself, where Python starts them one after another.

    Small models leave a GPU waiting for Python between kernels. A replay does what the call did,
    on what the same tensors hold by then, and writes into the same results.

    Args:
        call: takes and returns tensors of one place and shape, whatever they hold.
        device: where they are.
        rehearse: whether to call it twice before: what it makes once is then there, and what would
            wait for the GPU shows. False for what changes its inputs.

    Raises:
        RuntimeError: for a call that waits for the GPU or copies to it, which no graph can record.
    """

    def __init__(self, call: Callable[[], T], device: torch.device, *, rehearse: bool = True):
        self._device = device
        current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # this also selects its device
            if rehearse:
                call()
                with _refuse_waiting():
                    call()
            self._graph = torch.cuda.CUDAGraph()
            aside.synchronize()
            torch.cuda.empty_cache()  # a graph has memory of its own
            self._graph.capture_begin()
            try:
                self.result = call()
            except BaseException:
                with suppress(RuntimeError):  # of the capture, which that has broken off
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        current.wait_stream(aside)

    def __call__(self) -> T:
        """Do it again, and return the results: the same tensors each time."""
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self.result


@contextmanager
def _refuse_waiting() -> Iterator[None]:
    """Raise for what waits for the GPU, for a `with` block."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
