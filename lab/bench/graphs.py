"""Training steps on a GPU: recorded as CUDA graphs, as training takes them, against one by one.

Without recording, Python starts each kernel, and the GPU waits for it. Both sides are `fit`'s own
steps, from drawn rows to updated weights. Without a GPU there is nothing to measure.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lab.bench.ratio import Ratio, time_in_turns
from lab.config import ModelConfig, TrainConfig
from lab.machine.clocks import read_clocks
from lab.training.fit import Stepper, start
from lab.training.runs import Run
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
WARM_UP, REPEATS = 3, 21


def measure() -> list[Ratio]:
    """Measure each setting in each precision, with the kernels of a step and how fast they are."""
    if not torch.cuda.is_available():
        return []
    ratios = []
    for stack, seq_len, vocab_size, rows in SETTINGS:
        for precision in ("fp32", "bf16"):
            recorded = _prepare(stack, seq_len, vocab_size, rows, precision, records=True)
            plain = _prepare(stack, seq_len, vocab_size, rows, precision, records=False)
            ours, theirs = time_in_turns(recorded, plain, REPEATS)
            kernels, busy = _count_kernels(recorded)
            where = f"{stack}, T={seq_len}, V={vocab_size}, {rows} rows, {precision}"
            ratios.append(
                Ratio.of_costs(
                    f"recorded step against one call after another, {where}",
                    1e3 * ours,
                    1e3 * theirs,
                    "ms",
                    TARGET if rows * seq_len <= MOST_TOKENS else None,
                    f"{kernels} kernels, {1e3 * busy:.2f} ms; {torch.cuda.get_device_name()}",
                )
            )
    return ratios


def _prepare(
    stack: str, seq_len: int, vocab_size: int, rows: int, precision: str, *, records: bool
) -> Callable[[], object]:
    """Return what takes a step of a run that does not lengthen, recorded or not."""
    task = MQAR(seq_len=seq_len, vocab_size=vocab_size)
    train = TrainConfig(batch_size=rows, eval_every=TrainConfig.max_steps, lengthen=False)
    run = Run(Path("not written"), task, ModelConfig(stack=stack, d_model=64), train)
    stepper = Stepper(task, start(run.build().to("cuda"), train), train)
    stepper.may_record = records

    def step() -> None:
        batch = stepper.draw()
        assert batch is not None
        stepper.update(stepper.differentiate(batch, precision), read_clocks())
        torch.cuda.synchronize()

    for _ in range(WARM_UP):
        step()
    if records and not stepper.recorded:
        raise RuntimeError(f"{stack}: its steps cannot be recorded")
    return step


def _count_kernels(step: Callable[[], object]) -> tuple[int, float]:
    """Return how many kernels a step runs, and their seconds."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        step()
    kernels = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    return len(kernels), sum(event.device_time for event in kernels) / 1e6
