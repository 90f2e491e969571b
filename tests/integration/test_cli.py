"""The command line as a user meets it: help, training, resuming, bad input in one line."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lab.cli.app import app
from lab.training.run import Run

MIXERS = "tests.integration.mixers:"
SMALL = "--seq-len 16 --vocab-size 64 --d-model 16 --batch-size 4 --eval-every 4 --test-rows 16"


def lab(*words: str):
    return CliRunner().invoke(app, [part for word in words for part in word.split()])


def one_line(result) -> str:
    """Return the single line an error is answered with."""
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_verify_does_not_claim_properties_that_it_had_no_time_for(monkeypatch):
    class Endless:
        def __init__(self, command: list[str]):
            assert "-P" in command  # or files beside the user would hide packages
            self.stopped = False

        def wait(self, seconds: float | None = None) -> int:
            if not self.stopped:
                raise subprocess.TimeoutExpired("pytest", seconds or 0)
            return -15

        def terminate(self) -> None:
            self.stopped = True

    monkeypatch.setattr("lab.cli.suite.subprocess.Popen", Endless)
    words = "no property failed in 1 minute, but not every property was tried"
    assert lab("verify --minutes 1").output.strip() == words


def test_verify_says_in_one_line_what_it_needs(monkeypatch, tmp_path):
    assert one_line(lab("verify --minutes 0")) == "Error: minutes=0.0: must be > 0"
    monkeypatch.setattr("lab.cli.suite.TESTS", tmp_path / "absent")
    result = lab("verify")
    assert result.exit_code == 2
    assert "needs a checkout with its tests" in one_line(result)


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("--help", "torch"),
        ("mqar --help", "torch"),
        ("runs", "torch"),
    ],
)
def test_a_command_does_not_import_what_it_can_do_without(words, package):
    code = (
        f"import sys, lab.cli.app; lab.cli.app.app({words.split()}, standalone_mode=False); "
        f"sys.exit({package!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_train_resume_and_list(tmp_path):
    out = tmp_path / "run"
    command = f"mqar {SMALL} --max-steps 8 --out {out} --json"
    first = lab(command)
    assert first.exit_code == 0, first.output
    result = json.loads(first.stdout)
    assert set(result) >= {
        *("task", "model", "accuracy", "loss", "steps", "rows", "seconds", "cpu_seconds"),
        *("rows_per_second", "parameters", "stopped"),
    }
    assert result["cpu_seconds"] > 0
    assert (result["task"], result["steps"], result["rows"]) == ("mqar", 8, 32)
    assert [stage["seq_len"] for stage in result["stages"]] == [16]
    assert result["stopped"] == "budget"
    assert result["baselines"]["oracle"] == 1.0
    assert {p.name for p in out.iterdir()} == {
        *("config.json", "metrics.jsonl", "checkpoint", "history", "result.json"),
        *("analysis.json", "report.html", "report.json"),
    }
    again = lab(command)
    assert json.loads(again.stdout) == result
    listed = lab(f"runs {tmp_path} --json")
    (row,) = map(json.loads, listed.stdout.splitlines())
    assert (row["path"], row["accuracy"]) == (str(out), result["accuracy"])
    shown = lab(f"runs {tmp_path}").output
    for word in ("AM*2", "not solved: step limit reached", "mqar", "seq_len=16"):
        assert word in shown
    (out / "report.html").unlink()
    assert lab(f"analyze {out}").exit_code == 0
    assert (out / "report.html").exists()


@pytest.mark.usefixtures("no_report")
def test_the_ending_shows_accuracy_beside_its_baselines_and_the_report(tmp_path):
    result = lab(f"mqar {SMALL} --max-steps 4 --out {tmp_path / 'run'}")
    assert result.exit_code == 0, result.output
    for word in (
        "this model",
        "oracle",
        "chance",
        "not solved: step limit reached after 4 steps",
        "report.html",
    ):
        assert word in result.stdout


@pytest.mark.usefixtures("no_report")
def test_every_option_reaches_the_run(tmp_path):
    lab(
        f"mqar {SMALL} --max-steps 2 --out {tmp_path / 'run'} --stack SE --option S.d_state=8 "
        "--option 0.E.n_experts=16 --n-pairs 2,4 --fillers fresh --no-early-stop --no-tied "
        "--no-train-embedding --optimizer adamw --schedule cosine --precision fp32 --seed 5"
    )
    run = Run.open(tmp_path / "run")
    assert run.task.options["n_pairs"] == (2, 4)
    assert run.task.options["fillers"] == "fresh"
    assert run.model.options == {"S.d_state": "8", "0.E.n_experts": "16"}
    assert (run.model.stack, run.model.tied, run.model.train_embedding) == ("SE", False, False)
    assert (run.train.early_stop, run.train.seed) == (False, 5)
    assert (run.train.optimizer, run.train.schedule) == ("adamw", "cosine")


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (
            "--vocab-size 1000000000 --d-model 1000000",
            "d_model=1000000, vocab_size=1000000000, AM*2",
        ),
        ("--batch-size 1000000000", "batch_size=1000000000, seq_len=256: a step"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_training(tmp_path, sizes, named):
    result = lab(f"mqar --out {tmp_path / 'run'} {sizes}")
    assert result.exit_code == 2
    line = one_line(result)
    assert named in line
    assert "does not fit in memory: takes at least" in line
    assert line.endswith("are free")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_report")
def test_the_papers_protocol_is_kept_in_the_run(tmp_path):
    out = tmp_path / "run"
    result = lab(
        f"mqar --seq-len 256 --protocol paper --out {out} --max-minutes 0.0001 --test-rows 4 "
        "--vocab-size 512 --batch-size 2 --train-rows 2"
    )
    assert result.exit_code == 0, result.output
    train = Run.open(out).train
    assert (train.learning_rate, train.optimizer, train.max_steps) == (3e-4, "adamw", 65_536)
    assert train.batch_size == 2


@pytest.mark.usefixtures("no_report")
def test_a_users_own_mixer_trains_without_editing_the_project(tmp_path):
    result = lab(
        f"mqar {SMALL} --max-steps 2 --out {tmp_path / 'run'} --json "
        "--model tests.unit.models.test_stack:Shift --option U.gain=2"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"] == "tests.unit.models.test_stack:Shift"
    assert Run.open(tmp_path / "run").model.stack == "UM*2"
    assert "tests.unit.models.test_stack:Shift in block 0, 1: gain=2.0 sign=False" in result.stderr
    (row,) = map(json.loads, lab(f"runs {tmp_path} --json").stdout.splitlines())
    assert (row["stack"], row["model"]) == ("UM*2", "tests.unit.models.test_stack:Shift")
    shown = " ".join(lab(f"runs {tmp_path}").stdout.split())
    assert "UM*2 (tests.unit.models.test_stack:Shift)" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--seq-len 17", ("seq_len=17", "even")),
        ("--seq-len 2", ("seq_len=2", "4")),
        ("--d-model 6 --n-heads 2", ("3", "even")),
        ("--seq-len 16 --n-pairs 5 --vocab-size 64", ("n_pairs=5", "4")),
        ("--d-model 65 --n-heads 2", ("d_model=65", "n_heads=2")),
        ("--stack ZM", ("unknown mixer 'Z'", "A, S, I, ")),
        ("--stack UM", ("U is your own mixer", "--model")),
        ("--option A.masc=soft", ("A.masc", "mean mask?")),
        ("--option A.mask=hard", ("A.mask='hard'", "soft")),
        ("--option mask", ("option=mask", "must look like")),
        ("--device cuda", ("device=cuda", "use --device cpu")),
        ("--device tpu", ("device=tpu", "cuda:N")),
        ("--learning-rate 0", ("learning_rate=0", "> 0")),
        ("--protocol paper --d-model 48", ("d_model=48", "32, 64, 128, 256")),
        ("--model nowhere", ("model=nowhere", "module:Class")),
        ("--n-pairs -3", ("n_pairs=-3", "1")),
        ("--option A.mask=soft --option A.mask=value", ("A.mask=soft is given too",)),
        ("--option A.rope_base=-1", ("base=-1.0", "positive")),
        ("--option A.mask=soft --option A.max_seq_len=10", ("max_seq_len=10", "raise it")),
        (f"--model {MIXERS}Good --stack AM", ("stack='AM'", "has no U")),
        (f"--model {MIXERS}Wrong", ("Wrong", "[b t d]", "[1, 256, 1]")),
        (f"--model {MIXERS}Pair", ("Pair", "tuple")),
        (f"--model {MIXERS}Raising", ("Raising", "FileNotFoundError", "no weights")),
        (f"--model {MIXERS}Verbose", ("Verbose", "no weights no weights", "…")),
        (f"--model {MIXERS}Unbuildable", ("Unbuildable", "TypeError", "depth")),
        ("--model tests.integration.broken_module:Any", ("RuntimeError", "on import")),
    ],
)
def test_bad_usage_is_one_clear_line_and_exit_code_2(tmp_path, options, words):
    result = lab(f"mqar --out {tmp_path / 'run'} {options}")
    assert result.exit_code == 2
    line = one_line(result)
    assert len(line) < 600
    for word in words:
        assert word in line
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_report")
def test_an_out_that_cannot_hold_the_run_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    result = lab(f"mqar {SMALL} --out {file}")
    assert result.exit_code == 2
    assert "is a file" in result.stderr
    run = tmp_path / "run"
    assert lab(f"mqar {SMALL} --max-steps 2 --out {run}").exit_code == 0
    other = lab(f"mqar {SMALL} --max-steps 3 --out {run}")
    assert other.exit_code == 2
    assert "train.max_steps=2, this one has train.max_steps=3" in other.stderr
    unwritable = lab(f"mqar {SMALL} --out /proc/run")
    assert unwritable.exit_code == 1
    assert "/proc/run: cannot be written" in unwritable.stderr


@pytest.mark.usefixtures("no_report")
def test_a_tampered_checkpoint_is_one_line_and_exit_code_1(tmp_path):
    out = tmp_path / "run"
    stopped = lab(f"mqar {SMALL} --max-steps 9 --max-minutes 1e-9 --out {out}")
    assert stopped.exit_code == 0
    assert "not solved: time limit reached after 1 step, " in stopped.output
    assert "why it is not solved, at rows of 16 tokens: " in " ".join(stopped.output.split())
    assert "not solved: time limit reached: mqar" in lab(f"runs {tmp_path}").output
    (file,) = out.glob("checkpoint/*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    result = lab(f"mqar {SMALL} --max-steps 9 --out {out}")
    assert result.exit_code == 1
    assert "truncated or changed" in result.stderr.splitlines()[-1]


def test_a_mistyped_run_is_answered_with_one_beside_it(tmp_path):
    (tmp_path / "mqar").mkdir()
    (tmp_path / "mqar/config.json").touch()
    result = lab(f"analyze {tmp_path}/mqra")
    assert result.exit_code == 1
    told = "".join(result.stderr.split())  # however the line is broken
    assert told.endswith(f"itdoesnotexist.Didyoumean{tmp_path}/mqar?")
    assert "Did you mean" not in lab(f"analyze {tmp_path}/hops").stderr


def test_a_file_in_place_of_its_folder_and_the_reverse_are_answered_with_the_other(tmp_path):
    (tmp_path / "config.json").touch()
    result = lab(f"resume {tmp_path}/config.json")
    assert result.exit_code == 1
    told = "".join(result.stderr.split())
    assert told.endswith(f"isnotarunfolder:itisafile.Didyoumean{tmp_path}?")
    result = lab(f"mqar --config {tmp_path}")
    assert result.exit_code == 2
    told = "".join(result.stderr.split())
    assert told.endswith(f"isafolder,mustbeafile.Didyoumean{tmp_path}/config.json?")


def test_a_mixer_whose_matrix_raises_keeps_its_result(tmp_path):
    out = tmp_path / "run"
    result = lab(f"mqar {SMALL} --max-steps 2 --out {out} --model {MIXERS}NoMatrix")
    assert result.exit_code == 0, result.output
    assert "this model" in result.stdout
    page = (out / "report.html").read_text()
    assert "NoMatrix.matrix raised RuntimeError: not today" in page
    assert '<section class="analysis" id="anatomy">' in page


@pytest.mark.usefixtures("no_report")
def test_a_path_that_looks_like_markup_is_only_a_path(tmp_path):
    out = tmp_path / "[red]x[" / "]"
    result = lab(f"mqar {SMALL} --max-steps 2 --out {out}")
    assert result.exit_code == 0, result.output
    assert f"report: {out}/report.html" in result.stdout
    assert lab(f"runs {tmp_path}").exit_code == 0
