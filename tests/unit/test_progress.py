"""What a training shows: the usual time where it is known, within 80 columns."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lab.cli.run_settings import build_config, configure
from lab.cli.tables import progress
from lab.cli.tables.durations import format_duration
from lab.cli.tables.forecast import Forecast
from lab.config import ModelConfig
from lab.training.experiment import Plan
from lab.training.records import RECORDS, StepTimes, find_record
from lab.training.row import Row
from lab.training.runs import Run
from lab.training.step_time import StepTime

BEST = StepTime("fp32", 2, 0.1, 0.2)
OTHERS = [StepTime("fp32", 1, 0.1, 0.29), StepTime("bf16", 2, 0.2, 0.4)]
PAPER = {"seq_len": 2048, "d_model": 64}


def describe(name: str, **given) -> Run:
    task, train, values = configure(name, given)
    return Run(Path("runs/mqar"), task, build_config(ModelConfig, values), train)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.task}-{record.stack}")
def test_a_record_is_of_a_run_that_one_can_start(record):
    model = {"stack": record.stack, "d_model": record.d_model, "options": record.layers}
    run = describe(record.task, **model, **record.options)
    assert find_record(run) is record
    assert max(record.steps) == run.task.seq_len
    assert find_record(describe(record.task, learning_rate=1e-3, **record.options)) is None


SMALL = [
    *("mqar", "overwrite", "compositional", "hops", "fuzzy"),
    *("selective_copy", "copy", "induction"),
]


@pytest.mark.parametrize("name", SMALL)
def test_small_presets_have_a_record(name):
    assert find_record(describe(name, preset="small")) is not None


def test_a_step_slows_with_the_rows():
    times = StepTimes(seconds=0.1, seq_len=8, first=8, last=128, slowing=16)
    assert [times.at(n) for n in (8, 16, 128)] == pytest.approx([0.1, 0.2, 1.6])
    assert StepTimes(0.1, 64, 64, 64, 1.0).longest == 0.1


def test_the_usual_time_and_the_limits_are_told_apart():
    forecast = Forecast(describe("mqar", **PAPER), max_minutes=None, slowing=1.0)
    text = forecast.describe(13, 16, 0.1)
    assert "usually solved after 725 steps: about 1 min 11 s." in text
    assert (
        "Going on to the limit of 20,000 steps would take about 33 min 18 s at this speed." in text
    )
    assert "--max-minutes" not in text
    assert forecast.describe_rest(650, 2048, 0.1) == "about 8 s left"
    assert forecast.describe_rest(725, 2048, 0.1) == "about 32 min 7 s to the step limit"
    assert (forecast.find_total(725), forecast.find_total(726)) == (725, 20_000)
    hurried = Forecast(describe("mqar", **PAPER), max_minutes=0.5, slowing=1.0)
    assert "--max-minutes stops training after 30 s." in hurried.describe(13, 16, 0.1)
    assert hurried.describe_rest(14, 16, 0.1) in (
        "30 s to the time limit",
        "29 s to the time limit",
    )


def test_a_test_is_mentioned_where_it_takes_minutes():
    forecast = Forecast(describe("mqar", **PAPER, test_rows=10**9), max_minutes=None, slowing=1.0)
    assert "Each test of 1,000,000,000 rows takes up to 578 d 16 h." in forecast.describe(
        13, 16, 0.1
    )
    forecast = Forecast(describe("mqar", **PAPER), max_minutes=None, slowing=1.0)
    assert "Each test" not in forecast.describe(13, 16, 0.1)


@pytest.mark.parametrize("changes", [{"max_steps": 100}, {"early_stop": False}, {"n_heads": 2}])
def test_without_a_record_nothing_is_called_usual(changes):
    forecast = Forecast(describe("mqar", **PAPER, **changes), max_minutes=None, slowing=2.0)
    text = forecast.describe(13, 16, 0.1)
    assert "usually" not in text
    assert "A step takes 100 ms here, 200 ms at the end. Going on to the limit of" in text


def test_the_display_fits_80_columns_and_breaks_no_word(monkeypatch):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None, markup=False)
    monkeypatch.setattr(progress, "open_console", lambda stderr: console)
    run = describe("mqar", **PAPER)
    with progress.show_progress(run, 60) as shown:
        lengths = tuple(2**k for k in range(4, 12))
        shown.on_plan(Plan(torch.device("cpu"), BEST, OTHERS, 623_808, 0, lengths, 2.0))
        for step in range(1, 15):
            validation = 0.123 if step == 14 else None
            row = Row(step, 2048, 12.345, 0.123, 3e-3, 1.0, 1.234, validation_accuracy=validation)
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
    ):
        assert words in text, words
    sentence = " ".join(text.replace("\n", " ").split())
    assert "usually solved after 725 steps" in sentence
    assert (
        "on cpu in fp32, 2 threads (times as long a step: fp32, 1 thread: 1.30; bf16, 2 threads: "
        "2.00)" in sentence
    )
    assert "Ctrl-C stops; the same command resumes." in sentence


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
