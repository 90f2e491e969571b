"""The memory that analyses were estimated to take, against what they take.

`lab bench --only memory` measures it beside runs, evaluations and audits.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from analysis.base import Subject
from analysis.examination import examine
from analysis.memory import estimate_memory
from lab.bench import memory
from lab.bench.memory import MemorySetting
from lab.bench.ratio import Ratio
from lab.config import Runtime
from lab.training.experiment import carry_out
from lab.training.runs import Run


@dataclass(frozen=True)
class AnalysedRun:
    """A run of two steps of which all analyses are estimated and measured, with all its rows."""

    setting: MemorySetting

    def __str__(self) -> str:
        return f"analyses, {self.setting}"

    def estimate(self) -> int:
        """Estimate the analyses, in bytes."""
        run = self.setting.describe(Path("not written"))
        return estimate_memory(run.build().eval(), run.task, self.setting.rows).total

    def prepare(self, folder: Path) -> Callable[[], object]:
        """Analyse a tiny run in a folder, and return a call that analyses the whole one there.

        Both are trained in a process of their own, since training changes how memory is kept.
        """
        tiny = replace(self, setting=self.setting.shrink())
        runs = tiny.setting.describe(folder / "tiny"), self.setting.describe(folder / "run")
        process = multiprocessing.get_context("spawn").Process(target=_train, args=runs)
        process.start()
        process.join()
        tiny._analyze(runs[0])
        return partial(self._analyze, runs[1])

    def _analyze(self, run: Run) -> None:
        examine(Subject.of(run, rows=self.setting.rows))


def _train(*runs: Run) -> None:
    for run in runs:
        carry_out(run, Runtime(device="cpu", threads=1))


ANALYSED = tuple(
    AnalysedRun(setting)
    for setting in (
        MemorySetting("AM*2", 64, 16, "mqar", {"seq_len": 2048, "vocab_size": 8192}),
        MemorySetting("SE IE", 64, 32, "mqar", {"seq_len": 1024, "vocab_size": 2048}),
        MemorySetting("SM AM", 64, 128, "mqar", {"seq_len": 256, "vocab_size": 1024}),
    )
)


def measure() -> Iterator[Ratio]:
    """Estimate the analyses of each run, and measure them (Linux)."""
    return memory.measure(ANALYSED)
