"""The command line's words: versions, near names, names of types, settings from a file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lab import __version__
from lab.api.settings import describe_run
from lab.cli.app import app
from lab.config import Runtime
from lab.training.experiment import carry_out
from lab.training.run import Run
from tasks import TASKS
from tasks.schedule import Schedule

pytestmark = pytest.mark.usefixtures("no_report")


def lab(words: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, words.split())
    assert found.exit_code == code, found.output
    return " ".join(found.output.split())


def test_the_version_has_one_home():
    assert lab("--version") == f"wonderful-lab {__version__}"
    words = [sys.executable, "-m", "lab", "--version"]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    assert found.stdout == f"wonderful-lab {__version__}\n"


def test_the_help_of_the_whole_ends_its_last_line():
    bare, asked = (CliRunner().invoke(app, words).stdout for words in ([], ["--help"]))
    assert bare == asked
    assert bare.endswith(".\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("mqra", "No such command: mqra. Did you mean mqar?"),
        ("MQAR", "Did you mean mqar?"),
        ("selective-copy", "Did you mean selective_copy?"),
        ("analyse runs/mqar", "Did you mean analyze?"),
        ("qqq --x 1", "No such command: qqq. Known: mqar, overwrite,"),
        ("mqar --seqlen 64", "No such option: --seqlen. Did you mean --seq-len"),
        ("mqar --run-dir a", "No such option: --run-dir. Did you mean --out?"),
        ("mqar --dtype fp32", "No such option: --dtype. Did you mean --precision?"),
        ("sweep mqar --grid lr=1e-3", "lr: is not an option. Did you mean learning_rate?"),
        ("trian mqar", "To train a model, name its task: `lab mqar`; `lab tasks` lists them"),
        ("--verison", "No such option: --verison. Did you mean --version?"),
        ("mqar --optimizer sgd", "'--optimizer': 'sgd' is not one of 'muon', 'adamw'."),
        ("mqar --optimizer adam", "'adam' is not one of 'muon', 'adamw'. Did you mean adamw?"),
        ("mqar --device cdua", "device=cdua: must be one of auto, cpu, cuda, cuda:N. Did you mean"),
        (
            "mqar --option A.mask=sof",
            "literal, straight-through, soft, value, oracle. Did you mean",
        ),
        ("mqar --eval seqlen=32", "seqlen is not an option of mqar. Did you mean seq_len?"),
        ("mqar --show 1 --split tset", "train, test, probe, validation. Did you mean test?"),
        (
            "mqar --model torch.nn:Lniear --stack UM",
            "has no attribute 'Lniear'. Did you mean Linear",
        ),
        ("model chems", "cheems, doge, llama, mamba2, jamba. Did you mean cheems?"),
        ("model --size 320 cheems", "Did you mean 320M?"),
        ("bench --only attentoin", "Did you mean attention?"),
        ("study capcity", "Did you mean capacity?"),
        ("sweep mqar --grid preset=smal", "must be one of small, published. Did you mean small?"),
        ("sweep mqar --grid d_model=8 --only dmodel=8", "of d_model, seed. Did you mean d_model?"),
        ("runs --only stoped=solved", "stoped is not an option or column. Did you mean stopped"),
        (
            "runs --only stopped=solvd",
            "stopped must be one of solved, not solved: step limit reached, not",
        ),
        ("runs --only optimizer=adam", "must be one of muon, adamw. Did you mean adamw?"),
        ("certify torch.nn:GRUU", "Did you mean GRU?"),
        ("analyze", "Missing argument 'path'"),
    ],
)
def test_mistyped_words_are_answered_in_one_line(words, meant):
    found = CliRunner().invoke(app, words.split())
    assert found.exit_code == 2
    (line,) = found.stderr.splitlines()
    assert meant in line


COMMANDS = [
    command.name or command.callback.__name__.replace("_", "-")
    for command in app.registered_commands
    if command.callback
]


@pytest.mark.parametrize("name", [*TASKS, *COMMANDS])
def test_the_help_cuts_no_option_and_has_the_types_that_people_know(name):
    text = lab(f"{name} --help")
    for strange in ("<", "list[", "<bool>", "typing"):
        assert strange not in text
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, name)
    options = [o for p in command.params for o in (*p.opts, *p.secondary_opts) if o[:2] == "--"]
    assert options
    assert {*options} <= {word.strip(",;.()[]") for word in text.split()}
    assert "…" not in {word[-1] for word in text.split() if word.startswith("--")}
    if name in TASKS:
        for words in ("--d-model INT", "--learning-rate FLOAT", "--out PATH", "--seq-len INT,…"):
            assert words in text


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("analyze", "mechanism, recall,"),
        ("analyze", "png|svg|html"),
        ("model", "cheems"),
        ("bench", "rows, step,"),
        ("runs", "path|task|model"),
        ("reproduce", "fp32|bf16"),
    ],
)
def test_the_help_lists_what_an_option_may_be(name, listed):
    assert "".join(listed.split()) in "".join(lab(f"{name} --help").split())


def train(path: Path, **given) -> Run:
    """Train a small run without the command, which would also write a report."""
    small = {"seq_len": "16", "vocab_size": "64", "d_model": 16, "stack": "AM", "batch_size": 4}
    run, _ = describe_run("mqar", {**small, "max_steps": 2, "test_rows": 8, **given}, path)
    carry_out(run, Runtime(device="cpu", threads=1))
    return run


def test_a_run_is_repeated_from_its_settings(tmp_path):
    # Which precision and how many threads are faster is measured, and changes rounding.
    train(tmp_path / "a", n_pairs="1:4", options=["A.mask=soft"], precision="fp32")
    config = tmp_path / "a/config.json"
    lab(f"mqar --config {config} --threads 1 --out {tmp_path / 'b'}")
    assert (tmp_path / "b/config.json").read_bytes() == config.read_bytes()
    result = (json.loads((tmp_path / name / "result.json").read_text()) for name in "ab")
    assert len({found["loss"] for found in result}) == 1


@pytest.fixture
def config(tmp_path):
    """A part of what a run's config.json holds."""
    file = tmp_path / "config.json"
    schedule = {"first": 1, "last": 4, "rows": 8}
    task = {"name": "mqar", "seq_len": 16, "vocab_size": 64, "n_pairs": schedule}
    model = {"stack": "AM", "d_model": 16, "options": {"A.mask": "soft", "A.rope_base": "100"}}
    train = {"max_steps": 2, "batch_size": 4, "test_rows": 8, "seed": 3}
    file.write_text(json.dumps({"task": task, "model": model, "train": train}))
    return file


def test_options_take_precedence_over_a_file(config, tmp_path):
    out = tmp_path / "run"
    lab(f"mqar --config {config} --seed 5 --option A.rope_base=50 --vocab-size 32 --out {out}")
    run = Run.open(out)
    assert run.task.options["n_pairs"] == Schedule(1, 4, 8)
    assert (run.task.vocab_size, run.task.seq_len, run.train.seed) == (32, 16, 5)
    assert run.model.options == {"A.mask": "soft", "A.rope_base": "50"}
    assert run.train.lengthen  # the protocol's, which the file does not give
    assert "row 0" in lab(f"mqar --config {config} --show 1").lower()


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("task", {"name": "copy"}, "is of the task copy; use `lab copy --config"),
        ("task", {"depth": 3}, "task: unknown name 'depth'. Known: seq_len, vocab_size"),
        ("train", {"max_step": 3}, "train: unknown name 'max_step'. Did you mean max_steps"),
        ("train", {"seed": "x"}, "seed='x': must be a whole number"),
        ("model", {"options": 3}, "options=3: must be an object"),
        ("task", {"n_pairs": {"from": 1}}, "a schedule has first, last and rows"),
        ("trian", {}, "unknown name 'trian'. Did you mean train"),
    ],
)
def test_a_bad_file_is_one_clear_line(config, part, values, message):
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, part: {**content.get(part, {}), **values}}))
    assert message in lab(f"mqar --config {config}", code=2)


def test_a_file_and_what_stands_for_many_settings_exclude_each_other(config):
    text = lab(f"mqar --config {config} --protocol paper", code=2)
    assert "--config and --protocol: both choose many settings; choose one" in text
    assert "nowhere/config.json: it does not exist" in lab(
        "mqar --config nowhere/config.json", code=2
    )


def test_a_folder_of_runs_must_exist_unless_it_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["runs"]).stdout == "no runs below runs/\n"
    for chosen in ("seed=1", "S.d_state=64", "group=S5"):
        found = CliRunner().invoke(app, ["runs", "--only", chosen])
        assert found.stdout == "no runs below runs/\n"
    unknown = CliRunner().invoke(app, ["runs", "--only", "x=1"])
    assert unknown.exit_code == 2
    assert unknown.stderr.startswith(
        "Error: only=x=1: x is not an option or column. Known: path, task,"
    )
    missing = CliRunner().invoke(app, ["runs", "nope"])
    assert missing.exit_code == 2
    assert missing.stderr == "Error: root=nope: there is no such folder\n"


def test_runs_are_sorted_and_filtered(tmp_path):
    for seed, d_model in ((1, 16), (2, 8)):
        train(tmp_path / str(seed), seed=seed, d_model=d_model)

    def list_seeds(words: str) -> list[int]:
        found = CliRunner().invoke(app, f"runs {tmp_path} --json {words}".split()).stdout
        return [json.loads(line)["seed"] for line in found.splitlines()]

    assert list_seeds("--sort path") == [1, 2]
    assert list_seeds("--sort path --reverse") == [2, 1]
    assert list_seeds("--only d-model=16") == [1]
    assert list_seeds("--only seed=1 --only seed=2 --only learning_rate=3e-3") == [1, 2]
    assert list_seeds("--only stopped=solved") == []
    printed = "not solved: step limit reached"
    assert printed in lab(f"runs {tmp_path}")
    for words in (printed, "step limit reached", "budget"):  # the last is the key in --json
        asked = ["runs", str(tmp_path), "--json", "--only", f"stopped={words}"]
        assert len(CliRunner().invoke(app, asked).stdout.splitlines()) == 2
    assert lab(f"runs {tmp_path} --only stopped=solved").endswith(
        "There, stopped is not solved: step limit reached"
    )
    assert lab(f"runs {tmp_path} --only d_model=17 --only seed=2").endswith(
        "with d_model=17 seed=2 There, d_model is 16, 8"
    )
    found = CliRunner().invoke(app, f"runs {tmp_path} --json --only seed=2".split())
    (row,) = found.stdout.splitlines()
    assert "seq_len=16 vocab_size=64 d_model=8 seed=2 batch_size=4" in json.loads(row)["options"]
    assert json.loads(row)["chance"] == 1 / 32
    assert "only=colour=red: colour is not an option or column. Known: " in lab(
        f"runs {tmp_path} --only colour=red", code=2
    )
