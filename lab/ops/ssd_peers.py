"""State space duality by public Triton kernels: mamba-ssm's chunk scan and fla's simple GLA.

Both need CUDA; on a CPU they run only in Triton's interpreter, which is for tests and slow. They
compute in fp32 or less: on CUDA a product of fp32 numbers rounds its factors to TF32's 10 bits
unless TRITON_F32_DEFAULT=ieee is set before the first product. mamba-ssm sums gradients in no fixed
order, unless torch.use_deterministic_algorithms is on.
"""

import importlib.util

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from lab import peers
from lab.ops.ssd_forms import repeat_groups
from lab.ops.ssd_inputs import SSDInputs

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
