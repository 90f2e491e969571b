"""Mixtures, schedules, presets, and settings beyond training, as a user types them."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lab
from lab.api.settings import read_settings
from lab.cli.app import app
from lab.config import ModelConfig
from lab.training.experiment import carry_out
from lab.training.run import Run
from lab.training.speed import StepTime
from tasks.schedule import Schedule

pytestmark = pytest.mark.usefixtures("no_report")
SMALL = ["--seq-len", "16", "--vocab-size", "64", "--max-steps", "4", "--test-rows", "8"]


def run(*arguments: object, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["mqar", *map(str, arguments)])
    assert found.exit_code == code, found.output
    return found.output


def result_of(path: Path) -> dict:
    return json.loads((path / "result.json").read_text())


def test_a_schedule_is_over_the_steps_of_the_run(tmp_path):
    out = tmp_path / "run"
    run(*SMALL, "--n-pairs", "1:4@2", "--batch-size", "8", "--out", out)
    opened = Run.open(out)
    assert opened.task.options["n_pairs"] == Schedule(1, 4, 16)
    pairs = [(opened.task.batch(start=s, size=1).targets != -100).sum().item() for s in range(16)]
    assert pairs == sorted(pairs)
    assert set(pairs) == {1, 2, 3, 4}
    # The same command again finds it finished.
    assert "resuming" not in run(*SMALL, "--n-pairs", "1:4@2", "--batch-size", "8", "--out", out)


def test_a_schedule_of_the_papers_protocol_has_all_its_steps(tmp_path):
    text = run(
        *("--seq-len", 256, "--protocol", "paper", "--n-pairs", "4:64@30000"),
        *("--out", tmp_path / "run"),
        code=2,
    )
    assert "train_rows=262,144" in text


def test_several_lengths_at_once(tmp_path):
    out = tmp_path / "run"
    run(*SMALL[2:], "--seq-len", "8,16", "--out", out)
    assert Run.open(out).task.seq_len == 16
    # The same command again finds the run, whatever JSON made of its options.
    again = run(*SMALL[2:], "--seq-len", "8,16", "--out", out, "--eval", "seq_len=8")
    assert "evaluating seq_len=8" in again


def test_settings_beyond_training_are_kept_and_not_done_twice(tmp_path):
    out = tmp_path / "run"
    text = run(*SMALL, "--out", out, "--eval", "seq_len=16,32", "--eval", "n_pairs=1")
    assert "seq_len=32" in text
    entries = result_of(out)["evaluations"]
    assert [(e["option"], e["value"]) for e in entries] == [
        ("seq_len", 16),
        ("seq_len", 32),
        ("n_pairs", 1),
    ]
    assert entries[0]["accuracy"] == result_of(out)["accuracy"]
    for entry in entries:
        low, high = entry["interval"]
        assert 0 <= low <= entry["accuracy"] <= high <= 1
        assert entry["scored"] == entry["rows"] * (
            1 if entry["option"] == "n_pairs" else entry["value"] // 4
        )
    again = run(*SMALL, "--out", out, "--eval", "seq_len=32,48")
    assert "evaluating seq_len=48" in again
    assert "evaluating seq_len=32" not in again
    assert result_of(out)["evaluations"][:3] == entries


def test_what_a_model_cannot_take_is_said(tmp_path):
    out = tmp_path / "run"
    options = ["--option", "A.mask=soft", "--option", "A.max_seq_len=16"]
    text = run(*SMALL, *options, "--out", out, "--eval", "seq_len=32,16")
    assert "max_seq_len" in text
    refused, taken = result_of(out)["evaluations"]
    assert "max_seq_len" in refused["error"]
    assert "accuracy" in taken


def test_a_preset_brings_layers_with_their_options_unless_a_stack_is_given():
    def read(**given) -> ModelConfig:
        return read_settings("hops", {"preset": "small", **given})[0].model

    assert (read().stack, read().options) == ("SM AM*2", {"S.position": "conv"})
    changed = read(options=["S.position=rope", "S.d_state=32"])
    assert changed.options == {"S.position": "rope", "S.d_state": "32"}
    assert read(stack="SM*3").options == {}


def test_a_preset_gives_way_to_options(tmp_path):
    run("--preset", "small", *SMALL[4:], "--seq-len", "16", "--out", tmp_path / "run")
    task = Run.open(tmp_path / "run").task
    assert (task.seq_len, task.vocab_size) == (16, 256)


def test_perplexity_and_bits_go_with_the_loss(tmp_path):
    run(*SMALL, "--out", tmp_path / "run")
    result = result_of(tmp_path / "run")
    assert result["perplexity"] == pytest.approx(2 ** result["bits_per_token"])


def test_a_wide_run_learns_at_a_lower_rate_unless_one_is_given(tmp_path):
    wide = (*SMALL, "--d-model", "160", "--max-minutes", "1e-9")
    run(*wide, "--out", tmp_path / "run")
    assert Run.open(tmp_path / "run").train.learning_rate == pytest.approx(2.4e-3)
    out = tmp_path / "given"
    run(*wide, "--learning-rate", "3e-3", "--out", out)
    said = run(*wide, "--out", out, code=2)
    assert "holds a run with train.learning_rate=0.003, this one has" in said


def test_a_run_of_this_protocol_takes_nothing_from_its_folder(tmp_path):
    out = tmp_path / "run"
    run(*SMALL, "--batch-size", "8", "--out", out)
    text = run(*SMALL, "--out", out, code=2)
    assert "holds a run with train.batch_size=8, this one has train.batch_size=256" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--eval seq_len=15", "seq_len=15: must be even"),
        ("--eval vocab_size=128", "eval vocab_size=128: has 128 tokens, the model 64"),
        ("--eval depth=3", "depth is not an option of mqar. Known: seq_len"),
        ("--n-pairs 1:4@5", "n_pairs=1:4@5: steps must be in 1 … 4"),
        ("--n-pairs 1:5", "n_pairs=5: must be in 1 … 4"),
        ("--fillers any,none", "fillers='none'"),
        ("--n-pairs 1:4 --train-rows 64 --batch-size 8", "train_rows=64 repeats them; choose one"),
        ("--preset tiny", "'tiny' is not one of"),
        ("--d-model 0", "d_model=0: must be ≥ 1"),
    ],
)
def test_bad_settings_are_answered_before_training(tmp_path, unchecked, arguments, message):
    out = tmp_path / "run"
    text = run(*SMALL, *arguments.split(), "--out", out, code=2)
    assert message in " ".join(text.split())
    assert not out.exists()


MIXER = """
import torch
from torch import nn
import neighbour

class Mine(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.map = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        return neighbour.scale(self.map(x))
"""


@pytest.fixture
def own_mixer(tmp_path, monkeypatch):
    """Return what writes a mixer and the file that it uses, each anew, into the working folder."""
    monkeypatch.chdir(tmp_path)
    # Python's cache of compiled files tells a change by the second.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(scale: float) -> None:
        for name, text in (
            ("own_mixer", MIXER),
            ("neighbour", f"def scale(x):\n    return x * {scale}\n"),
        ):
            Path(f"{name}.py").write_text(text)
            sys.modules.pop(name, None)

    write(1.0)
    yield write
    for name in ("own_mixer", "neighbour"):
        sys.modules.pop(name, None)


OWN = (*SMALL, "--model", "own_mixer:Mine", "--no-certify", "--out", "run")


def test_an_edited_mixer_is_said_and_trained_anew_only_when_asked(own_mixer):
    run(*OWN)
    before = result_of(Path("run"))["loss"]
    run(*OWN)  # nothing has changed, so it is shown
    Path("run", "notes.txt").write_text("mine")
    own_mixer(0.0)
    said = run(*OWN, code=2)
    assert "the code of own_mixer:Mine has changed since this run began" in said
    assert "--fresh trains it anew" in said
    assert result_of(Path("run"))["loss"] == before
    analyzed = CliRunner().invoke(app, ["analyze", "run", "--only", "curves", "--trust"])
    assert "own_mixer:Mine has changed" in analyzed.output
    assert "has changed" in (Path("run") / "report.html").read_text()
    with pytest.warns(UserWarning, match="own_mixer:Mine has changed"):
        lab.open("run", trust=True)
    run(*OWN, "--fresh")
    assert result_of(Path("run"))["loss"] != before
    assert Path("run", "notes.txt").read_text() == "mine"
    run(*OWN)
    assert not Run.open("run", trust=True).describe_change()


def test_fresh_removes_no_run_of_other_settings(tmp_path):
    out = tmp_path / "run"
    run(*SMALL, "--out", out)
    assert "seed=0" in run(*SMALL, "--seed", "1", "--out", out, "--fresh", code=2)
    assert result_of(out)["steps"] == 4


def test_the_precision_that_was_chosen_belongs_to_the_settings(tmp_path, monkeypatch):
    chosen = "bf16"

    def measure(run, device, precision, counts):
        return [StepTime(chosen if precision == "auto" else precision, counts[0], 1.0)]

    monkeypatch.setattr("lab.training.experiment.measure_choices", measure)
    out = tmp_path / "run"
    run(*SMALL, "--out", out)
    assert Run.open(out).train.precision == "bf16"
    # The same command finds the run, and repeats it as it was, whatever would be chosen now.
    chosen = "fp32"
    run(*SMALL, "--out", out)
    run(*SMALL, "--out", out, "--fresh")
    assert Run.open(out).train.precision == "fp32"
    again = tmp_path / "again"
    chosen = "bf16"
    run("--config", out / "config.json", "--out", again)
    assert Run.open(again).train.precision == "fp32"
    said = run(*SMALL, "--out", out, "--precision", "bf16", code=2)
    assert "train.precision=fp32, this one has train.precision=bf16" in said


def test_a_run_killed_before_its_first_checkpoint_keeps_its_precision(tmp_path, monkeypatch):
    described, runtime = read_settings("mqar", {"seq_len": 16, "vocab_size": 64, "max_steps": 2})
    begun = dataclasses.replace(described, path=tmp_path / "run").with_precision("bf16")
    begun.claim()
    same = dataclasses.replace(described, path=begun.path)
    carry_out(same, runtime)
    assert result_of(begun.path)["precision"] == "bf16"
