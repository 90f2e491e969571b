"""Training steps on a GPU: recorded as CUDA graphs, as training takes them, against one by one.

Without recording, Python starts each kernel, and the GPU waits for it. Both sides are `fit`'s own
steps, from drawn rows to updated weights.
"""

from collections.abc import Callable

import torch

from lab.bench.ratio import Ratio, time_in_turns
from lab.bench.replay import count_kernels, wait_for
from lab.bench.stepping import describe_steps, take_steps

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
    ratios = []
    for stack, seq_len, vocab_size, rows in SETTINGS:
        for precision in ("fp32", "bf16"):
            setting = stack, seq_len, vocab_size, rows
            recorded, plain = (prepare(setting, precision, records=way) for way in (True, False))
            ours, theirs = time_in_turns(recorded, plain, REPEATS)
            kernels, busy = count_kernels(recorded)
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


def prepare(
    setting: tuple[str, int, int, int], precision: str, *, records: bool
) -> Callable[[], object]:
    """Return what takes a step of a training, recorded or not."""
    steps = take_steps(
        describe_steps(*setting), precision, torch.device("cuda"), may_record=records
    )
    step = wait_for(lambda: next(steps))
    for _ in range(WARM_UP):
        step()
    return step
