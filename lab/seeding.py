"""Seeding torch for a part of the work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fix_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Make what torch draws within a `with` block, e.g. for dropout, depend on a seed alone.

    The generators of the CPU and of the device are as before afterwards. `torch.manual_seed` would
    record three stack traces for back ends that are not there: a millisecond, as much as a small
    layer takes.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
