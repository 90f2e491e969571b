"""State space duality (SSD): a linear recurrence with a scalar decay for each head and token.

    h_t = exp(dt_t A) h_{t−1} + dt_t x_t ⊗ B_t,   y_t = h_t C_t + D x_t

`ssd` computes it in chunks: masked attention within a chunk, and a state carried across chunks.
`ssd_step` computes one token. `lab.ops.ssd_forms` has the slow, obvious forms. Groups are
interleaved: head h uses B and C of group h // (H/G).
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.torch_version import TorchVersion

from lab import peers
from lab.ops.precision import keep_dtypes, promote
from lab.ops.ssd_chunked import ssd_chunked
from lab.ops.ssd_forms import repeat_groups
from tasks.bounds import check_choice

HOPPER = 9
"""Major compute capability of H100 and H200."""


class SSDInputs(NamedTuple):
    """What state space duality is computed from; `ssd` describes each."""

    x: Float[Tensor, "b t h p"]
    dt: Float[Tensor, "b t h"]
    A: Float[Tensor, " h"]
    B: Float[Tensor, "b t g n"]
    C: Float[Tensor, "b t g n"]
    D: Float[Tensor, " h"] | None
    chunk_len: int
    initial_state: Float[Tensor, "b h p n"] | None

    def check(self) -> None:
        """Check all shapes against x's and B's, before a kernel reads past the end of a tensor.

        Raises:
            ValueError: for shapes that do not fit, or chunk_len < 1.
        """
        b, t, h, p = self.x.shape
        g, n = self.B.shape[-2:]
        if t < 1:
            raise ValueError("x has t=0 tokens, must have at least 1")
        if self.chunk_len < 1:
            raise ValueError(f"chunk_len={self.chunk_len} must be at least 1")
        if g < 1 or h % g:
            raise ValueError(f"B has g={g} groups, must divide x's h={h} heads")
        expected = {
            "dt [b t h]": (self.dt, (b, t, h)),
            "A [h]": (self.A, (h,)),
            "B [b t g n]": (self.B, (b, t, g, n)),
            "C [b t g n]": (self.C, (b, t, g, n)),
            "D [h]": (self.D, (h,)),
            "initial_state [b h p n]": (self.initial_state, (b, h, p, n)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, must be {list(shape)}")


@keep_dtypes
def ssd(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, " h"] | None = None,
    chunk_len: int = 256,
    initial_state: Float[Tensor, "_ _ _ _"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
    """Return y, in x's dtype, and the state after the last token, in fp32 at least.

    The state lets a row be computed in parts:

    >>> import torch
    >>> x, dt, A = torch.randn(1, 8, 2, 4), torch.rand(1, 8, 2), -torch.ones(2)
    >>> B, C = torch.randn(2, 1, 8, 1, 16)
    >>> y, _ = ssd(x, dt, A, B, C)
    >>> _, state = ssd(x[:, :5], dt[:, :5], A, B[:, :5], C[:, :5])
    >>> rest, _ = ssd(x[:, 5:], dt[:, 5:], A, B[:, 5:], C[:, 5:], initial_state=state)
    >>> torch.allclose(y[:, 5:], rest, atol=1e-5)
    True

    Args:
        x: what tokens write, t ≥ 1.
        dt: step sizes, ≥ 0; they scale both the decay and the write, so that a token with dt = 0
            does not change the state.
        A: decay rates, ≤ 0; log-decay is dt·A.
        B: where tokens write in the state; g divides h.
        C: where tokens read.
        D: weight of the skip from x to y; None for no skip.
        chunk_len: most tokens of a chunk; the last one may be shorter. Any value gives the same
            result. Backend "torch" uses shorter chunks where they are faster.
        initial_state: [b h p n], the state before the first token; None is zero.
        backend: a name in `BACKENDS`, or "auto" for the fastest that is there.

    Raises:
        ValueError: for shapes that do not fit, chunk_len < 1, an unknown backend, or one that
            cannot run on x's device.
        RuntimeError: when the gradient of a backend other than "torch" is to be differentiated.

    Source: lst:ssd_algorithm_pytorch, errata S1–S3. Departs: the state is passed from chunk
        to chunk, so that no sum over chunks can run over the wrong index (S2).
    """
    inputs = SSDInputs(x, dt, A, B, C, D, chunk_len, initial_state)
    inputs.check()
    chosen = resolve_backend(backend, x.device)
    y, state = BACKENDS[chosen].run(inputs)
    if chosen == "torch" or torch.compiler.is_compiling():
        return y, state

    def refuse(grad: Tensor | None) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"SSD's backend={chosen!r} has no second derivative: build it with backend='torch'"
            )

    for z in (y, state):
        if z.requires_grad:
            z.register_hook(refuse)
    return y, state


@keep_dtypes
def ssd_step(
    x: Float[Tensor, "b h p"],
    dt: Float[Tensor, "b h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b g n"],
    C: Float[Tensor, "b g n"],
    D: Float[Tensor, " h"] | None,
    state: Float[Tensor, "_ _ _ _"],
) -> tuple[Float[Tensor, "b h p"], Float[Tensor, "b h p n"]]:
    """Return y of one token, in x's dtype, and the state after it, in fp32 at least: decoding.

    Args:
        x: what the token writes; arguments are those of `ssd` without the time axis.
        dt: step sizes, ≥ 0.
        A: decay rates, ≤ 0.
        B: where the token writes in the state; g divides h.
        C: where the token reads.
        D: weight of the skip from x to y; None for no skip.
        state: [b h p n], the state before the token.

    Raises:
        ValueError: for shapes that do not fit.
    """
    SSDInputs(x[:, None], dt[:, None], A, B[:, None], C[:, None], D, 1, state).check()
    high = promote(x)
    wide, dt, A, state = (z.to(high) for z in (x, dt, A, state))
    heads_in_group = x.shape[1] // B.shape[1]
    B, C = (z.to(high).repeat_interleave(heads_in_group, dim=1) for z in (B, C))
    write = (dt[..., None] * wide)[..., None] * B[..., None, :]
    state = (dt * A).exp()[..., None, None] * state + write
    y = (state @ C[..., None])[..., 0]
    if D is not None:
        y = y + D.to(high)[:, None] * wide
    return y.to(x.dtype), state


def run_torch(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """Return what `ssd` does, in torch."""
    x, dt, A, B, C, D, chunk_len, initial_state = inputs
    high = promote(x)
    log_decay = dt.to(high) * A.to(high)
    return ssd_chunked(x, dt, log_decay, B, C, D, chunk_len, initial_state)


def run_mamba_ssm(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """Return what `ssd` does, by `mamba_chunk_scan_combined`.

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
    """Return what `ssd` does, by `chunk_simple_gla`: q = C, k = B, v = dt x, g = dt A.

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
    """A way to compute `ssd`.

    Attributes:
        run: computes (y, state) from inputs that have been checked.
        missing: says why it cannot run on a device; None where it can. It must be cheap, and
            import nothing heavy unless the answer needs it.
    """

    run: Callable[[SSDInputs], tuple[Tensor, Tensor]]
    missing: Callable[[torch.device], str | None]


BACKENDS: dict[str, Backend] = {
    "torch": Backend(run_torch, lambda device: None),
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
