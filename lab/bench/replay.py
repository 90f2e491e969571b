"""What calls cost a GPU alone, without the Python that starts their kernels."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from lab.bench.ratio import time_median
from lab.training.graphs import RecordedCall


def time_alone(call: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds of a call; on a GPU those of its CUDA graph."""
    if device.type != "cuda":
        return time_median(call)
    return time_median(prepare_replay(call, device))


def prepare_replay(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Return a function that replays a call as a CUDA graph, and waits until the GPU has done it.

    Raises:
        RuntimeError: as `RecordedCall`.
    """
    return wait_for(RecordedCall(call, device))


def wait_for(call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that does a call, and waits until the GPU has done it."""

    def wait() -> None:
        call()
        torch.cuda.synchronize()

    return wait


def count_kernels(step: Callable[[], object]) -> tuple[int, float]:
    """Return how many kernels a call runs on a GPU, and their seconds."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        step()
    kernels = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    return len(kernels), sum(event.device_time for event in kernels) / 1e6
