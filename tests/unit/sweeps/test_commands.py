"""`lab sweep`, `lab.sweep` and `lab runs --table`: what they run, print and refuse."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import lab
from lab.api.sweep_settings import SweepSettings, parse, read_file, read_grid
from lab.cli.app import app

TINY = (
    "--seq-len 8 --vocab-size 32 --batch-size 4 --eval-every 4 --test-rows 8 --max-steps 4 "
    "--start-len 8 --stack AM"
)
FILE = """
task = "mqar"
seeds = [0]

[options]
seq_len = 8
vocab_size = 32
batch_size = 4
eval_every = 4
test_rows = 8
max_steps = 4
start_len = 8

[grid]
d_model = [8, 16]

[grid.mixer.attention]
stack = "AM"

[grid.mixer.SSD]
stack = "SM"
"S.d_state" = 4
"""


def invoke(words: str, *more: object):
    return CliRunner().invoke(app, [*words.split(), *map(str, more)])


def test_a_sweep_trains_skips_and_extends(tmp_path):
    out, table = tmp_path / "out", tmp_path / "t.parquet"
    words = f"sweep mqar {TINY} --seeds 1 --workers 1"
    first = invoke(f"{words} --grid d_model=8", "--out", out, "--table", table)
    assert first.exit_code == 0, first.output
    assert "1 of 1 runs to do" in first.stderr
    page = (out / "sweep.html").read_text()
    (out / "sweep.html").write_text("mine")
    refused = invoke(f"{words} --grid d_model=8", "--out", out)
    assert "sweep.html: is there, and the lab did not make it" in refused.stderr
    assert (out / "sweep.html").read_text() == "mine"
    (out / "sweep.html").write_text(page)
    config = out / "d_model=8,seed=0" / "config.json"
    before = config.stat().st_mtime_ns
    more = invoke(f"{words} --grid d_model=8,16", "--out", out)
    assert more.exit_code == 0, more.output
    assert "1 of 2 runs to do" in more.stderr
    assert config.stat().st_mtime_ns == before
    assert "2 runs: 2 not solved: step limit reached." in more.stdout
    shown = invoke(f"{words} --grid d_model=8,16 --show", "--out", out, "--figures", tmp_path / "f")
    assert shown.exit_code == 0, shown.output
    assert (out / "sweep.html").exists()
    assert {file.stem for file in (tmp_path / "f").iterdir()} == {"widths-1", "costs-1"}
    assert pl.read_parquet(table)["status"].to_list() == ["budget"]
    tidy = tmp_path / "all.parquet"
    assert invoke("runs", out, "--table", tidy).exit_code == 0
    found = pl.read_parquet(tidy).sort("d_model")
    assert found["d_model"].to_list() == [8, 16]
    assert found["accuracy"].null_count() == 0
    lines = (out / "d_model=8,seed=0" / "metrics.jsonl").read_text()
    (out / "d_model=8,seed=0" / "metrics.jsonl").write_text("")
    assert invoke("runs", out, "--table", tidy).exit_code == 0
    found = pl.read_parquet(tidy).sort("d_model")
    assert found["status"].to_list() == ["unreadable", "budget"]
    assert "has 0 of 4 steps; lines are missing" in found["error"][0]
    (out / "d_model=8,seed=0" / "metrics.jsonl").write_text(lines)
    assert invoke("runs", out, "--table", tidy).exit_code == 0
    foreign = tmp_path / "mine.csv"
    foreign.write_text("seq_len,status\n1,fine\n")
    refused = invoke("runs", out, "--table", foreign)
    assert refused.exit_code == 2
    assert "is there, and the lab did not make it" in refused.stderr
    assert foreign.read_text() == "seq_len,status\n1,fine\n"
    assert invoke("runs", out, "--table", foreign, "--force").exit_code == 0
    other = invoke(f"{words} --grid d_model=8 --warmup-steps 3", "--out", out)
    assert other.exit_code == 2
    assert "train.warmup_steps=50, this one has train.warmup_steps=3" in other.stderr


def test_a_file_and_python_describe_the_same_sweep(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(FILE)
    cells = read_file(file).build().cells
    assert [cell.factors for cell in cells] == [
        {"d_model": width, "mixer": mixer, "seed": 0}
        for width in (8, 16)
        for mixer in ("attention", "SSD")
    ]
    assert cells[1].options["options"] == ["S.d_state=4"]
    assert cells[0].lengths == (8,)
    fixed = parse(_load(file), "", "").fixed
    grid = {
        "d_model": [8, 16],
        "mixer": {"attention": {"stack": "AM"}, "SSD": {"stack": "SM", "S.d_state": 4}},
    }
    assert SweepSettings("mqar", grid, fixed, (0,)).build().cells == cells


def _load(file: Path):
    import tomllib

    return tomllib.loads(file.read_text())


@pytest.mark.usefixtures("forked_workers")
def test_python_runs_a_sweep_and_shows_it(tmp_path):
    options: dict[str, Any] = {
        "seq_len": 8,
        "vocab_size": 32,
        "batch_size": 4,
        "max_steps": 2,
        "test_rows": 8,
    }
    found = lab.sweep(
        "mqar", {"d_model": [8]}, seeds=1, out=tmp_path / "s", workers=1, stack="AM", **options
    )
    assert found.table["status"].to_list() == ["budget"]
    assert [run.accuracy for run in found.runs.values()] == found.table["accuracy"].to_list()
    assert "1 run: 1 not solved" in repr(found)
    assert repr(found).endswith(", 1 seed")
    file = tmp_path / "small.toml"
    file.write_text(FILE.replace("[8, 16]", "[8]").replace("max_steps = 4", "max_steps = 1"))
    more = lab.sweep(file, seeds=[3], out=tmp_path / "f", workers=1)
    assert more.table["seed"].to_list() == [3, 3]
    assert "<iframe" in found._repr_html_()


def test_words_of_a_grid_have_the_types_of_their_options():
    assert read_grid(
        "mqar", ["d-model=32,64", "learning_rate=1e-3", "S.d_state=16", "tied=false"]
    ) == {
        "d_model": [32, 64],
        "learning_rate": [0.001],
        "S.d_state": [16],
        "tied": [False],
    }
    assert read_grid("mqar", ['n_pairs="2,4",4'])["n_pairs"] == ["2,4", 4]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("mqar", "grid is empty"),
        ("mqar --grid colour=blue", "grid=colour: is not an option"),
        ("mqar --grid d_model=", "must look like d_model=32,64"),
        ("mqar --grid d_model=8,8", "is given twice"),
        ("mqar --d-model 8 --grid d_model=16,32", "d_model=8: is also on the grid"),
        ("mqar --stack S --option S.d_state=8 --grid S.d_state=16", "S.d_state=8: is also on"),
        ("mqar --grid d_model=8 --grid d_model=16", "is given twice"),
        ("mqar --grid d_model=wide", "d_model=wide: must be a whole number"),
        ("mqar --grid d_model=32,33 --n-heads 2 --seeds 1", "1 of 2 runs cannot be built"),
        ("mqar --grid seed=1,2", "use seeds instead"),
        ("mqar --grid d_model=8 --precision auto", "fp32"),
        ("mqar --grid precision=auto,fp32", "precision=auto"),
        ("mqar --grid d_model=8 --seeds 0", "seeds=0: must be in 1 … 1,000"),
        ("mqar --grid d_model=8 --audit", "--audit: is for a single run"),
        ("mqar --grid d_model=8 --dmodel 3", "No such option: --dmodel"),
        ("mqar --grid d_model=8 --workers 0", "workers=0"),
        ("mqar --grid d_model=8 --table t.xls", "must end in .csv or .parquet"),
        ("mqar --grid d_model=8 --lengths 7", "seq_len"),
        ("mqar --grid d_model=8 --lengths a", "lengths='a': must be a whole number ≥ 1"),
        ("mqar --grid d_model=8 --figures /dev/null", "is a file, must be a folder"),
        ("mqra --grid d_model=8", "Did you mean mqar?"),
        ("none.toml", "none.toml: cannot be read: No such file or directory"),
    ],
)
def test_wrong_sweeps_are_refused_before_anything_starts(words, said, tmp_path):
    answer = invoke(f"sweep {words}", "--out", tmp_path / "out")
    assert answer.exit_code == 2, answer.output
    assert said in " ".join(answer.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_one_line_before_anything_starts():
    answer = invoke(f"sweep mqar {TINY} --seeds 1 --grid d_model=8 --out /proc/none")
    assert answer.exit_code == 1
    assert answer.stderr.splitlines()[-1].startswith("Error: /proc/none: cannot be written: ")
    assert "started" not in answer.stderr


def test_what_has_not_run_has_no_page(tmp_path):
    answer = invoke("sweep mqar --grid d_model=8 --show", "--out", tmp_path / "out")
    assert answer.exit_code == 0
    assert "3 runs: 3 not run." in answer.stdout
    assert "page:" not in answer.stdout


def test_a_suite_is_shown_beside_its_numbers(tmp_path):
    words = "sweep --suite mad --d-model 8 --max-steps 2 --test-rows 8 --seeds 1 --workers 1"
    answer = invoke(words, "--only", "task=memorization", "--out", tmp_path)
    assert answer.exit_code == 0, answer.output
    found = " ".join(answer.stdout.split())
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [
        "task=memorization,seed=0"
    ]
    assert "memorization memorize all runs 0." in found
    assert "0.852" in found
    assert "compression none" in found
    assert "the lab's models have none" in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sweep", "name a task, a .toml file, or a --suite"),
        ("sweep --suite mad --seq-len 8", "seq_len: is set by the suite mad"),
        ("sweep --suite mad --grid n_pairs=2", "n_pairs: is set by the suite mad"),
        ("sweep --suite mad --lengths 8", "--lengths: is set by the suite mad"),
        ("sweep --suite mqar", "'mqar' is not one of 'mad', 'cogscale', 'kimi', 'zoology'"),
    ],
)
def test_what_a_suite_does_not_take_is_said(words, said):
    answer = invoke(words)
    assert answer.exit_code == 2
    assert said in " ".join(answer.stderr.split())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"task": "mqar", "grids": {}}, "unknown part 'grids'"),
        ({"grid": {"d_model": [8]}}, "task must name a task"),
        ({"task": "mqar", "grid": [8]}, "grid must be a table"),
        ({"task": "mqar", "seeds": "3"}, "seeds='3': must be how many, or a list of"),
        ({"task": "mqar", "seeds": [], "grid": {"d_model": [8]}}, "seeds is empty"),
        ({"task": "mqar", "grid": {"d_model": []}}, "grid=d_model: has no values"),
        ({"task": "mqar", "grid": {"d_model": 8}}, "must be a list of values"),
        ({"task": "mqar", "grid": {"d_model": [[8]]}}, "must be a number, text"),
        ({"task": "mqar", "grid": {"m": {"a": {"stak": "AM"}}}}, "grid.m.a=stak: is not an option"),
        ({"task": "mqar", "grid": {"accuracy": {"a": {"stack": "AM"}}}}, "is a column"),
    ],
)
def test_wrong_files_name_what_is_wrong(content, said):
    with pytest.raises(ValueError, match="(?s)" + said.replace("[", "\\[")):
        parse(content, "f.toml", "f").build()
