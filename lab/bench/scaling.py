"""How time and memory grow with each size: fitted exponents, and the bounds that they obey.

Each line changes one size of a step, forward and backward on one thread. The exponent p of
cost ∝ sizeᵖ is the slope of a line through the logarithms of the largest `FITTED` sizes. What does
not grow with the size makes p smaller, so a bound is an upper one. Time is this process's CPU time:
the median of calls that take turns. Memory is the peak of the bytes of the tensors.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from lab.bench.peak import measure_peak
from lab.bench.ratio import Ratio, take_turns
from lab.machine import use_threads
from lab.models import build
from lab.models.evaluation import score
from lab.training.loop import differentiate
from tasks.mqar import MQAR

BASE: dict[str, Any] = {
    "stack": "AM*2",
    "seq_len": 256,
    "vocab_size": 8192,
    "d_model": 64,
    "n_pairs": 64,
    "rows": 4,
    "options": {},
    "forward": False,
}
AXES: tuple[tuple[str, float, list[dict[str, Any]]], ...] = (
    ("seq_len", 2, [{"seq_len": 256 << i, "rows": 1} for i in range(5)]),
    ("seq_len", 1, [{"seq_len": 256 << i, "rows": 1, "stack": "SM*2"} for i in range(5)]),
    ("d_model", 2, [{"d_model": 32 << i} for i in range(5)]),
    ("n_pairs", 1, [{"n_pairs": 4 << i} for i in range(5)]),
    ("vocab_size", 1, [{"vocab_size": 2048 << i} for i in range(5)]),
    ("layers", 1, [{"stack": f"AM*{1 << i}"} for i in range(4)]),
    (
        "n_experts",
        0.5,
        [
            {"stack": "AE*2", "options": {"E.n_experts": 256 << 2 * i}, "forward": True}
            for i in range(5)
        ],
    ),
)
"""(size, bound of the exponent of time, what differs from `BASE` at each value). Attention's pairs
grow with the square of the length, weights with that of the width; SSD's chunks, and all else, grow
linearly; product keys find experts in the square root of their number."""
FITTED, REPEATS = 3, 5
SLACK = 0.9
"""Least bound over exponent: times vary by some per cent, and caches end where sizes grow."""


def measure() -> Iterator[Ratio]:
    """Measure every axis."""
    with use_threads(1):
        for name, bound, changes in AXES:
            yield _trace(name, bound, changes)


def _trace(name: str, bound: float, changes: Sequence[dict[str, Any]]) -> Ratio:
    """Measure the costs along an axis, whose values at least double, and fit their exponents."""
    calls = [_prepare(BASE | change) for change in changes]
    peaks = [measure_peak(call) / 2**20 for call in calls]  # warms up, too
    spent = [1e3 * median(taken) for taken in take_turns(calls, REPEATS, time.process_time)]
    steps = 4 if name == "n_experts" else 2
    sizes = [float(steps**i) for i in range(len(changes))]
    exponent, growth = fit_exponent(sizes, spent), fit_exponent(sizes, peaks)
    given = BASE | changes[0]
    return Ratio(
        f"{given['stack']}: growth with {name}, {len(changes)} sizes",
        exponent,
        bound,
        "as exponent of CPU time",
        bound / max(exponent, 1e-3),
        SLACK,
        f"{spent[0]:.3g} to {spent[-1]:.3g} ms; memory {peaks[0]:.3g} to {peaks[-1]:.3g} MiB, "
        f"exponent {growth:.2f} of at most 1",
    )


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the slope of a least-squares line through the last logarithms of costs and sizes."""
    x, y = np.log(sizes[-FITTED:]), np.log(costs[-FITTED:])
    return float(np.polyfit(x, y, 1)[0])


def _prepare(given: dict[str, Any]) -> Callable[[], object]:
    """Return a call of a batch, forward and backward unless forward alone is asked for."""
    task = MQAR(seq_len=given["seq_len"], vocab_size=given["vocab_size"], n_pairs=given["n_pairs"])
    model = build(
        given["stack"],
        vocab_size=task.vocab_size,
        d_model=given["d_model"],
        options=given["options"],
    )
    batch = task.batch(size=given["rows"])
    if given["forward"]:
        return partial(torch.no_grad()(score), model, batch, "fp32")
    return partial(differentiate, model, batch, "fp32")
