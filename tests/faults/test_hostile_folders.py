"""Run folders of strangers: any content ends in a result or in one line, and stays inside."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.files import RunError
from lab.training.run import Run
from tests.faults.attempt import attempt, report, run_command
from tests.faults.numbered import draw_cases
from tests.faults.planted import copy, take_stock
from tests.faults.plants import plant

COMMANDS = (
    ("analyze", "{run}", "--only", "tokens", "--rows", "4"),
    ("analyze", "{run}", "--only", "tokens", "--rows", "4", "--step", "4"),
    ("resume", "{run}", "--max-steps", "8", "--threads", "1"),
    ("runs", "{root}"),
    ("runs", "{root}", "--json"),
    ("compare", "{run}", "{other}", "--rows", "4"),
    (
        *("mqar", "--config", "{run}/config.json", "--out", "{home}/new", "--max-steps", "2"),
        *("--threads", "1", "--json", "--eval", "seq_len=16"),
    ),
)
PATIENCE = 240
"""Seconds after which a command waits for something, however busy the machine is."""
MOST = 2**26
"""Bytes of the largest page that is searched; a file of holes only would fill memory."""
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
}
"""The files of a run, and what reads them."""
FOLDERS: dict[str, Callable[[Run], object]] = {
    "checkpoint": Run.load_state,
    "checkpoint/step-00000006": Run.load_state,
    "history": Run.list_steps,
}
"""The folders in a run's, and what reads what is in them."""


def test_planted_folders(tmp_path, monkeypatch):
    failed, tried = [], 0
    for number, random in draw_cases(default=4):
        home = tmp_path / str(number)
        run = copy(home / "runs")
        other = copy(home / "others")
        monkeypatch.chdir(home)
        said = plant(run, random)
        words = [
            word.format(run=run, root=run.parent, other=other, home=home)
            for word in random.choice(COMMANDS)
        ]
        outside = take_stock(home / "outside")
        outcome = attempt(run_command(*words), seconds=PATIENCE)
        tried += 1
        where = f"case {number}: lab {' '.join(words[:1])}, {said}"
        pages = b"".join(page.read_bytes() for page in home.rglob("*.html") if _is_page(page))
        if outcome.fault:
            failed.append(f"{where}: {outcome.fault}: {outcome.text[-200:]!r}")
        elif take_stock(home / "outside") != outside:
            failed.append(f"{where}: changed what is outside")
        elif b"<script>alert(1)" in pages or b"<img src=x" in pages:
            failed.append(f"{where}: a page holds what would run")
        shutil.rmtree(home)
    report("planted folders", tried, failed)


def _is_page(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and file.stat().st_size < MOST


@pytest.mark.parametrize("name", [*READ, *FOLDERS])
def test_what_a_link_leads_to_is_not_read(tmp_path, name):
    run = Run.open(copy(tmp_path / "theirs"))
    shutil.move(run.path / name, tmp_path / "outside")
    (run.path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match=r"is a link, must be a file"):
        {**READ, **FOLDERS}[name](run)


@pytest.mark.parametrize("name", READ)
def test_a_pipe_or_a_file_larger_than_any_of_its_kind_is_not_read(tmp_path, name):
    run = Run.open(copy(tmp_path))
    os.truncate(run.path / name, 2**42)  # of holes, which take no disk
    with pytest.raises(RunError, match=r"has 4,398,046,511,104 bytes, must be ≤ [\d,]+"):
        READ[name](run)
    (run.path / name).unlink()
    os.mkfifo(run.path / name)
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
