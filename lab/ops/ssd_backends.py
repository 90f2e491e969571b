"""The backends of state space duality, and the choice among them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lab.ops.ssd_chunked import ssd_torch
from lab.ops.ssd_inputs import SSDInputs
from lab.ops.ssd_peers import explain_missing_kernels, run_fla, run_mamba_ssm
from tasks.bounds import check_choice


class Backend(NamedTuple):
    """A way to compute `lab.ops.ssd.ssd`.

    Attributes:
        run: computes (y, state) from inputs that have been checked.
        missing: says why it cannot run on a device; None where it can. It must be cheap, and
            import nothing heavy unless the answer needs it.
    """

    run: Callable[[SSDInputs], tuple[Tensor, Tensor]]
    missing: Callable[[torch.device], str | None]


BACKENDS: dict[str, Backend] = {
    "torch": Backend(ssd_torch, lambda device: None),
    "mamba_ssm": Backend(run_mamba_ssm, partial(explain_missing_kernels, "mamba_ssm")),
    "fla": Backend(run_fla, partial(explain_missing_kernels, "fla")),
}
"""Name → backend."""

FASTEST_ON_CUDA = ("mamba_ssm", "torch")
"""On a GPU "auto" is the first of these that can run there."""


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Return the backend to use: the one named, or for "auto" the fastest on the device.

    In fp64 "auto" is "torch": the kernels compute in fp32 at most.

    Raises:
        ValueError: for an unknown name; lists the known. For a backend that cannot run on the
            device; says what it lacks.
    """
    if backend == "auto":
        if device.type != "cuda" or dtype == torch.float64:
            return "torch"
        return next(name for name in FASTEST_ON_CUDA if BACKENDS[name].missing(device) is None)
    check_choice("backend", backend, ("auto", *BACKENDS))
    missing = BACKENDS[backend].missing(device)
    if missing is not None:
        raise ValueError(f"{backend=} cannot run on {device}: {missing}")
    return backend
