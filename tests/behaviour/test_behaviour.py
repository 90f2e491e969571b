"""Runs, analyses and verdicts are what they were when they were recorded in `expected/`.

Where this processor was recorded, the losses and weights of a run must have the same bits, integers
must be equal, and all other numbers have the same four digits. On others, losses agree to 1 %, as a
rounding error can change which keys a window keeps, other numbers of a run to 0.05, and analyses
give the same names and counts of numbers.

To record anew, after a change that is meant: RECORD=1 .venv/bin/pytest tests/behaviour -m ""
If the change is not one of this processor alone, delete the folders of the others.
"""

import hashlib
import json
import math
import os
import platform
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lab.cli.app import app
from lab.laws import QUICK, certify
from tests.behaviour.cases import COMMON, RUNS, TEXT
from tests.planted import FAULTS, RIGHT

EXPECTED = Path(__file__).parent / "expected"
CERTIFY = replace(QUICK, lengths=(1, 8, 16, 40), max_len=512, seconds=1e6)
"""So that no law ends by the clock."""
LEFT_OUT = {
    *("seconds", "cpu_seconds", "rows_per_second", "machine", "seal", "crc32", "checkpoint"),
    *("title", "says", "because", "by_hand", "failure", "reason", "note", "why", "chosen"),
}
"""Fields that are times, marks of a file or sentences."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_and_its_analyses_are_as_recorded(name: str, tmp_path: Path, no_report):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(TEXT)
    run_lab(*shlex.split(f"{RUNS[name]} {COMMON}".format(text=text)), "--out", str(out))
    run_lab("analyze", str(out), "--rows", "8", "--trust")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {
        "bits": {"losses": [step["loss"] for step in steps], "weights": digest_weights(out)},
        "steps": simplify(steps),
        "result": simplify(json.loads((out / "result.json").read_text())),
        "analysis": simplify(json.loads((out / "analysis.json").read_text())["analyses"]),
    }
    compare_with_expected(name, found)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "modules"), [("faults", FAULTS), ("right modules", RIGHT)])
def test_verdicts_are_as_recorded(name: str, modules: tuple):
    found = {}
    for module in modules:
        torch.manual_seed(0)
        verdicts = certify(module.build(), CERTIFY)
        found[module.name] = {verdict.law: verdict.verdict for verdict in verdicts}
    compare_with_expected(f"verdicts on {name}", found)


def run_lab(*words: str) -> None:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def digest_weights(run: Path) -> str:
    """Return a digest of the names and bits of the newest weights."""
    digest = hashlib.sha256()
    weights = load_file(max(run.glob("checkpoint/*/model.safetensors")))
    for name, weight in sorted(weights.items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest()


def simplify(value: Any) -> Any:
    """Leave out what is no behaviour, and round numbers to four digits."""
    match value:
        case dict():
            return {key: simplify(one) for key, one in value.items() if key not in LEFT_OUT}
        case list():
            return [simplify(one) for one in value]
        case float():
            return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value


def name_processor() -> str:
    """Name what bits depend on, so that it can be a folder."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    facts = [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.__version__]
    for field in ("model name", "cpu family", "model", "CPU part"):
        facts += re.findall(rf"^{field}\s*: (.*)", text, re.MULTILINE)[:1]
    return re.sub(r"[^\w.+]+", "-", " ".join(facts))


def compare_with_expected(name: str, found: dict[str, Any]) -> None:
    """Compare with what was recorded, here if it was, or record it."""
    file = EXPECTED / name_processor() / f"{name}.json"
    if "RECORD" in os.environ:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, separators=(",", ":"), ensure_ascii=False) + "\n")
    here = file.exists()
    expected = json.loads((file if here else min(EXPECTED.glob(f"*/{name}.json"))).read_text())
    differing = list(list_differences("", expected, found, here))
    shown = "\n".join(f"{name}: {words}" for words in differing[:20])
    assert not differing, f"{len(differing)} numbers differ:\n{shown}"


def list_differences(field: str, expected: Any, got: Any, here: bool) -> Iterator[str]:
    """List fields that differ, each with both values.

    Args:
        field: where the values stand.
        expected: what was recorded.
        got: what was found now.
        here: whether it was recorded on this processor.
    """
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in expected | got:
            pair = expected.get(key, "nothing"), got.get(key, "nothing")
            yield from list_differences(f"{field} {key}", *pair, here)
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for index, pair in enumerate(zip(expected, got, strict=True)):
            yield from list_differences(f"{field}[{index}]", *pair, here)
    elif not agree(field, expected, got, here):
        yield f"{field.strip()}: expected {str(expected)[:200]}, got {str(got)[:200]}"


def agree(field: str, expected: Any, got: Any, here: bool) -> bool:
    """Whether two values, not both containers of one length, agree as far as they must."""
    section = field.split()[0]
    if "nothing" in (expected, got) or isinstance(expected, list | dict):
        return False
    if section == "bits":
        return expected == got or not here
    if section == "analysis" and not here:
        return not isinstance(got, list | dict)
    if not isinstance(expected, float) or not isinstance(got, float):
        return expected == got
    least = 1e-6 if here or "loss" in field else 0.05
    return math.isclose(got, expected, rel_tol=6e-4 if here else 0.01, abs_tol=least)
