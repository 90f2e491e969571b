"""Lines cut off by a full disk, files that vanish, memory that is full, modules that exit."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from lab.config import Runtime
from lab.files import RunError
from lab.training import experiment
from lab.training import run as runs
from lab.training.experiment import carry_out
from lab.training.run import Run
from tests.faults.attempt import attempt, run_command
from tests.faults.planted import copy, describe

RUNTIME = Runtime(device="cpu", checkpoint_every=2, threads=1)
WORDS = (
    *("--seq-len", "16", "--d-model", "16", "--max-steps", "40"),
    *("--threads", "1", "--no-certify", "--out", "run"),
)
LEAVING = """
import sys
from torch import nn
class Leaving(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.map, self.calls = nn.Linear(d_model, d_model), 0
    def forward(self, x):
        self.calls += 1
        if self.calls > {calls}:
            sys.exit(0)
        return self.map(x)
"""


def test_a_disk_that_fills_within_a_line_of_metrics(tmp_path, monkeypatch):
    run, write = describe(tmp_path / "run"), os.write

    def fill(file: int, data: bytes) -> int:
        return write(file, data[: len(data) // 2] if b'"step": 3' in data else data)

    monkeypatch.setattr(runs.os, "write", fill)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        carry_out(run, RUNTIME)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    monkeypatch.undo()
    assert carry_out(run, RUNTIME)["steps"] == run.train.max_steps


def test_what_vanished_is_said_and_not_begun_anew(tmp_path):
    run = Run.open(copy(tmp_path)).set_limit(8)
    shutil.move(run.path / "checkpoint", tmp_path / "aside")
    with pytest.raises(RunError, match=r"the checkpoint of step 6 is gone; put it back"):
        carry_out(run, RUNTIME)
    assert len(run.read_metrics()) == 6
    shutil.move(tmp_path / "aside", run.path / "checkpoint")
    assert carry_out(run, RUNTIME)["steps"] == 8
    run = Run.open(copy(tmp_path / "other"))
    (run.path / "result.json").unlink()
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join(lines[:4]))
    with pytest.raises(RunError, match=r"metrics.jsonl ends at step 4, the checkpoint is of step"):
        carry_out(run, RUNTIME)


NO_MEMORY = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
"""As torch says it."""


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(NO_MEMORY)], ids=["python", "torch"])
@pytest.mark.parametrize("where", ["fit", "measure_choices", "summarize"])
def test_memory_that_does_not_suffice_is_one_sentence(tmp_path, monkeypatch, where, error):
    def fail(*given: object) -> None:
        raise error

    run = describe(tmp_path / "run")
    monkeypatch.setattr(experiment, where, fail)
    said = r"training: does not fit in memory, of which .* are free; choose smaller sizes, or fewer"
    with pytest.raises(RunError, match=said):
        carry_out(run, RUNTIME)
    monkeypatch.undo()
    assert carry_out(run, RUNTIME)["steps"] == run.train.max_steps


def test_a_step_that_memory_does_not_hold_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ("--seq-len", "256", "--batch-size", "2048", "--d-model", "128", "--precision", "fp32")
    words = ("--no-lengthen", "--threads", "1", "--max-steps", "1", "--out", "run")
    outcome = attempt(run_command("mqar", *sizes, *words), memory=1.5)
    assert outcome.code == 1, outcome.text
    assert not outcome.fault
    assert "training: does not fit in memory, of which" in outcome.text


def test_a_text_that_vanishes_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be, that is the question. " * 500)

    outcome = attempt(partial(_train_while_it_vanishes, text))
    assert outcome.code in (1, 2), outcome.text
    assert not outcome.fault


def _train_while_it_vanishes(text: Path) -> None:
    fit = experiment.fit

    def vanish(*given):
        for row in fit(*given):
            text.unlink(missing_ok=True)
            yield row

    experiment.fit = vanish
    run_command("bytes", "--path", str(text), *WORDS)()


@pytest.mark.parametrize("calls", [0, 20])
def test_a_mixer_that_ends_the_process_is_an_error(tmp_path, monkeypatch, calls):
    monkeypatch.chdir(tmp_path)
    Path("leaving_mixer.py").write_text(LEAVING.format(calls=calls))
    words = ("mqar", "--vocab-size", "32", "--model", "leaving_mixer:Leaving", *WORDS)
    outcome = attempt(run_command(*words))
    assert outcome.code in (1, 2), outcome.text
    assert not outcome.fault


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("tasks.py", "import lab; lab.train"),
        ("tasks/__init__.py", "from lab.laws import certify"),
        ("analysis/__init__.py", "import lab; lab.train"),
        ("analysis.py", "from lab.laws import certify"),  # which needs no analysis
        ("analysis/notes.py", "import lab; lab.train"),  # no package: Python finds the lab's
        ("lab/notes.py", "import lab; lab.train"),
    ],
)
def test_a_file_of_the_user_that_hides_a_package_is_named(tmp_path, name, line):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    (tmp_path / "script.py").write_text(line)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    package = name.partition("/")[0].removesuffix(".py")
    said = f"ImportError: {tmp_path / name} hides the package {package} of wonderful-lab: rename"
    hides = name in ("tasks.py", "tasks/__init__.py", "analysis/__init__.py")
    assert (done.returncode, said in done.stderr) == (hides, hides), done.stderr


def test_files_beside_the_user_change_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("queue.py", "statistics.py", "plotly.py", "tasks.py", "ipywidgets.py", "PIL.py"):
        Path(name).write_text("raise RuntimeError('the file of the user was imported')")
    Path("analysis").mkdir()
    Path("analysis/__init__.py").write_text("raise RuntimeError('the user has his own')")
    Path("neighbour.py").write_text("gain = 1.0")
    Path("my_mixer.py").write_text(
        "from torch import nn\n"
        "class Mixer(nn.Module):\n"
        "    def __init__(self, d_model):\n"
        "        super().__init__()\n"
        "        self.map = nn.Linear(d_model, d_model)\n"
        "    def forward(self, x):\n"
        "        import neighbour\n"
        "        return neighbour.gain * self.map(x)\n"
    )
    words = ("mqar", "--vocab-size", "32", "--model", "my_mixer:Mixer", *WORDS)
    outcome = attempt(run_command(*words, "--max-steps", "2", "--json"))
    assert outcome.code == 0, outcome.text
