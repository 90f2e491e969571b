"""The memory that runs, evaluations and audits were estimated to take, against what they take.

Each is carried out in a process of its own, which has done the same in tiny before, so that what
Python and torch take themselves does not count. A run takes two steps, with its evaluations, its
checkpoint and its result. `analysis.memory_bench` does the same for analyses.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from lab.bench.peak import measure_peak_mib
from lab.bench.ratio import Ratio
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.machine.growth import MANY_TOKENS
from lab.machine.memory import keep_freed_memory
from lab.models import LanguageModel
from lab.models.evaluation import evaluate
from lab.models.memory import estimate_evaluation
from lab.suite.audit import audit
from lab.suite.footprint import estimate_audit
from lab.training.experiment import carry_out
from lab.training.footprint import estimate
from lab.training.runs import Run
from lab.training.step_time import use_threads
from tasks import TASKS
from tasks.base import Task

MIB = 2**20
AUDITED_LENGTH, AUDITED_FIRST = 512, 16
"""Tokens of the rows of an audit, and rows of the tiny one before it."""
TARGET = 0.75
"""Target of the ratio: 1 minus the allowed error, as a share of what is measured."""


@dataclass(frozen=True)
class MemorySetting:
    """A run whose memory is estimated and measured; `options` are the task's."""

    stack: str
    d_model: int
    rows: int
    task: str
    options: Mapping[str, Any]
    layers: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        layers = "".join(f", {name}={value}" for name, value in self.layers.items())
        return f"{self.task}, {options}, {self.rows} rows, {self.stack}, d {self.d_model}{layers}"

    def describe(self, folder: Path) -> Run:
        """Return the run of two steps, in a folder."""
        train = TrainConfig(
            batch_size=self.rows,
            max_steps=2,
            test_rows=max(8, self.rows),
            precision="fp32",
            lengthen=False,
            early_stop=False,
        )
        model = ModelConfig(stack=self.stack, d_model=self.d_model, options=dict(self.layers))
        return Run(folder, TASKS[self.task](**self.options), model, train)

    def estimate(self) -> int:
        """Estimate the run, in bytes."""
        run = self.describe(Path("not written"))
        return estimate(run, run.build()).total

    def prepare(self, folder: Path) -> Callable[[], object]:
        """Train a tiny run in a folder, and return a call that trains the whole one there."""
        keep_freed_memory()
        runtime = Runtime(device="cpu", threads=1)
        carry_out(self.shrink().describe(folder / "tiny"), runtime)
        return partial(carry_out, self.describe(folder / "run"), runtime)

    def shrink(self) -> "MemorySetting":
        """Return a tiny run that imports and calls the same."""
        small = {"seq_len": 64, "vocab_size": 128, "n_pairs": 4}
        return replace(self, d_model=16, rows=4, options={n: small[n] for n in self.options})


SETTINGS = (
    MemorySetting("AM*2", 64, 128, "mqar", {"seq_len": 256, "vocab_size": 1024}),
    MemorySetting("AM*2", 64, 1024, "mqar", {"seq_len": 64, "vocab_size": 256}),
    MemorySetting("AM*2", 128, 8, "mqar", {"seq_len": 2048, "vocab_size": 8192}),
    MemorySetting("AM*2", 512, 4, "mqar", {"seq_len": 64, "vocab_size": 32768}),
    MemorySetting("SM*2", 64, 128, "mqar", {"seq_len": 256, "vocab_size": 1024}),
    MemorySetting("SE IE", 64, 64, "mqar", {"seq_len": 256, "vocab_size": 1024}),
    MemorySetting("IM*2", 64, 64, "copy", {"seq_len": 256}),
    MemorySetting(
        "AM*2",
        64,
        128,
        "fuzzy",
        {"seq_len": 256, "vocab_size": 256, "n_pairs": 16},
        {"A.mask": "soft"},
    ),
    MemorySetting("SM AM", 64, 128, "hops", {"seq_len": 256, "vocab_size": 256, "n_pairs": 60}),
    MemorySetting("AE*2", 64, 128, "flip_flop", {"seq_len": 256}),
)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model whose evaluation is estimated and measured, with all rows at once."""

    setting: MemorySetting

    def __str__(self) -> str:
        return f"evaluation, {self.setting}"

    def estimate(self) -> int:
        """Estimate it, in bytes."""
        task, model = self._build()
        return estimate_evaluation(task, model, self.setting.rows).total

    def prepare(self, folder: Path) -> Callable[[], object]:
        """Evaluate a tiny model, and return a call that evaluates the whole one."""
        replace(self, setting=self.setting.shrink())._build_call()()
        return self._build_call()

    def _build(self) -> tuple[Task, LanguageModel]:
        run = self.setting.describe(Path("not written"))
        return run.task, run.build().eval()

    def _build_call(self) -> Callable[[], object]:
        rows = self.setting.rows
        return partial(evaluate, *self._build(), rows=rows, rows_at_once=rows, seed=0)


@dataclass(frozen=True)
class AuditedTask:
    """A task whose audit is estimated and measured."""

    task: str

    def __str__(self) -> str:
        return f"audit, {self.task}, seq_len={AUDITED_LENGTH}"

    def estimate(self) -> int:
        """Estimate the audit, in bytes."""
        return estimate_audit(self._build(), tokens=MANY_TOKENS).total

    def prepare(self, folder: Path) -> Callable[[], object]:
        """Audit a tiny task, and return a call that audits the whole one."""
        audit(TASKS[self.task](**TASKS[self.task].presets["small"].options), rows=AUDITED_FIRST)
        return partial(audit, self._build())

    def _build(self) -> Task:
        return TASKS[self.task](seq_len=AUDITED_LENGTH)


EVALUATIONS = tuple(
    EvaluatedModel(setting)
    for setting in (
        MemorySetting("AM*2", 64, 1, "flip_flop", {"seq_len": 20_000}),
        MemorySetting("SM*2", 64, 1, "flip_flop", {"seq_len": 20_000}),
        MemorySetting("SE IE", 64, 32, "mqar", {"seq_len": 1024, "vocab_size": 2048}),
        MemorySetting("AM*2", 64, 16, "flip_flop", {"seq_len": 2048}, {"A.mask": "soft"}),
        MemorySetting("AM*2", 512, 64, "copy", {"seq_len": 256}),
        MemorySetting("SM AM", 64, 256, "hops", {"seq_len": 256, "vocab_size": 256, "n_pairs": 60}),
    )
)
AUDITS = tuple(map(AuditedTask, TASKS))


class Work(Protocol):
    """What is estimated and measured; text names it."""

    def estimate(self) -> int:
        """Estimate it, in bytes."""
        ...

    def prepare(self, folder: Path) -> Callable[[], object]:
        """Do tiny work of the same kind in a folder, and return a call that does the whole."""
        ...


def measure(works: Sequence[Work] = (*SETTINGS, *EVALUATIONS, *AUDITS)) -> Iterator[Ratio]:
    """Estimate each piece of work, and measure it (Linux)."""
    return map(compare_peak, works)


def compare_peak(work: Work) -> Ratio:
    """Estimate one piece of work, and measure it."""
    with use_threads(1):
        ours = work.estimate() / MIB
    with tempfile.TemporaryDirectory(prefix="lab-bench-") as folder:
        theirs = measure_peak_mib(partial(_prepare, work, Path(folder)))
    return Ratio(
        f"memory: {work}, estimated against measured",
        ours,
        theirs,
        "MiB",
        1 - abs(ours / theirs - 1),
        TARGET,
        f"estimated {ours / theirs:.2f} of what it takes",
    )


def _prepare(work: Work, folder: Path) -> Callable[[], object]:
    torch.set_num_threads(1)
    return work.prepare(folder)
