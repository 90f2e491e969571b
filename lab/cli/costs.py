"""Estimate what large sizes will cost, before anything is built, read or tried.

Nothing is measured. The rates are those of one core of a server's processor (LOG.md); another
machine may take a third of the time or three times as long, which is enough to tell a minute from
a day. What a step takes here is measured and shown once training begins.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.cli.tables.durations import LONG_TEST, format_duration

if TYPE_CHECKING:
    from lab.config import ModelConfig, TrainConfig
    from tasks.base import Task

WIDTH = 64
TOKEN_SECONDS = 8e-6
"""Seconds of a training step for each token and layer of width `WIDTH`."""
PAIR_SECONDS = 1.9e-9
"""Seconds for each pair of tokens of a row, in a layer that compares them all."""
FORWARD = 1 / 3
"""Share of a step's time that an evaluation of its rows takes."""
FILES_A_SECOND = 10_000
"""Files whose ends are read in a second, if the system has them in memory."""
COMPARES_PAIRS = "AI"
"""Letters of mixers that compare all pairs of a row's tokens."""
LONG_STEP = 5.0
"""Seconds from which on a step is mentioned."""


def describe_costs(task: "Task", model: "ModelConfig", train: "TrainConfig") -> list[str]:
    """Return a line for each part of a training that will take long."""
    row = _estimate_row(task.seq_len, model)
    step, test = train.batch_size * row, train.test_rows * row * FORWARD
    lines = []
    if step >= LONG_STEP:
        lines.append(
            f"a step reads {_count(train.batch_size, task)}: roughly {format_duration(step)} on "
            "one core"
        )
    if test >= LONG_TEST:
        lines.append(
            f"a test reads {_count(train.test_rows, task)}: roughly {format_duration(test)} on "
            "one core; --test-rows asks for fewer"
        )
    return lines


def describe_reading(path: Any) -> str:
    """Say what it costs to find the text in a folder; empty where there is none."""
    if not isinstance(path, str) or not Path(path).is_dir():
        return ""
    disk = os.statvfs(path)
    count = disk.f_files - disk.f_ffree
    if not count:  # some file systems do not count
        return f"reading both ends of each file below {path}"
    return (
        f"reading both ends of each file below {path}; all {count:,} of its disk would take "
        f"{format_duration(count / FILES_A_SECOND)} or more"
    )


def _estimate_row(seq_len: int, model: "ModelConfig") -> float:
    """Estimate the seconds of a training step for each row, for layers of the lab."""
    layers = [
        (mixer, int(times or 1))
        for mixer, times in re.findall(r"([A-Z])[A-Z](?:\*([0-9]{1,4})(?![0-9]))?", model.stack)
    ]
    count = sum(times for _, times in layers)
    comparing = sum(times for mixer, times in layers if mixer in COMPARES_PAIRS)
    each = count * TOKEN_SECONDS + comparing * PAIR_SECONDS * seq_len
    return seq_len * each * model.d_model / WIDTH


def _count(rows: int, task: "Task") -> str:
    return f"{rows:,} row{'s' if rows > 1 else ''} of {task.seq_len:,} tokens"
