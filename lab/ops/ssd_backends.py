"""Who computes state space duality: the registry of its backends, and the choice among them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lab.ops.ssd_chunked import ssd_torch
from lab.ops.ssd_peers import missing, run_fla, run_mamba_ssm


class Backend(NamedTuple):
    """A way to compute `lab.ops.ssd.ssd`.

    Attributes:
        run: (x, dt, A, B, C, D, chunk_len, initial_state) → (y, state): what `ssd` takes,
            checked, in its order, and what it returns.
        missing: None where it can run on a device, else the sentence that says why not. It must
            be cheap, and import nothing heavy where the answer needs none of it.
    """

    run: Callable[..., tuple[Tensor, Tensor]]
    missing: Callable[[torch.device], str | None]


def _nothing_missing(device: torch.device) -> str | None:
    return None


BACKENDS: dict[str, Backend] = {
    "torch": Backend(ssd_torch, _nothing_missing),
    "mamba_ssm": Backend(run_mamba_ssm, missing("mamba_ssm")),
    "fla": Backend(run_fla, missing("fla")),
}
"""Name → backend."""

FASTEST_ON_CUDA = ("mamba_ssm", "fla", "torch")
"""What "auto" means on a GPU: the first of these that can run there."""


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Return the backend that a request means: its own name, or for "auto" the fastest there.

    In fp64 "auto" is "torch": the kernels compute in fp32 at most.

    Raises:
        ValueError: for an unknown name; lists the known. For a backend that cannot run on the
            device; says what it lacks.
    """
    if backend == "auto":
        if device.type != "cuda" or dtype == torch.float64:
            return "torch"
        return next(name for name in FASTEST_ON_CUDA if BACKENDS[name].missing(device) is None)
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} must be one of auto, {', '.join(BACKENDS)}")
    missing = BACKENDS[backend].missing(device)
    if missing is not None:
        raise ValueError(f"{backend=} cannot run on {device}: {missing}")
    return backend
