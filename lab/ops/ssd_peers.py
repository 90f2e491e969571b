"""State space duality by public Triton kernels: mamba-ssm's chunk scan and fla's simple GLA.

Both run on CUDA; on a CPU only in Triton's interpreter, which checks them and is slow. They
compute in fp32 or less: on CUDA a product of fp32 numbers rounds its factors to TF32's 10 bits
unless TRITON_F32_DEFAULT=ieee is set before the first one. mamba-ssm's gradients add up in no
fixed order, unless torch.use_deterministic_algorithms is on.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lab import peers
from lab.ops.ssd_forms import repeat_groups


def run_mamba_ssm(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None,
    chunk_len: int,
    initial_state: Float[Tensor, "b h p n"] | None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return what `lab.ops.ssd.ssd` does, by `mamba_chunk_scan_combined`.

    Raises:
        ValueError: for fp64, which the kernels would round to fp32.
    """
    low = _common_dtype("mamba_ssm", x, dt, A, B, C, D, initial_state)
    kernel = peers.load("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    y, state = kernel(
        x.to(low),
        dt.float(),
        A.float(),
        B.to(low),
        C.to(low),
        _power_of_two(chunk_len, 256),
        D=None if D is None else D.float(),
        initial_states=None if initial_state is None else initial_state.float(),
        return_final_states=True,
    )
    return y.to(x.dtype), state


def run_fla(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None,
    chunk_len: int,
    initial_state: Float[Tensor, "b h p n"] | None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return what `lab.ops.ssd.ssd` does, by `chunk_simple_gla`: q = C, k = B, v = dt x, g = dt A.

    Its state is ours transposed. It knows neither groups nor a skip: each head gets its copy of
    B and C, and D x is added here.

    Raises:
        ValueError: for fp64, which the kernels would round to fp32.
    """
    low = _common_dtype("fla", x, dt, A, B, C, D, initial_state)
    kernel = peers.load("fla.ops.simple_gla.chunk").chunk_simple_gla
    y, state = kernel(
        q=repeat_groups(C, x.shape[2]).to(low),
        k=repeat_groups(B, x.shape[2]).to(low),
        v=(x.float() * dt.float()[..., None]).to(low),
        g=dt.float() * A.float(),
        scale=1.0,
        initial_state=None if initial_state is None else initial_state.float().mT.contiguous(),
        output_final_state=True,
        chunk_size=_power_of_two(chunk_len, 64),
    )
    if D is not None:
        y = torch.addcmul(y.float(), x.float(), D.float()[:, None])
    return y.to(x.dtype), state.mT


def missing(package: str) -> Callable[[torch.device], str | None]:
    """Return the function that says why a package's kernels cannot run on a device, or None."""

    def why(device: torch.device) -> str | None:
        absent = peers.explain_missing(package) or peers.explain_missing("triton")
        if absent is not None or device.type == "cuda":
            return absent
        return "it needs CUDA"

    return why


def _common_dtype(backend: str, *tensors: Tensor | None) -> torch.dtype:
    """Return the dtype in which x, B and C, which the kernels multiply, meet."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            raise ValueError(f"{backend=} computes in fp32, not in fp64: use backend='torch'")
    x, _, _, B, C, *_ = tensors
    assert x is not None
    assert B is not None
    assert C is not None
    return torch.promote_types(torch.promote_types(x.dtype, B.dtype), C.dtype)


def _power_of_two(chunk_len: int, most: int) -> int:
    """Return a chunk that the kernels take: a power of two, from 16 on and at most so long.

    Shorter ones do not fill a tile, longer ones not fit into a GPU's shared memory.
    """
    return min(max(1 << (chunk_len.bit_length() - 1), 16), most)
