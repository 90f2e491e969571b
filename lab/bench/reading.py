"""A training step that computes only what is read, against the same step computed whole.

Both have the same weights, rows, loss and gradients (`lab.models.reading`), and take `fit`'s
optimizers. Process time counts all threads; beside other work it is steadier than wall time.
"""

import time
from collections.abc import Callable
from statistics import median, quantiles

from torch import nn

from lab.bench.ratio import Ratio
from lab.config import TrainConfig
from lab.models import LanguageModel, build
from lab.models.evaluation import score
from lab.ops.cross_entropy import linear_cross_entropy
from lab.training.loop import start
from tasks.base import Batch
from tasks.mqar import MQAR

STACKS = ("AM*2", "SM*2", "SE IE")
SETTINGS = ((64, 256, 64), (256, 8192, 16), (2048, 8192, 2))
"""(seq_len, vocab_size, rows a step): 4,096 tokens a step, a quarter of them scored."""
REPEATS = 9


def measure() -> list[Ratio]:
    """Measure the step of each stack at each setting."""
    return [_measure(stack, *setting) for stack in STACKS for setting in SETTINGS]


def _measure(stack: str, seq_len: int, vocab_size: int, rows: int) -> Ratio:
    model = build(stack, vocab_size=vocab_size, d_model=64)
    batch = MQAR(seq_len=seq_len, vocab_size=vocab_size).batch(size=rows)
    step = _prepare_step(model, batch)

    def compute_whole() -> None:
        with model.hooks([("hook_embed", lambda x, hook: None)]):  # a hook sees everything
            step()

    read, whole = [], []
    for _ in range(REPEATS + 1):
        for call, taken in ((step, read), (compute_whole, whole)):
            wall, process = time.perf_counter(), time.process_time()
            call()
            taken.append((time.process_time() - process, time.perf_counter() - wall))
    # The first call of each warms up.
    cpu, wall = (
        sorted(b[kind] / a[kind] for a, b in zip(read[1:], whole[1:], strict=True))
        for kind in (0, 1)
    )
    low, _, high = quantiles(cpu, n=4)
    return Ratio(
        f"{stack}, step that computes only what is read, T={seq_len}, V={vocab_size}, {rows} rows",
        1e3 * median(seconds for seconds, _ in read[1:]),
        1e3 * median(seconds for seconds, _ in whole[1:]),
        "ms of CPU",
        median(cpu),
        None,
        f"quartiles {low:.2f} to {high:.2f}; wall time {median(wall):.2f} ×",
    )


def _prepare_step(model: LanguageModel, batch: Batch) -> Callable[[], None]:
    config = TrainConfig()
    optimizers = start(model, config).optimizers.values()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def take() -> None:
        loss, _ = linear_cross_entropy(*score(model, batch, "fp32"))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return take
