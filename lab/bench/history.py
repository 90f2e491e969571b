"""Benchmarks over time: a file with a line for each ratio, so that a slower commit shows."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from lab.bench.ratio import Ratio
from lab.files import RunError, explain_write_errors
from lab.machine import choose_device, describe_device

WORSE = 0.8
"""A ratio below this share of the earlier median is reported; repeats differ by some per cent."""


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a history; none where there is no file.

    Raises:
        RunError: for a file that is not a history.
    """
    if not file.exists():
        return []
    try:
        found = [json.loads(line) for line in file.read_text().splitlines()]
        if all({"date", "commit", "machine", "name", "ratio"} <= {*entry} for entry in found):
            return found
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"history={file}: cannot be read: {error}") from error
    raise RunError(f"history={file}: is not a history of benchmarks")


def append(file: Path, ratios: Sequence[Ratio], commit: str) -> None:
    """Add a line for each ratio, with the date, the commit and the machine.

    Raises:
        RunError: when the file cannot be written.
    """
    stamp = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": describe_machine(),
    }
    with explain_write_errors(file), open(file, "a") as out:
        out.writelines(f"{json.dumps(stamp | asdict(ratio))}\n" for ratio in ratios)


def compare(ratio: Ratio, earlier: Sequence[dict[str, Any]]) -> str:
    """Say how a ratio compares with those before on such a machine; empty if there are none."""
    machine = describe_machine()
    known = [e for e in earlier if (e["name"], e["machine"]) == (ratio.name, machine)]
    if not known:
        return ""
    usual = median(entry["ratio"] for entry in known)
    last = known[-1]
    commit = last["commit"][:7] + last["commit"][40:]  # "-dirty" follows the 40 digits
    text = f"before: {usual:.3g} × (n {len(known)}, last {last['date'][:10]}, {commit})"
    return f"WORSE than {text}" if ratio.ratio < WORSE * usual else text


def describe_machine() -> str:
    """Return all that a ratio depends on apart from what is measured: the processor, or the GPU."""
    return describe_device(choose_device("auto"))
