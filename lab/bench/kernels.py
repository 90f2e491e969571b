"""State space duality on a GPU, forward and backward: torch's form against public Triton kernels.

Both sides are CUDA graphs, as in training, unless the note says that one runs without. A first call
compiles and tunes the kernels; it is not in their time, and the note says how long it took. Triton
rounds factors in fp32 to TF32's 10 bits, torch does not.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lab.bench.ratio import Ratio, time_in_turns
from lab.bench.replay import prepare_replay, wait_for
from lab.ops.ssd import ssd
from lab.ops.ssd_backends import BACKENDS
from lab.peers import MissingPeerError

KERNELS = ("mamba_ssm", "fla")
SHAPES = ((4, 2048, 4, 64, 128), (2, 2048, 1, 64, 128))
"""(rows, seq_len, heads, width of a head, state); the second is a layer of hard recall at d 64."""
TOLERANCES = {torch.float32: 8 * 2**-10, torch.bfloat16: 8 * 2**-7}
"""Largest difference allowed, of the largest entry."""
REPEATS = 21


def measure() -> Iterator[Ratio]:
    """Measure time and peak memory at each shape, in each precision.

    Kernels that cannot run here are named on stderr, with the reason.

    Raises:
        MissingPeerError: where none can run.
        RuntimeError: where values or gradients of the two sides differ.
    """
    missing = {name: BACKENDS[name].missing(torch.device("cuda")) for name in KERNELS}
    reasons = [f"{name}: {why}" for name, why in missing.items() if why is not None]
    if len(reasons) == len(KERNELS):
        raise MissingPeerError("; ".join(reasons))
    for reason in reasons:
        print(reason, file=sys.stderr)
    for kernel in KERNELS:
        if missing[kernel] is None:
            for shape in SHAPES:
                for dtype in TOLERANCES:
                    yield from _compare(kernel, shape, dtype)


def _compare(kernel: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> list[Ratio]:
    ours, theirs = (
        prepare(backend, shape, dtype, torch.device("cuda")) for backend in ("torch", kernel)
    )
    began = time.perf_counter()
    theirs()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    error = compare_numbers(ours(), theirs())
    if not error <= TOLERANCES[dtype]:
        raise RuntimeError(f"{kernel}: numbers differ by {error:.1e} of the largest")
    rows, seq_len, heads, width, state = shape
    where = (
        f"SSD, torch against {kernel}, {rows} rows, T={seq_len}, {heads} × {width}, state {state}, "
        f"{str(dtype)[6:]}"
    )
    replay, other = _replay(ours), _replay(theirs)
    our_s, their_s = time_in_turns(replay or wait_for(ours), other or wait_for(theirs), REPEATS)
    our_peak, their_peak = _measure_peak_mib(ours), _measure_peak_mib(theirs)
    note = f"within {error:.0e}; first call of {kernel} {first:.0f} s"
    note += "".join(
        f"; {side} without a graph"
        for side, found in (("torch", replay), (kernel, other))
        if found is None
    )
    return [
        Ratio.of_costs(where, 1e3 * our_s, 1e3 * their_s, "ms", None, note),
        Ratio.of_costs(f"{where}: memory", our_peak, their_peak, "MiB", None),
    ]


def prepare(
    backend: str,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], list[Tensor]]:
    """Return a function that computes y and the gradients of x, dt, A, B and C."""
    generator = torch.Generator(device).manual_seed(0)
    rows, seq_len, heads, width, state = shape

    def draw(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    x = draw(rows, seq_len, heads, width)
    B, C = (draw(rows, seq_len, 1, state) for _ in range(2))
    dt = 0.1 * draw(rows, seq_len, heads, dtype=torch.float32).sigmoid()
    A = -draw(heads, dtype=torch.float32).exp()
    leaves = [z.requires_grad_() for z in (x, dt, A, B, C)]
    against = draw(rows, seq_len, heads, width)

    def call() -> list[Tensor]:
        y, _ = ssd(x, dt, A, B, C, backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, against)]

    return call


def _replay(call: Callable[[], object]) -> Callable[[], None] | None:
    """Return a function that replays a call; None where no graph can record it."""
    try:
        return prepare_replay(call, torch.device("cuda"))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


def compare_numbers(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference, of the largest entry of its tensor; NaN if any is NaN."""
    errors = [
        (mine - other).abs().max() / other.abs().max()
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return torch.stack([error.double() for error in errors]).max().item()


def _measure_peak_mib(call: Callable[[], object]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
