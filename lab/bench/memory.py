"""The memory that a run was estimated to take, against what it takes.

Each setting is trained for two steps in a process of its own, with its evaluations, its checkpoint
and its result. The process has trained a tiny run before, so that what Python and torch take
themselves does not count.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench.peak import measure_peak_mib
from lab.bench.ratio import Ratio
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.machine.memory import keep_freed_memory
from lab.training.experiment import carry_out
from lab.training.footprint import estimate
from lab.training.runs import Run
from lab.training.step_time import use_threads
from tasks import TASKS

MIB = 2**20
TARGET = 0.75
"""One less the share of what is measured by which an estimate may differ."""


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


def measure(settings: tuple[MemorySetting, ...] = SETTINGS) -> list[Ratio]:
    """Estimate each setting, and measure it (Linux)."""
    return [_compare(setting) for setting in settings]


def _compare(setting: MemorySetting) -> Ratio:
    run = setting.describe(Path("not written"))
    with use_threads(1):
        ours = estimate(run, run.build()).total / MIB
    with tempfile.TemporaryDirectory(prefix="lab-bench-") as folder:
        theirs = measure_peak_mib(partial(_prepare, setting, Path(folder)))
    return Ratio(
        f"memory: {setting}, estimated against measured",
        ours,
        theirs,
        "MiB",
        1 - abs(ours / theirs - 1),
        TARGET,
        f"estimated {ours / theirs:.2f} of what it takes",
    )


def _prepare(setting: MemorySetting, folder: Path) -> Callable[[], object]:
    """Train a tiny run in a folder, and return a call that trains the whole one there."""
    keep_freed_memory()
    runtime = Runtime(device="cpu", threads=1)
    carry_out(setting.shrink().describe(folder / "tiny"), runtime)
    return partial(carry_out, setting.describe(folder / "run"), runtime)
