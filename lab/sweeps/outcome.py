"""How far the run of a cell got, and its accuracy at each row length.

Beside what every run folder holds, that of a cell may have:

lengths.json    accuracy at row lengths that result.json and metrics.jsonl do not tell
spent.json      minutes that a run which has not ended took, and its error
log.txt         what it printed
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from lab.files import RunError, explain_write_errors, read_end, read_json, write_json
from lab.models.anatomy import measure_state
from lab.models.evaluation import evaluate
from lab.sweeps.sweep import Cell
from lab.training.records import LengthsFile, SpentFile, find_ending, validate
from lab.training.run import Run
from lab.trust import list_named

Status = Literal["solved", "budget", "diverged", "out of time", "unfinished", "failed", "not run"]
"""How far a cell got. "budget": it took all its steps and is not solved. "out of time": it used its
minutes up. "unfinished": it was interrupted, and goes on when the sweep is run again."""
ENDED = ("solved", "budget", "diverged")
LENGTHS, SPENT, LOG = "lengths.json", "spent.json", "log.txt"
LAST_BYTES = 4_096
"""Bytes that are read from the end of a file of metrics to find its last row."""
VALIDATION_SHARE = 4
"""Test rows per validation row: validation rows only choose among settings."""
OF_TEST = {"test": "accuracy", "interval": "interval", "loss": "loss"}
"""What is kept of an evaluation on test rows: its name in an entry, and in the evaluation."""
Entry = dict[str, Any]
"""seq_len, step of the weights, accuracy and loss on test and on validation rows, interval of the
former over rows, bytes of state that a row of this length takes."""


def open_run(out: Path, cell: Cell) -> Run | None:
    """Return the run of a cell; None while there is none.

    Only what the cell names is read and imported: the folder may be of someone else.

    Raises:
        RunError: when its config.json cannot be read, or names more.
    """
    path, text = out / cell.name, cell.options.get("path")
    # A run keeps the full path of its text.
    task = {"path": text if text is None else os.path.realpath(text)}
    named = list_named({"model": cell.options, "task": task})
    return Run.open(path, named=named) if os.path.lexists(path / "config.json") else None


def find_status(out: Path, cell: Cell) -> Status:
    """Return how far the run of a cell got; one with a damaged file has failed."""
    try:
        run = open_run(out, cell)
        if run is None:
            return "not run"
        ending = find_ending(run.read_result())
        if ending in ENDED:
            return cast(Status, ending)
        if read_spent(run.path)[1] is not None:
            return "failed"
    except RunError:
        return "failed"
    return "out of time" if ending == "out of time" else "unfinished"


def is_finished(out: Path, cell: Cell, max_minutes: float | None) -> bool:
    """Whether the run of a cell needs no more training, nor evaluation at its row lengths.

    Raises:
        RunError: when a file cannot be read.
    """
    status, run = find_status(out, cell), open_run(out, cell)
    if run is None or status not in (*ENDED, "out of time"):
        return False
    if status == "out of time" and (max_minutes is None or read_spent(run.path)[0] < max_minutes):
        return False
    return status == "diverged" or {*cell.lengths} <= {*read_lengths(run)}


def read_last_step(path: Path) -> dict[str, Any]:
    """Return the newest row of a run's metrics, from the end of their file; empty before."""
    try:
        end = read_end(path / "metrics.jsonl", LAST_BYTES)
    except (OSError, RunError):
        return {}
    lines = end.decode(errors="replace").split("\n")
    for line in reversed(lines[:-1]):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                return row
    return {}


def read_spent(path: Path) -> tuple[float, str | None]:
    """Return the minutes that an unended run has taken, and the error that stopped it, if any."""
    file = path / SPENT
    if not file.exists():
        return 0.0, None
    where = f"{file}: cannot be read; remove it"
    content = validate(SpentFile, read_json(file, where), where)
    return content["minutes"], content["error"]


def note_spent(run: Run, minutes: float, error: str | None) -> None:
    """Add the minutes of a run that goes on another time, and note its error, or None.

    Raises:
        RunError: when it cannot be written.
    """
    spent, _ = read_spent(run.path)
    with explain_write_errors(run.path):
        (run.path / SPENT).unlink(missing_ok=True)
        if error is not None or find_ending(run.read_result()) not in ENDED:
            write_json(run.path / SPENT, {"minutes": spent + minutes, "error": error})


def evaluate_lengths(run: Run, lengths: Sequence[int]) -> None:
    """Evaluate a run that has ended on test and validation rows of each length; keep the result.

    If the stage of that length was followed by another, the weights are those kept at its end;
    otherwise they are the last ones.

    Raises:
        ValueError: for a length that the task has no rows of.
        RunError: when weights cannot be read, or the result cannot be written.
    """
    found, recorded, ends = read_lengths(run), read_records(run), find_stage_ends(run)
    missing = [length for length in lengths if length not in found]
    for length in missing:
        step = ends.get(length, max(run.list_checkpoints(), default=0))
        entry = {"seq_len": length, "step": step, "test": None}
        if recorded is not None and (recorded["seq_len"], recorded["step"]) == (length, step):
            entry = recorded
        model, rows = run.load_model(step), run.train.test_rows
        if entry["test"] is None:
            test = _evaluate(run, model, length, "test", rows)
            entry |= {name: test[field] for name, field in OF_TEST.items()}
            entry["state_bytes"] = measure_state(model, length).bytes
        fewer = max(1, rows // VALIDATION_SHARE)
        validation = _evaluate(run, model, length, "validation", fewer)
        entry["validation"] = validation["accuracy"]
        entry["validation_loss"] = validation["loss"]
        found[length] = entry
    if missing:
        with explain_write_errors(run.path):
            write_json(run.path / LENGTHS, {"lengths": list(found.values())})


def read_lengths(run: Run) -> dict[int, Entry]:
    """Return a run's accuracy by row length, as far as it was evaluated with its weights.

    Raises:
        RunError: when a file cannot be read.
    """
    file, found = run.path / LENGTHS, {}
    if file.exists():
        metrics, ends = run.read_metrics(), find_stage_ends(run)
        last = metrics[-1]["step"] if metrics else 0
        where = f"{file}: cannot be read; remove it"
        for entry in validate(LengthsFile, read_json(file, where), where)["lengths"]:
            if entry["step"] == ends.get(entry["seq_len"], last):  # not before it went on
                found[entry["seq_len"]] = dict(entry)
    recorded = read_records(run)
    if recorded is not None and None not in (recorded["test"], recorded["validation"]):
        found[recorded["seq_len"]] = recorded
    return found


def read_records(run: Run) -> Entry | None:
    """Return the accuracy at the task's own row length from result.json and metrics.jsonl.

    None before the run's end; without that on validation rows if training ended with shorter rows.

    Raises:
        RunError: when the files cannot be read.
    """
    result, stages = run.read_result(), run.read_metrics().stages
    if result is None:
        return None
    at_full = bool(stages) and stages[-1].seq_len == run.task.seq_len
    return {
        "seq_len": run.task.seq_len,
        "step": result["steps"],
        "test": result["accuracy"],
        "interval": result.get("interval"),
        "loss": result.get("loss"),
        "state_bytes": result.get("state_bytes"),
        "validation": stages[-1].accuracy if at_full else None,
        "validation_loss": stages[-1].loss if at_full else None,
    }


def find_stage_ends(run: Run) -> dict[int, int]:
    """Return, by row length, the step after which longer rows followed."""
    stages = run.read_metrics().stages
    return {stage.seq_len: longer.began for stage, longer in pairwise(stages)}


def _evaluate(run: Run, model: Any, length: int, split: str, rows: int) -> Mapping[str, Any]:
    full = run.task.seq_len
    return vars(
        evaluate(
            run.task if length == full else run.task.resize(length),
            model,
            rows=rows,
            rows_at_once=max(1, run.train.batch_size * full // length),
            seed=run.train.seed,
            split=split,
        )
    )
