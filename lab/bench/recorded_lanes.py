"""Eight runs as lanes of one CUDA graph, against as many recorded steps of one run."""

import torch

from lab.bench.ratio import Ratio, time_in_turns
from lab.bench.replay import count_kernels
from lab.bench.stepping import prepare_steps, take_steps_together

LANES = 8
STACKS = ("AM*2", "SM*2", "SE IE")
SIZES = ((64, 256, 64), (2048, 8192, 2))
"""(seq_len, vocab_size, rows a step)."""
WARM_UP, REPEATS = 3, 21


def measure() -> list[Ratio]:
    """Measure whole steps of each stack, at each size and in each precision."""
    return [
        _compare(stack, *sizes, precision)
        for stack in STACKS
        for sizes in SIZES
        for precision in ("fp32", "bf16")
    ]


def _compare(stack: str, seq_len: int, vocab_size: int, rows: int, precision: str) -> Ratio:
    setting, device = (stack, seq_len, vocab_size, rows), torch.device("cuda")
    before = _count_free_bytes()
    steppers = [prepare_steps(*setting, device, seed=z)[1] for z in range(LANES)]
    for _ in range(WARM_UP):
        take_steps_together(steppers, precision)
    taken = before - _count_free_bytes()
    alone = prepare_steps(*setting, device)[1]
    for _ in range(WARM_UP):
        alone.take_step(precision)
    if not (alone.recorded and all(each.recorded for each in steppers)):
        raise RuntimeError(f"{stack}: its steps cannot be recorded")

    def step_together() -> None:
        take_steps_together(steppers, precision)
        torch.cuda.synchronize()

    def step_apart() -> None:
        for _ in range(LANES):
            alone.take_step(precision)
        torch.cuda.synchronize()

    ours, theirs = time_in_turns(step_together, step_apart, REPEATS)
    kernels, busy = count_kernels(step_together)
    return Ratio.of_costs(
        f"{stack}, recorded steps of {LANES} lanes, T={seq_len}, V={vocab_size}, {rows} rows, "
        f"{precision}",
        1e3 * ours,
        1e3 * theirs,
        "ms",
        None,
        f"{kernels} kernels, {1e3 * busy:.2f} ms; {taken / 2**20:,.0f} MiB for all lanes; "
        f"{torch.cuda.get_device_name()}",
    )


def _count_free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
