"""Run folders of strangers: they execute nothing, read nothing and write nothing outside."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from lab.files import RunError, encode_json
from lab.training.runs import Run
from tests.faults.attempt import attempt, report, run_command
from tests.faults.numbered import draw_cases
from tests.faults.planted import copy, take_stock

LINKED = (
    "history",
    "checkpoint",
    "checkpoint/step-00000006",
    "checkpoint/step-00000006/model.safetensors",
    "checkpoint/step-00000006/state.json",
    "history/step-00000001.safetensors",
    "metrics.jsonl",
    "config.json",
    "result.json",
    "analysis.json",
    "report.html",
    "report.json",
    "result.step-6.json",
    ".report.html.writing",
    ".metrics.jsonl.writing",
    "tensorboard",
)
"""What is replaced by a link to a file or folder outside."""
COMMANDS = (
    ("analyze", "{run}", "--only", "tokens", "--rows", "4"),
    ("resume", "{run}", "--max-steps", "8", "--threads", "1"),
    ("runs", "{root}"),
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


def test_links_are_not_followed(tmp_path):
    failed, tried = [], 0
    for number, random in draw_cases(default=3):
        home = tmp_path / str(number)
        run, outside = copy(home / "runs"), home / "outside"
        name, kind = random.choice(LINKED), random.choice(("copy", "missing", "device"))
        place = run / name
        outside.mkdir()
        target = outside / place.name
        if kind == "copy" and place.is_dir():
            shutil.copytree(place, target)
        elif kind == "copy":
            target.write_bytes(place.read_bytes() if place.exists() else b"mine")
        elif kind == "device":
            target = Path(os.devnull)
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        place.symlink_to(target)
        before = take_stock(outside)
        words = [word.format(run=run, root=home / "runs") for word in random.choice(COMMANDS)]
        outcome = attempt(run_command(*words))
        tried += 1
        where = f"case {number}: {name} is a link ({kind}), lab {words[0]}"
        if outcome.fault:
            failed.append(f"{where}: {outcome.fault}")
        elif take_stock(outside) != before:
            failed.append(f"{where}: changed what is outside")
    report("links in a run folder", tried, failed)


@pytest.mark.parametrize("command", ["analyze", "resume", "compare"])
def test_code_and_text_of_others_need_trust(tmp_path, monkeypatch, command):
    run, marker = copy(tmp_path / "theirs"), tmp_path / "marker"
    secret = tmp_path / "secret.txt"
    secret.write_text("a private text, long enough to train on. " * 200)
    (tmp_path / "evil_mixer.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.chdir(tmp_path)
    content = json.loads((run / "config.json").read_text())
    words = {
        "analyze": (str(run), "--only", "tokens", "--rows", "4"),
        "resume": (str(run), "--max-steps", "9", "--threads", "1"),
        "compare": (str(run), str(copy(tmp_path / "mine")), "--rows", "4"),
    }[command]

    def say(**parts) -> str:
        changed = {**content, **parts, "signature": "0" * 64}
        (run / "config.json").write_text(json.dumps(changed))
        outcome = attempt(run_command(command, *words))
        assert outcome.code == 1, outcome.text
        assert not outcome.fault
        return outcome.text

    code = {**content["model"], "model": "evil_mixer:Mixer", "stack": "UM"}
    assert "would import and run evil_mixer:Mixer; --trust allows that" in say(model=code)
    assert not marker.exists()
    text = {"name": "bytes", "seq_len": 16, "path": str(secret), "test_share": 0.1, "digest": None}
    assert f"would read the text {secret}; --trust allows that" in say(task=text)
    assert not any(b"private text" in held for held in take_stock(run).values())
    (run / "config.json").write_text(json.dumps({**content, "model": code}))
    attempt(run_command(command, *words, "--trust"))
    assert marker.exists()


def test_ones_own_mixer_needs_no_trust(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (tmp_path / "own_mixer.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    options = "--seq-len 16 --vocab-size 32 --d-model 16 --max-steps 2 --threads 1 --json --eval "
    words = f"mqar --model own_mixer:Mixer --no-certify --out run {options}seq_len=16".split()
    first = attempt(run_command(*words))
    assert first.code == 0, first.text
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    again = attempt(run_command("analyze", str(moved), "--only", "tokens", "--rows", "4"))
    assert again.code == 0, again.text
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another user"))
    other = attempt(run_command("analyze", str(moved), "--only", "tokens", "--rows", "4"))
    assert "--trust allows that" in other.text
    config = ("mqar", "--config", str(moved / "config.json"), "--out", str(tmp_path / "third"))
    assert "--trust allows that" in attempt(run_command(*config)).text


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda run: Run.open(run.path)),
        ("result.json", Run.read_result),
        ("metrics.jsonl", Run.read_metrics),
        ("checkpoint/step-00000006/model.safetensors", Run.load_state),
        ("checkpoint/step-00000006/optimizer.safetensors", Run.load_state),
        ("history/step-00000004.safetensors", lambda run: run.load_model(4)),
    ],
)
def test_a_file_larger_than_any_of_its_kind_is_not_read_into_memory(tmp_path, name, read):
    run = Run.open(copy(tmp_path))
    os.truncate(run.path / name, 2**42)  # of holes, which take no disk
    with pytest.raises(RunError, match=r"has 4,398,046,511,104 bytes, must be ≤ [\d,]+"):
        read(run)


def test_weights_whose_header_says_nothing_of_a_digest_are_read_as_older_ones(tmp_path):
    run = Run.open(copy(tmp_path))
    file = run.path / "history/step-00000004.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size]) | {"__metadata__": None}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    assert run.load_model(4) is not None


def test_weights_whose_digest_fits_but_that_hold_no_tensors_are_one_line(tmp_path):
    run = Run.open(copy(tmp_path))
    home = run.path / "checkpoint/step-00000006"
    header = b'{"adamw/0/exp_avg": {"dtype": "F32", "data_offsets": [0, 0]}}'  # without a shape
    data = len(header).to_bytes(8, "little") + header
    state = json.loads((home / "state.json").read_text())
    del state["seal"]
    for name in ("optimizer", "model"):
        (home / f"{name}.safetensors").write_bytes(data)
        state["sha256"][name] = hashlib.sha256(data).hexdigest()
        (home / "state.json").write_text(encode_json(state, sealed=True))
        with pytest.raises(RunError, match=rf"{name}.safetensors: holds no tensors: .*remove"):
            run.load_state()
