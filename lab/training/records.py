"""How many steps runs took to solve their tasks: the usual time of a run with the same settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lab.config import ModelConfig, TrainConfig, get_protocol_defaults
from lab.training.runs import Run
from tasks import TASKS

INDIFFERENT = ("seed", "precision", "max_steps", "stage_steps", "test_rows")
"""Settings of the training that a record is valid for whatever their values."""


@dataclass(frozen=True)
class Record:
    """A run that solved its task, with the lab's protocol and seed 0.

    Attributes:
        task: its name.
        options: of the task; the rest have their defaults.
        steps: how many steps it took at each row length, shortest first.
        stack: the model's blocks.
        d_model: its width.
        layers: options of its layers.
    """

    task: str
    options: Mapping[str, Any]
    steps: Mapping[int, int]
    stack: str = "AM*2"
    d_model: int = 64
    layers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Steps at all row lengths together."""
        return sum(self.steps.values())

    def fits(self, run: Run) -> bool:
        """Whether a run has the settings of this record."""
        if self.task != run.task.name or TASKS[self.task](**self.options) != run.task:
            return False
        task, ours = run.task, {name: getattr(run.train, name) for name in INDIFFERENT}
        defaults = get_protocol_defaults("lab", task.seq_len, task.vocab_size, self.d_model)
        model = ModelConfig(
            stack=self.stack,
            d_model=self.d_model,
            options=dict(self.layers),
            logit_scale=defaults.pop("logit_scale"),
        )
        return model == run.model and replace(TrainConfig(**defaults), **ours) == run.train

    def estimate_rest(self, taken: int, step_times: "StepTimes") -> tuple[int, float]:
        """Return the steps that are left after some, and the seconds that they take."""
        steps, seconds = 0, 0.0
        for length, count in self.steps.items():
            left = max(0, count - taken)
            taken = max(0, taken - count)
            steps, seconds = steps + left, seconds + left * step_times.at(length)
        return steps, seconds


@dataclass(frozen=True)
class StepTimes:
    """The time of a step at each row length, from what was measured on this machine.

    It changes by the same factor whenever the length doubles.

    Attributes:
        seconds: of a step, measured.
        seq_len: row length at which it was measured.
        first: the shortest row length.
        last: the longest.
        slowing: how many times as long a step takes at the longest as at the shortest.
    """

    seconds: float
    seq_len: int
    first: int
    last: int
    slowing: float

    def at(self, length: int) -> float:
        """Return the seconds of a step at a row length."""
        doublings = math.log2(self.last / self.first) or 1.0
        return self.seconds * self.slowing ** (math.log2(length / self.seq_len) / doublings)

    @property
    def longest(self) -> float:
        """Seconds of the slowest step still to come."""
        return max(self.seconds, self.at(self.last))


_HARD = {"seq_len": 2048, "vocab_size": 8192}
_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)

RECORDS = (
    Record("mqar", _HARD, dict(zip(_LENGTHS, (350, 50, 50, 50, 50, 50, 50, 75), strict=True))),
    Record(
        "mqar",
        _HARD,
        dict(zip(_LENGTHS, (500, 125, 50, 100, 100, 75, 125, 300), strict=True)),
        d_model=32,
    ),
    Record(
        "mqar",
        _HARD,
        dict(zip(_LENGTHS, (375, 25, 25, 25, 25, 25, 25, 50), strict=True)),
        stack="SE IE",
    ),
    Record("mqar", {"seq_len": 64, "vocab_size": 256}, {16: 325, 32: 50, 64: 25}),
    Record("induction", {"seq_len": 64}, {16: 225, 32: 25, 64: 25}),
    Record(
        "overwrite", {"seq_len": 64, "vocab_size": 64, "n_pairs": 4}, {16: 150, 32: 350, 64: 100}
    ),
    Record("compositional", {"seq_len": 24, "vocab_size": 32, "n_pairs": 4}, {24: 600}),
    Record("copy", {"seq_len": 32}, {16: 600, 32: 300}),
    Record("flip_flop", {"seq_len": 64}, {16: 200, 32: 25, 64: 50}),
    Record("selective_copy", {"seq_len": 64, "vocab_size": 10, "n_tokens": 8}, {64: 425}),
    Record(
        "hops",
        {"seq_len": 29, "n_pairs": 7, "vocab_size": 24},
        {29: 1325},
        stack="SM AM*2",
        layers={"S.position": "conv"},
    ),
    Record("fuzzy", {"seq_len": 64, "vocab_size": 16, "n_pairs": 5}, {16: 275, 32: 400, 64: 200}),
)
"""Measured on two cores, 2026-11-24 (LOG.md). Steps hardly depend on the machine. Seconds
do, so they are estimated from the time of a step on this one."""


def find_record(run: Run) -> Record | None:
    """Return the record of a run with the same settings; None if there is none."""
    return next((record for record in RECORDS if record.fits(run)), None)
