"""On a GPU: recorded training steps against one call after another, and SSD's Triton kernels.

Without recording, Python starts each kernel, and the GPU waits for it. A first call compiles and
tunes the kernels, and is not timed.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lab.bench.ratio import Contest, Ratio
from lab.config import ModelConfig, TrainConfig
from lab.ops.ssd import BACKENDS, ssd
from lab.training.graphs import RecordedCall
from lab.training.loop import fit, start
from lab.training.run import Run
from tasks.mqar import MQAR

SETTINGS = (
    ("AM*2", 64, 256, 64),
    ("AM*2", 256, 8192, 16),
    ("AM*2", 2048, 8192, 2),
    ("AM*2", 2048, 8192, 32),
    ("SM*2", 64, 256, 64),
    ("SM*2", 2048, 8192, 2),
    ("SE IE", 64, 256, 64),
)
"""(stack, seq_len, vocab_size, rows a step)."""
TARGET, MOST_TOKENS = 5.0, 2**13
"""The promised ratio, and the tokens of a step up to which it is: kernels of more are long."""
KERNELS = ("mamba_ssm", "fla")
SHAPES = ((4, 2048, 4, 64, 128), (2, 2048, 1, 64, 128))
"""(rows, seq_len, heads, width of a head, state); the second is a layer of hard recall at d 64."""
REPEATS = 21


def measure() -> Iterator[Ratio]:
    """Measure each setting and shape, in fp32 and bf16; name kernels that cannot run here."""
    for setting in SETTINGS:
        for precision in ("fp32", "bf16"):
            stack, seq_len, vocab_size, rows = setting
            where = f"{stack}, T={seq_len}, V={vocab_size}, {rows} rows, {precision}"
            name = f"recorded step against one call after another, {where}"
            ours, theirs = (partial(_prepare_step, setting, precision, r) for r in (True, False))
            target = TARGET if rows * seq_len <= MOST_TOKENS else None
            yield from Contest(name, ours, theirs, target).measure(REPEATS)
    for kernel in KERNELS:
        if reason := BACKENDS[kernel].missing(torch.device("cuda")):
            print(f"{kernel}: {reason}", file=sys.stderr)
            continue
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                name = f"SSD, torch against {kernel}, {shape}, {str(dtype)[6:]}"
                ours, theirs = (partial(_prepare_ssd, b, shape, dtype) for b in ("torch", kernel))
                yield from Contest(name, ours, theirs).measure(REPEATS)


def _prepare_step(
    setting: tuple[str, int, int, int], precision: str, may_record: bool
) -> Callable[[], object]:
    """Return what takes a step of a training, from drawn rows to updated weights."""
    stack, seq_len, vocab_size, rows = setting
    task = MQAR(seq_len=seq_len, vocab_size=vocab_size)
    train = TrainConfig(batch_size=rows, eval_every=TrainConfig.max_steps)
    run = Run(Path("not written"), task, ModelConfig(stack=stack, d_model=64), train)
    state = start(run.build().to("cuda"), train, precision)
    steps = fit(task, state, train, may_record=may_record)
    return _wait_for(lambda: next(steps))


def _prepare_ssd(
    backend: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> Callable[[], object]:
    """Return a call of forward and backward: its CUDA graph where one can record it."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, seq_len, heads, width, state = shape

    def draw(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cuda").to(dtype)

    x = draw(rows, seq_len, heads, width)
    B, C = (draw(rows, seq_len, 1, state) for _ in range(2))
    dt = 0.1 * draw(rows, seq_len, heads, dtype=torch.float32).sigmoid()
    A = -draw(heads, dtype=torch.float32).exp()
    leaves = [z.requires_grad_() for z in (x, dt, A, B, C)]
    against = torch.ones_like(x)

    def call() -> object:
        return torch.autograd.grad(ssd(x, dt, A, B, C, backend=backend)[0], leaves, against)

    call()
    try:
        return _wait_for(RecordedCall(call, torch.device("cuda")))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return _wait_for(call)


def _wait_for(call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that does a call three times first, then waits for the GPU each time."""

    def wait() -> None:
        call()
        torch.cuda.synchronize()

    for _ in range(3):
        wait()
    return wait
