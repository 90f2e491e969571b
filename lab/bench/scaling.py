"""How time and memory grow with each size: fitted exponents, and the bounds that they obey.

Each curve changes one size of a step, forward and backward on one thread. The exponent p of
cost ∝ sizeᵖ is the slope of a line through the logarithms of the largest `FITTED` sizes. What does
not grow with the size makes p smaller, so a bound is an upper one:

    seq_len    time 2 for attention, whose pairs grow with the square; 1 for SSD in chunks
    d_model    time 2, by the weights; n_experts, forward: 1/2, by product keys
    all else   time 1;  memory 1 throughout

Time is this process's CPU time: the median of calls that take turns. Memory is the peak of the
bytes of the tensors, so it is the same each time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
}
FITTED = 3
"""Largest sizes that the line goes through."""
REPEATS = 5
SLACK = 0.9
"""Least bound over exponent: times vary by some per cent, and caches end where sizes grow."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Axis:
    """A size that is changed.

    Attributes:
        name: of the size.
        values: smallest first.
        bound: the exponent of time is at most this.
        changes: what else differs from `BASE`.
        prepare: returns the call to measure, given all settings.
    """

    name: str
    values: tuple[int, ...]
    bound: float
    changes: dict[str, Any]
    prepare: Callable[[dict[str, Any]], Call]


@dataclass(frozen=True)
class CostCurve(Ratio):
    """Costs by size; `ours` is the fitted exponent of time, `theirs` its bound.

    Attributes:
        stack: the model.
        axis: name of the size.
        sizes: its values.
        milliseconds: of CPU time, at each.
        mebibytes: of tensors, at each.
    """

    stack: str = ""
    axis: str = ""
    sizes: tuple[int, ...] = ()
    milliseconds: tuple[float, ...] = ()
    mebibytes: tuple[float, ...] = ()


def _prepare_step(given: dict[str, Any]) -> Call:
    """Return the gradient of a batch."""
    model, batch = _make(given)
    return lambda: differentiate(model, batch, "fp32")


def _prepare_forward(given: dict[str, Any]) -> Call:
    model, batch = _make(given)

    @torch.no_grad()
    def call() -> None:
        score(model, batch, "fp32")

    return call


def _make(given: dict[str, Any], seed: int = 0):
    """Return a model and a batch for it."""
    task = MQAR(seq_len=given["seq_len"], vocab_size=given["vocab_size"], n_pairs=given["n_pairs"])
    model = build(
        given["stack"],
        vocab_size=task.vocab_size,
        d_model=given["d_model"],
        options=given["options"],
        seed=seed,
    )
    return model, task.batch(size=given["rows"], seed=seed)


AXES = (
    Axis("seq_len", (256, 512, 1024, 2048, 4096), 2, {"rows": 1}, _prepare_step),
    Axis("seq_len", (256, 512, 1024, 2048, 4096), 1, {"rows": 1, "stack": "SM*2"}, _prepare_step),
    Axis("d_model", (32, 64, 128, 256, 512), 2, {}, _prepare_step),
    Axis("n_pairs", (4, 8, 16, 32, 64), 1, {}, _prepare_step),
    Axis("vocab_size", (2048, 4096, 8192, 16_384, 32_768), 1, {}, _prepare_step),
    Axis("layers", (1, 2, 4, 8), 1, {}, _prepare_step),
    Axis("n_experts", (256, 1024, 4096, 16_384, 65_536), 0.5, {"stack": "AE*2"}, _prepare_forward),
)


def measure() -> list[Ratio]:
    """Measure every axis."""
    with use_threads(1):
        return [trace(axis) for axis in AXES]


def trace(axis: Axis) -> CostCurve:
    """Measure the costs along an axis, and fit their exponents."""
    settings = [_set(axis, value) for value in axis.values]
    calls = [axis.prepare(given) for given in settings]
    peaks = [measure_peak(call) / 2**20 for call in calls]  # warms up, too
    spent = [1e3 * median(taken) for taken in take_turns(calls, REPEATS, time.process_time)]
    exponent, growth = fit_exponent(axis.values, spent), fit_exponent(axis.values, peaks)
    stack = settings[0]["stack"] if axis.name != "layers" else "AM"
    what = "forward" if axis.prepare is _prepare_forward else "forward and backward"
    return CostCurve(
        f"{stack}, {what}: growth with {axis.name}, {axis.values[0]:,} to {axis.values[-1]:,}",
        exponent,
        axis.bound,
        "as exponent of CPU time",
        axis.bound / max(exponent, 1e-3),
        SLACK,
        f"{spent[0]:.3g} to {spent[-1]:.3g} ms; memory {peaks[0]:.3g} to {peaks[-1]:.3g} MiB, "
        f"exponent {growth:.2f} of at most 1",
        stack,
        axis.name,
        axis.values,
        tuple(spent),
        tuple(peaks),
    )


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the slope of a least-squares line through the last logarithms of costs and sizes."""
    x, y = np.log(sizes[-FITTED:]), np.log(costs[-FITTED:])
    return float(np.polyfit(x, y, 1)[0])


def _set(axis: Axis, value: int) -> dict[str, Any]:
    """Return all settings at a value of an axis."""
    given = {**BASE, **axis.changes}
    if axis.name == "layers":
        return {**given, "stack": f"AM*{value}"}
    if axis.name == "n_experts":
        return {**given, "options": {"E.n_experts": value}}
    return {**given, axis.name: value}
