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


def name_backend(backend: str) -> str:
    """Return the backend that a name means: "torch" for "auto", also on a GPU.

    A CUDA graph replays torch's form there; the kernels of others are first compiled and tuned, at
    every row length anew, which takes longer than most trainings (LOG.md).
    """
    return "torch" if backend == "auto" else backend


def resolve_backend(backend: str, device: torch.device) -> str:
    """Return the backend to use.

    Raises:
        ValueError: for an unknown name; lists the known. For a backend that cannot run on the
            device; says what it lacks.
    """
    check_choice("backend", backend, ("auto", *BACKENDS))
    name = name_backend(backend)
    missing = BACKENDS[name].missing(device)
    if missing is not None:
        raise ValueError(f"{backend=} cannot run on {device}: {missing}")
    return name
