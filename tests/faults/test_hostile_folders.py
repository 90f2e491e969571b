"""Run folders of strangers: any content ends in a result or in one line, and stays inside."""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from analysis.pages.report_files import ReportFiles
from lab.api.run import TrainedRun
from lab.files import RunError
from lab.sweeps.outcome import read_last_step, read_lengths, read_spent
from lab.training.certificate import read_certificate
from lab.training.checkpoint import DIGEST, digest_tensors
from lab.training.run import Run
from tests.faults.attempt import attempt, run_command
from tests.faults.planted import copy, take_stock

SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}"
"""Text that would run in a page, or in its template."""
LAYER = (
    '{{"cpu_seconds": 1.0, "layers": [{{"layer": "A", "blocks": [0], "laws": [{{"law": "causal", '
    '"verdict": "{}", "evidence": "", "counterexample": null, "tokens": 3, "note": ""}}]}}]}}'
)
EVIL = """
import pathlib
from torch import nn
pathlib.Path({marker!r}).touch()
class Mixer(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.map = nn.Linear(d_model, d_model)
    def forward(self, x):
        return self.map(x)
"""
READ: dict[str, Callable[[Run], object]] = {
    "config.json": lambda run: Run.open(run.path),
    "result.json": Run.read_result,
    "metrics.jsonl": Run.read_metrics,
    "checkpoint/step-00000006/state.json": Run.load_state,
    "checkpoint/step-00000006/model.safetensors": Run.load_state,
    "checkpoint/step-00000006/optimizer.safetensors": Run.load_state,
    "history/step-00000004.safetensors": lambda run: run.load_model(4),
    "analysis.json": lambda run: ReportFiles(run.path).read(),
    "report.json": lambda run: ReportFiles(run.path).read(),
    "report.html": lambda run: TrainedRun(run).report(),
    "certificate.json": lambda run: read_certificate(run.path),
    "lengths.json": read_lengths,
    "spent.json": lambda run: read_spent(run.path),
}
"""The files of a run, and what reads them."""
FOLDERS: dict[str, Callable[[Run], object]] = {
    "checkpoint": Run.load_state,
    "checkpoint/step-00000006": Run.load_state,
    "history": Run.list_steps,
}
"""The folders in a run's, and what reads what is in them."""


def test_text_of_others_runs_in_no_page(tmp_path, monkeypatch):
    run, other = copy(tmp_path / "theirs"), copy(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    for name in ("analysis.json", "report.json"):
        content = json.loads((run / name).read_text())
        plant_everywhere(content, f"{SCRIPT}\x1b]0;x\x07")
        (run / name).write_text(json.dumps(content))
    for words in (
        ("analyze", str(run), "--only", "tokens", "--rows", "4"),
        ("compare", str(run), str(other), "--rows", "4"),
    ):
        outcome = attempt(run_command(*words))
        assert not outcome.fault
        pages = [page.read_text() for page in tmp_path.rglob("*.html")]
        assert pages
        assert not any("<script>alert(1)" in page or "<img src=x" in page for page in pages)


def plant_everywhere(content: object, text: str) -> None:
    """Put a text into the place of every text of a JSON document."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content)  # type: ignore[arg-type]
    for key, value in list(pairs):
        if isinstance(value, str):
            content[key] = text  # type: ignore[index]
        elif isinstance(value, dict | list):
            plant_everywhere(value, text)


@pytest.mark.parametrize("name", [*READ, *FOLDERS])
def test_what_a_link_leads_to_is_not_read(tmp_path, name):
    run = Run.open(copy(tmp_path / "theirs"))
    if name in READ:
        (run.path / name).touch()
    shutil.move(run.path / name, tmp_path / "outside")
    (run.path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match=r"is a link, must be a file"):
        {**READ, **FOLDERS}[name](run)


@pytest.mark.parametrize("name", READ)
def test_a_pipe_or_a_file_larger_than_any_of_its_kind_is_not_read(tmp_path, name):
    run = Run.open(copy(tmp_path))
    with (run.path / name).open("a") as file:
        file.truncate(2**42)  # of holes, which take no disk
    with pytest.raises(RunError, match=r"has 4,398,046,511,104 bytes, must be ≤ [\d,]+"):
        READ[name](run)
    (run.path / name).unlink()
    os.mkfifo(run.path / name)
    assert bool(read_last_step(run.path)) == (name != "metrics.jsonl")
    with pytest.raises(RunError, match="is a folder, a device or a pipe, must be a file"):
        READ[name](run)


@pytest.mark.parametrize(
    "words",
    [
        "analyze RUN --only tokens --rows 4",
        "resume RUN --threads 1",
        "resume RUN --threads 1 --max-steps 9",
        "compare RUN MINE --rows 4",
    ],
)
def test_code_and_text_of_others_need_trust(tmp_path, monkeypatch, words):
    run, marker = copy(tmp_path / "theirs"), tmp_path / "marker"
    (run / "result.json").unlink()  # or `lab resume` would only show it
    secret = tmp_path / "secret.txt"
    secret.write_text("a private text, long enough to train on. " * 200)
    (tmp_path / "evil_mixer.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.chdir(tmp_path)
    content = json.loads((run / "config.json").read_text())
    mine = copy(tmp_path / "mine")
    command = words.replace("RUN", str(run)).replace("MINE", str(mine)).split()

    def say(**parts) -> str:
        (run / "config.json").write_text(json.dumps({**content, **parts}))
        outcome = attempt(run_command(*command))
        assert outcome.code == 1, outcome.text
        assert not outcome.fault
        return outcome.text

    code = {**content["model"], "model": "evil_mixer:Mixer", "stack": "UM"}
    assert "would import and run evil_mixer:Mixer, which you have not named; --trust" in say(
        model=code
    )
    assert not marker.exists()
    text = {"name": "bytes", "seq_len": 16, "path": str(secret), "test_share": 0.1, "digest": None}
    assert f"would read the text {secret}, which you have not named; --trust" in say(task=text)
    assert not any(b"private text" in held for held in take_stock(run).values())
    (run / "config.json").write_text(json.dumps({**content, "model": code}))
    attempt(run_command(*command, "--trust"))
    assert marker.exists()


def test_a_mixer_that_the_command_names_needs_no_trust(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_mixer.py").write_text(EVIL.format(marker=str(tmp_path / "marker")))
    options = "--seq-len 16 --vocab-size 32 --d-model 16 --max-steps 2 --threads 1 --json --eval "
    words = f"mqar --model own_mixer:Mixer --no-certify --out run {options}seq_len=16".split()
    for _ in range(2):  # trained, then shown
        outcome = attempt(run_command(*words))
        assert outcome.code == 0, outcome.text
    for other in (
        ("analyze", "run", "--only", "tokens", "--rows", "4"),
        ("mqar", "--config", "run/config.json", "--out", "third"),
    ):
        assert "--trust allows that" in attempt(run_command(*other)).text
    trusted = attempt(run_command(*other, "--threads", "1", "--eval", "seq_len=16", "--trust"))
    assert trusted.code == 0, trusted.text


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        (
            "result.json",
            r'"accuracy": [\d.]+',
            '"accuracy": 5',
            "accuracy=5: must be less than or e",
        ),
        ("result.json", r'"interval": \[[^]]*\]', '"interval": [0.5, 0.25]', "the smaller first"),
        ("result.json", r'"seconds": [\d.]+', '"seconds": -1.0', "seconds=-1.0: must be greater"),
        ("metrics.jsonl", r'"grad_norm": [\d.]+', '"grad_norm": NaN', "grad_norm=nan"),
        ("metrics.jsonl", "^", " " * 5000, r"has 5,\d+ characters, must be ≤ 4,096"),
        ("analysis.json", r'"step": 6', '"step": -6', "step=-6: must be"),
        ("certificate.json", "", "{}", "layers is missing"),
        ("certificate.json", "", LAYER.format("passes"), "laws.0.verdict='passes'"),
        ("spent.json", "", '{"minutes": -1, "error": null}', "minutes=-1: must be greater than"),
        ("lengths.json", "", '{"lengths": [{}]}', "lengths.0.seq_len is missing"),
    ],
)
def test_a_file_is_checked_whole_when_it_is_read(tmp_path, name, old, new, said):
    run = Run.open(copy(tmp_path))
    file = run.path / name
    text = file.read_text() if old else ""
    file.write_text(re.sub(old, new, text, count=1))
    with pytest.raises(RunError, match=said):
        READ[name](run)


@pytest.mark.parametrize("name", ["checkpoint/step-00000006", "history"])
def test_weights_that_are_not_finite_are_named(tmp_path, name):
    run = Run.open(copy(tmp_path))
    file = (
        run.path / name / ("model.safetensors" if "step" in name else "step-00000004.safetensors")
    )
    weights = load_file(file)
    weights["embed.weight"][0] = math.nan
    data = save(weights, {DIGEST: digest_tensors(weights)})
    file.write_bytes(data)
    if "step" in name:
        state = json.loads((file.parent / "state.json").read_text())
        state["sha256"]["model"] = hashlib.sha256(data).hexdigest()
        (file.parent / "state.json").write_text(json.dumps(state))
    with pytest.raises(RunError, match=r"embed\.weight is not finite"):
        run.load_model(6 if "step" in name else 4)


def test_weights_whose_digest_fits_but_that_hold_no_tensors_are_one_line(tmp_path):
    run = Run.open(copy(tmp_path))
    home = run.path / "checkpoint/step-00000006"
    header = b'{"adamw/0/exp_avg": {"dtype": "F32", "data_offsets": [0, 0]}}'  # without a shape
    data = len(header).to_bytes(8, "little") + header
    state = json.loads((home / "state.json").read_text())
    for name in ("optimizer", "model"):
        (home / f"{name}.safetensors").write_bytes(data)
        state["sha256"][name] = hashlib.sha256(data).hexdigest()
        (home / "state.json").write_text(json.dumps(state))
        with pytest.raises(RunError, match=rf"{name}.safetensors: holds no tensors: .*--fresh"):
            run.load_state()
