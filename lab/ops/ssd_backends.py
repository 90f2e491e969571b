"""The backends of state space duality, and the choice among them."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from lab import peers
from lab.ops.ssd_chunked import ssd_torch
from lab.ops.ssd_forms import repeat_groups
from lab.ops.ssd_inputs import SSDInputs
from tasks.bounds import check_choice

HOPPER = 9
"""Major compute capability of H100 and H200."""


def run_mamba_ssm(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """Return what `lab.ops.ssd.ssd` does, by `mamba_chunk_scan_combined`.

    Raises:
        ValueError: for fp64, which the kernels would round to fp32.
    """
    x, dt, A, B, C, D, chunk_len, initial_state = inputs
    low = _find_common_dtype("mamba_ssm", inputs)
    kernel = peers.load("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    y, state = kernel(
        x.to(low),
        dt.float(),
        A.float(),
        B.to(low),
        C.to(low),
        _round_chunk_len(chunk_len, 256),
        D=None if D is None else D.float(),
        initial_states=None if initial_state is None else initial_state.float(),
        return_final_states=True,
    )
    return y.to(x.dtype), state


def run_fla(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """Return what `lab.ops.ssd.ssd` does, by `chunk_simple_gla`: q = C, k = B, v = dt x, g = dt A.

    Its state is ours transposed. It has neither groups nor a skip: each head gets its own copy of
    B and C, and D x is added here.

    Raises:
        ValueError: for fp64, which the kernels would round to fp32.
    """
    x, dt, A, B, C, D, chunk_len, initial_state = inputs
    low = _find_common_dtype("fla", inputs)
    kernel = peers.load("fla.ops.simple_gla.chunk").chunk_simple_gla
    y, state = kernel(
        q=repeat_groups(C, x.shape[2]).to(low),
        k=repeat_groups(B, x.shape[2]).to(low),
        v=(x.float() * dt.float()[..., None]).to(low),
        g=dt.float() * A.float(),
        scale=1.0,
        initial_state=None if initial_state is None else initial_state.float().mT.contiguous(),
        output_final_state=True,
        chunk_size=_round_chunk_len(chunk_len, 64),
    )
    if D is not None:
        y = torch.addcmul(y.float(), x.float(), D.float()[:, None])
    return y.to(x.dtype), state.mT


def explain_missing_kernels(package: str, device: torch.device) -> str | None:
    """Return why a package's kernels cannot run on a device, or None."""
    absent = peers.explain_missing(package) or peers.explain_missing("triton")
    if absent is not None:
        return absent
    if device.type != "cuda":
        return "it needs CUDA"
    trains = torch.is_grad_enabled()
    return _explain_wrong_gradients(device) if package == "fla" and trains else None


def _explain_wrong_gradients(device: torch.device) -> str | None:
    """Return why fla refuses to compute gradients on a device, or None.

    fla itself raises in the first backward pass, after minutes of compiling.
    """
    triton = TorchVersion(peers.version("triton"))
    hopper = torch.cuda.get_device_capability(device)[0] == HOPPER
    if hopper and "3.4.0" <= triton < "3.7.1" and importlib.util.find_spec("tilelang") is None:
        return (
            f"on a Hopper GPU its gradients are wrong with Triton 3.4.0 to 3.7.0, and this is "
            f"{triton}: use Triton 3.7.1, or install tilelang"
        )
    return None


def _find_common_dtype(backend: str, inputs: SSDInputs) -> torch.dtype:
    """Return the dtype for x, B and C, which the kernels multiply with each other."""
    if any(isinstance(z, Tensor) and z.dtype == torch.float64 for z in inputs):
        raise ValueError(f"{backend=} computes in fp32, not in fp64: use backend='torch'")
    x_or_B = torch.promote_types(inputs.x.dtype, inputs.B.dtype)
    return torch.promote_types(x_or_B, inputs.C.dtype)


def _round_chunk_len(chunk_len: int, most: int) -> int:
    """Return a chunk length that the kernels accept: a power of two in 16 … most.

    Shorter chunks do not fill a tile, longer ones do not fit into a GPU's shared memory.
    """
    return min(max(1 << (chunk_len.bit_length() - 1), 16), most)


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
