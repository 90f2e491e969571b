"""Runs, analyses and exports, killed or out of disk before any of their changes to the disk."""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import polars as pl
import pytest
import torch

from analysis.base import Subject
from analysis.examination import examine
from analysis.pages.comparison import write_comparison
from analysis.pages.report import write_both
from lab.config import ModelConfig, Runtime
from lab.suite import parquet
from lab.sweeps.table import save_table
from lab.training.experiment import carry_out
from lab.training.run import Run
from tasks import TASKS
from tasks.base import Batch
from tests.faults.attempt import SECONDS, attempt, report
from tests.faults.numbered import draw_cases
from tests.faults.planted import STEPS, copy, describe
from tests.forkserver import connect_server

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
"""Audit events of what changes a folder; opening a file to write is another."""
PART = "tests.part"
"""Audit event of this file: a row of metrics, or a part of an export, has been written."""
LONGER = STEPS + 4
RUNTIME = Runtime(device="cpu", checkpoint_every=2, threads=1)


def train(folder: Path) -> None:
    """Train the run in a folder, which is made if it is not there."""
    run = describe(folder) if not (folder / "config.json").exists() else Run.open(folder)
    carry_out(run, RUNTIME, on_row=lambda row: sys.audit(PART))


def lengthen(folder: Path) -> None:
    """Train a run whose rows become longer."""
    run = describe(folder, lengthen=True, stage_steps=3, unlearned="lengthen", max_steps=LONGER)
    task, model = TASKS["flip_flop"](seq_len=32), ModelConfig(stack="AM SM", d_model=8)
    run = replace(run, task=task, model=model)
    carry_out(run, RUNTIME, on_row=lambda row: sys.audit(PART))


def resume(folder: Path) -> None:
    """Go on with the run in a folder up to a later limit, as `lab resume --max-steps` does."""
    run = Run.open(folder).set_limit(LONGER)
    carry_out(run, RUNTIME, on_row=lambda row: sys.audit(PART))


def analyze(folder: Path) -> None:
    """Analyse the run in a folder."""
    run = Run.open(folder)
    write_both(run, examine(Subject.of(run, rows=4), ["tokens"]))


BEGUN: dict[Callable[[Path], None], Callable[[Path], Path] | None] = {
    train: None,
    lengthen: None,
    resume: copy,
    analyze: copy,
}
"""What is done to a run, and what makes the folder that it needs."""


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def fill() -> None:
    """Refuse a change as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _print_changes(call: Callable[[Path], None], folder: Path) -> None:
    print("changes", _watch(call, folder))


def _watch(
    call: Callable[[Path], None],
    folder: Path,
    last: int | None = None,
    meet: Callable[[], None] = kill,
) -> int:
    """Call a function and count its changes to a folder; one of them meets a fault.

    Args:
        call: the function.
        folder: what it is called with.
        last: the number of the change; None: all happen.
        meet: the fault, which each later change meets, too, if the process goes on.
    """
    seen, home = 0, str(folder.parent)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        changes = event in CHANGES or opens
        changes = changes and (isinstance(arguments[0], int) or home in str(arguments[0]))
        if changes or event == PART:
            seen += 1
            spared = meet is fill and event in (PART, "os.remove")  # a full disk can be emptied
            if last is not None and seen >= last and not spared:
                meet()

    sys.addaudithook(watch)
    call(folder)
    return seen


def _begin(call: Callable[[Path], None], home: Path) -> Path:
    make = BEGUN[call]
    return home / "run" if make is None else make(home)


def _carry_out_whole(home: Path) -> tuple[dict, dict]:
    """Return how many changes each call makes, and what its folder holds at its end."""
    counts, ends = {}, {}
    for call in BEGUN:
        folder = _begin(call, home / call.__name__)
        said = attempt(partial(_print_changes, call, folder)).text
        counts[call] = int(said.split("changes ")[1].split()[0])
        ends[call] = _read(folder)
    return counts, ends


@pytest.mark.parametrize("meet", [kill, fill])
def test_killed_or_full_before_any_change_to_the_disk(tmp_path, meet):
    counts, ends = _carry_out_whole(tmp_path)
    assert {row["seq_len"] for row in ends[lengthen][0]} == {8, 16, 32}
    failed, tried = [], 0
    for number, random in draw_cases(default=4):
        call = random.choice(list(BEGUN))
        last = random.randint(1, counts[call])
        folder = _begin(call, tmp_path / f"{call.__name__}-{number}")
        ended = attempt(partial(_watch, call, folder, last, meet))
        readable = attempt(partial(_read, folder))
        again = attempt(partial(call, folder))
        tried += 1
        where = f"case {number}: {call.__name__}, before change {last} of {counts[call]}"
        said = ended.text.strip().rpartition("\n")[2]
        if meet is kill and ended.code != -signal.SIGKILL:
            failed.append(f"{where}: was not killed: {said}")
        elif meet is fill and "cannot be written: No space left on device" not in said:
            failed.append(f"{where}: says {said!r}")
        elif readable.code and (folder / "config.json").exists():
            failed.append(f"{where}: what there is cannot be read: {readable.text[-300:]}")
        elif again.code:
            failed.append(f"{where}: the same again: {again.text.strip()[-300:]}")
        elif not _same(_read(folder), ends[call]):
            failed.append(f"{where}: ends otherwise than the whole")
        elif meet is kill and _list_hidden(folder):
            failed.append(f"{where}: leaves {_list_hidden(folder)}")
    report(f"met by {meet.__name__}", tried, failed)


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
    seen = _watch(call, folder, last)
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
