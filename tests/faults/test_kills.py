"""Runs, their extensions, analyses and exports, killed before any of their changes to the disk."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import polars as pl
import torch

from analysis.base import Subject
from analysis.examination import examine
from analysis.pages.comparison import write_comparison
from analysis.pages.report import write_both
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.suite import parquet
from lab.sweeps.table import save_table
from lab.training.experiment import carry_out
from lab.training.extension import extend
from lab.training.lanes import train_lanes
from lab.training.runs import Run
from tasks import TASKS
from tasks.base import Batch
from tests.faults.attempt import SECONDS, attempt, report
from tests.faults.numbered import draw_cases
from tests.faults.planted import STEPS, copy, describe
from tests.forkserver import connect_server

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
"""Audit events of what changes a folder; opening a file to write is another."""
PART = "tests.part"
"""Audit event of this file: a part of an export is about to be written."""
LONGER = STEPS + 4
RUNTIME = Runtime(device="cpu", checkpoint_every=2, threads=1)


def train(folder: Path) -> None:
    """Train the run in a folder, which is made if it is not there."""
    run = describe(folder) if not (folder / "config.json").exists() else Run.open(folder)
    carry_out(run, RUNTIME)


def lengthen(folder: Path) -> None:
    """Extend the run in a folder unless that is done, and go on with it."""
    run = Run.open(folder)
    carry_out(run if run.train.max_steps == LONGER else extend(run, LONGER), RUNTIME)


def analyze(folder: Path) -> None:
    """Analyse the run in a folder."""
    run = Run.open(folder)
    write_both(run, examine(Subject.of(run, rows=4), ["tokens"]))


def train_together(folder: Path) -> None:
    """Train runs of different lengths in one computation, whose bits depend on who takes part."""
    train = TrainConfig(
        batch_size=4, eval_every=2, test_rows=8, precision="fp32", lengthen=True, lengthen_at=0.55
    )
    model, task = ModelConfig(stack="AM SM", d_model=8), TASKS["flip_flop"](seq_len=16)
    steps = {"long": STEPS, "short": STEPS - 3, "other": STEPS}
    runs = [
        Run(folder / name, task, model, replace(train, max_steps=most, seed=seed))
        for seed, (name, most) in enumerate(steps.items())
    ]
    train_lanes(runs, RUNTIME, shared=True)


def count_changes(call: Callable[[], object]) -> int:
    """Return how often a call changes the disk."""
    said = attempt(partial(_print_changes, call)).text
    return int(said.split("changes ")[1].split()[0])


def _print_changes(call: Callable[[], object]) -> None:
    print("changes", _watch(call, None))


def _watch(call: Callable[[], object], last: int | None) -> int:
    """Call a function and count its changes to the disk; kill this process before one of them."""
    seen = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        changes = event in CHANGES or opens
        if changes and "__pycache__" in str(arguments[0]):
            return  # the first to import a module keeps it compiled, and no other does
        if changes or event == PART:
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    call()
    return seen


def test_killed_before_any_change_to_the_disk(tmp_path):
    whole = {name: tmp_path / name for name in ("train", "lengthen", "analyze")}
    begun = {"train": lambda to: to / "run", "lengthen": copy, "analyze": copy}
    calls = {"train": train, "lengthen": lengthen, "analyze": analyze}
    counts, ends = {}, {}
    for name, call in calls.items():
        folder = begun[name](whole[name])
        counts[name] = count_changes(partial(call, folder))
        ends[name] = _read(folder)
    failed, tried = [], 0
    for number, random in draw_cases(default=4):
        name = random.choice(list(calls))
        last = random.randint(1, counts[name])
        folder = begun[name](tmp_path / f"{name}-{number}")
        killed = attempt(partial(_watch, partial(calls[name], folder), last))
        again = attempt(partial(calls[name], folder))
        tried += 1
        where = f"case {number}: {name}, before change {last} of {counts[name]}"
        if killed.code != -signal.SIGKILL:
            failed.append(f"{where}: was not killed: {killed.text[-300:]}")
        elif again.code:
            failed.append(f"{where}: the same again: {again.text.strip()[-300:]}")
        elif not _same(_read(folder), ends[name]):
            failed.append(f"{where}: ends otherwise than the whole")
        elif _list_hidden(folder):
            failed.append(f"{where}: leaves {_list_hidden(folder)}")
    report("kills", tried, failed)


def test_lanes_killed_before_any_change_end_with_the_same_bits(tmp_path):
    whole = tmp_path / "whole"
    count = count_changes(partial(train_together, whole))
    names = sorted(path.name for path in whole.iterdir())
    failed, tried = [], 0
    for number, random in draw_cases(default=4):
        folder, lasts = tmp_path / f"{number}", []
        while len(lasts) < random.choice((1, 2)):
            lasts.append(random.randint(1, count))
            attempt(partial(_watch, partial(train_together, folder), lasts[-1]))
        again = attempt(partial(train_together, folder))
        tried += 1
        where = f"case {number}: before changes {lasts} of {count}"
        if again.code:
            failed.append(f"{where}: the same again: {again.text.strip()[-300:]}")
            continue
        differ = [n for n in names if not _same(_read(folder / n), _read(whole / n))]
        left = [file for name in names for file in _list_hidden(folder / name)]
        if differ or left:
            failed.append(f"{where}: {differ} end otherwise than the whole; left {left}")
    report("lanes", tried, failed)


def export_rows(folder: Path) -> None:
    """Export rows, in several parts; each part is a change, which Polars makes unseen."""
    build = parquet._build_frame

    def note(start: int, batch: Batch) -> pl.DataFrame:
        sys.audit(PART)
        return build(start, batch)

    parquet._build_frame, parquet.TOKENS_A_PART = note, 64
    task = TASKS["induction"](seq_len=16)
    parquet.export(parquet.Recipe(task, "train", seed=0, rows=40), folder / "out.parquet")


def save_pretrained(folder: Path) -> None:
    """Save the model of the run for transformers."""
    from lab.huggingface.saving import save_run

    save_run(Run.open(folder / "run"), folder / "out")


def compare(folder: Path) -> None:
    """Write the page that compares the run with a copy of it."""
    runs = [Run.open(folder / name) for name in ("run", "other")]
    write_comparison(runs, folder / "out.html", rows=4)


def tabulate(folder: Path) -> None:
    """Write a table of runs."""
    save_table(pl.DataFrame({"a": range(100)}), folder / "out.parquet")


def kill_elsewhere(call: Callable[[Path], None], folder: Path, last: int | None) -> int:
    """Carry out a call in a process that has never used Polars; return its exit code."""
    process = connect_server().Process(target=_write_and_count, args=(call, folder, last))
    process.start()
    process.join(SECONDS)
    process.kill()  # if it still runs
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _write_and_count(call: Callable[[Path], None], folder: Path, last: int | None) -> None:
    seen = _watch(partial(call, folder), last)
    (folder / "seen").write_text(str(seen))


def test_exports_killed_before_any_change_are_whole_or_absent(tmp_path):
    calls = (export_rows, save_pretrained, compare, tabulate)
    counts, wholes = {}, {}
    for call in calls:
        folder = tmp_path / call.__name__
        shutil.copytree(copy(folder), folder / "other")
        assert kill_elsewhere(call, folder, None) == 0
        counts[call], wholes[call] = int((folder / "seen").read_text()), _take_output(folder)
        assert wholes[call]
    failed, tried = [], 0
    for number, random in draw_cases(default=4):
        call = calls[number % len(calls)]
        last = random.randint(1, counts[call])
        folder = tmp_path / call.__name__
        code, found = kill_elsewhere(call, folder, last), _take_output(folder)
        again, ended = kill_elsewhere(call, folder, None), _take_output(folder)
        tried += 1
        where = f"case {number}: {call.__name__}, before change {last} of {counts[call]}"
        if code != -signal.SIGKILL:
            failed.append(f"{where}: was not killed: {code}")
        elif found not in ({}, wholes[call]):
            failed.append(f"{where}: is there in part: {sorted(found)}")
        elif again or ended != wholes[call]:
            failed.append(f"{where}: the same again ends otherwise: {again}")
    report("exports", tried, failed)


def _take_output(folder: Path) -> dict[str, bytes]:
    """Return the files that a call has written under the name that it was given; remove them."""
    found = [file for file in folder.rglob("*") if "out" in file.relative_to(folder).parts[0]]
    content = {str(file): file.read_bytes() for file in found if file.is_file()}
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return content


def _read(folder: Path) -> tuple[list[dict], dict[str, torch.Tensor], bool]:
    """Return what a run folder holds that must not depend on interruptions."""
    run = Run.open(folder)
    rows = [{**row, "seconds": 0.0, "cpu_seconds": 0.0} for row in run.read_metrics()]
    return rows, run.load_state().model.state_dict(), (folder / "report.html").exists()


def _same(one, other) -> bool:
    return (
        one[0] == other[0]
        and one[2] == other[2]
        and one[1].keys() == other[1].keys()
        and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    )


def _list_hidden(folder: Path) -> list[str]:
    """Return what a killed process left in the folders that are cleared when training goes on."""
    if (folder / "report.html").exists():  # only training clears them
        return []
    return [str(file) for file in folder.rglob(".*")]
