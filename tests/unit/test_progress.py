"""What a training shows: the usual time where it is known, within 80 columns."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lab.api import progress
from lab.api.results import format_duration
from lab.api.settings import build_config, configure
from lab.config import ModelConfig
from lab.models.anatomy import StateSize
from lab.training.experiment import Plan
from lab.training.loop import Row
from lab.training.run import Run
from lab.training.speed import StepTime

BEST = StepTime("fp32", 2, 0.3)
OTHERS = [StepTime("fp32", 1, 0.39), StepTime("bf16", 2, 0.6)]
PAPER = {"seq_len": 2048, "d_model": 64}


def describe(name: str, **given) -> Run:
    task, train, values = configure(name, given)
    return Run(Path("runs/mqar"), task, build_config(ModelConfig, values), train)


def test_the_display_fits_80_columns_and_breaks_no_word(monkeypatch):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None, markup=False)
    monkeypatch.setattr(progress, "open_console", lambda stderr: console)
    run = describe("mqar", **PAPER)
    with progress.show_progress(run) as shown:
        lengths = tuple(2**k for k in range(4, 12))
        shown.on_plan(
            Plan(torch.device("cpu"), BEST, OTHERS, 623_808, StateSize(2048, 2_097_152), 0, lengths)
        )
        for step in range(1, 15):
            validation = 0.123 if step == 14 else None
            row = Row(step, 2048, 12.345, 0.123, 3e-3, 1.0, 1.234, 1.234, None, validation)
            shown.on_row(row)
        shown.bar.refresh()
        shown.on_note("evaluating 1,024 test rows")
    text = screen.getvalue()
    lines = [line for part in text.split("\n") for line in part.split("\r")]
    assert max(map(len, map(strip, lines))) <= 80
    for words in (
        "16 → 32 → 64 → 128 → 256 → 512 → 1,024 → 2,048 tokens,",
        "2,048 tokens  loss 12.345  accuracy 0.123  validation 0.123  1,234 ms",
        "evaluating 1,024 test rows …",
        "state of a row: 2,097,152 bytes at 2,048 tokens",
    ):
        assert words in text, words
    sentence = " ".join(text.replace("\n", " ").split())
    assert "at most 6 h 51 min left at this pace" in sentence
    assert (
        "on cpu in fp32, 2 threads (times as long a step: fp32, 1 thread: 1.30; bf16, 2 threads: "
        "2.00)" in sentence
    )


def test_a_count_begins_at_none(monkeypatch):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(progress, "open_console", lambda stderr: console)
    with progress.show_count(["leaks", "curves"], "writing the report") as on_begin:
        on_begin("leaks")
        on_begin("curves")
    assert " 0/2" in screen.getvalue()
    assert "-1/2" not in screen.getvalue()
    assert "2/2 done" in screen.getvalue()


def strip(line: str) -> str:
    """Return a line without the codes that move the cursor or clear the line."""
    return "".join(part.partition("m")[2] or part[2:] for part in line.split("\x1b[")) or line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.31, "0.3 s"), (59, "59 s"), (60, "1 min"), (125, "2 min 5 s"), (90_000, "1 d 1 h")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
