"""`lab tasks`, and a task's rows shown, audited and exported, as a user meets them."""

import json
import re
import subprocess
import sys
from typing import Any

import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from lab.cli.app import app
from lab.cli.task import RowOptions
from lab.suite.parquet import read_recipe
from tasks import TASKS
from tasks.base import accuracy

SMALL = "--seq-len 16 --vocab-size 64"
ANSI = "\x1b["


def lab(*words: str, **env: str):
    terminal = {"COLUMNS": "80", "NO_COLOR": "1", "FORCE_COLOR": "", **env}
    return CliRunner(env=terminal).invoke(app, [p for word in words for p in word.split()])


def one_line(result) -> str:
    """Return the single line an error is answered with."""
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert result.stdout == ""
    return lines[0]


def test_rows_are_shown_with_targets_and_roles_below():
    result = lab(f"mqar {SMALL} --show 2 --seed 3")
    assert result.exit_code == 0, result.output
    assert ANSI not in result.stdout
    assert "k key, v value, q query, f filler" in result.stdout
    assert "row 1 of train, seed 3: 16 tokens, 4 scored" in result.stdout
    batch = TASKS["mqar"](seq_len=16, vocab_size=64).batch(size=1, seed=3)
    lines = result.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("row 0"))
    tokens, targets, roles = lines[first + 1 : first + 4]
    assert tokens.split() == ["0│", *map(str, batch.inputs[0].tolist())]
    scored = batch.targets[0][batch.targets[0] >= 0]
    assert targets.split() == ["→│", *map(str, scored.tolist())]
    assert roles.split()[1:] == ["kvqf"[role] for role in batch.roles[0].tolist()]
    # A target stands under the query that asks for it.
    for cell in re.finditer(r"\d+", targets):
        assert roles[cell.end() - 1] == "q"


def test_in_a_terminal_rows_are_coloured_and_no_letters_are_needed():
    result = lab(
        f"mqar {SMALL} --show 1", NO_COLOR="", FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm"
    )
    assert result.exit_code == 0, result.output
    for colour in ("0;114;178", "213;94;0", "0;158;115", "128;134;145"):
        assert f"48;2;{colour}" in result.stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    assert "roles:  key   value   query   filler " in plain
    assert "k  v" not in plain


def test_long_rows_are_folded_unless_asked_otherwise():
    folded = lab("mqar --seq-len 2048 --show 1").stdout
    assert "… 1,920 more, 480 of them scored …" in folded
    assert max(map(len, folded.splitlines())) <= 80
    whole = lab("mqar --seq-len 2048 --show 1 --whole").stdout
    assert "more" not in whole
    assert len(whole.splitlines()) > 4 * len(folded.splitlines())


def test_a_folded_row_shows_where_its_answers_are():
    shown = lab("hops --show 1").stdout
    assert "32 scored" in shown
    assert shown.rstrip().endswith("… 128 more …")
    assert sum(len(line.split("│")[1].split()) for line in shown.splitlines() if "→│" in line) == 32


def test_a_mixtures_rows_say_their_setting_and_are_not_padded():
    text = lab("induction --seq-len 4,40 --show 8").stdout
    assert "row 0 of train, seed 0: " in text
    for t in (4, 40):
        assert f"{t} tokens, 1 scored; seq_len={t}\n" in text


def test_rows_as_json():
    result = lab(f"mqar {SMALL} --show 3 --split probe --json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    batch = TASKS["mqar"](seq_len=16, vocab_size=64).batch(split="probe", size=3)
    assert [row["row"] for row in rows] == [0, 1, 2]
    assert [row["inputs"] for row in rows] == batch.inputs.tolist()
    assert rows[2]["links"]["query_pos"] == batch.links["query_pos"][2].tolist()


def test_looking_imports_no_analysis_and_leaves_no_files(tmp_path):
    code = (
        "import sys, lab.cli.app, lab.suite.audit\n"
        "lab.suite.audit.ROWS = 64\n"
        "for words in ('mqar --show 1', 'mqar --audit --preset small', 'tasks'):\n"
        "    lab.cli.app.app(words.split(), standalone_mode=False)\n"
        "needless = ('analysis.base', 'plotly', 'torch._dynamo')\n"
        "sys.exit(any(name in sys.modules for name in needless))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert not list(tmp_path.iterdir())


def test_rows_shown_can_be_drawn(tmp_path):
    figure = tmp_path / "rows.html"
    result = lab(f"mqar {SMALL} --show 2 --figure {figure}")
    assert result.exit_code == 0, result.output
    assert f"figure: {figure}" in result.stdout
    assert "train, seed 0" in figure.read_text()


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_is_shown_and_audited_best_first(monkeypatch, name):
    monkeypatch.setattr("lab.suite.audit.ROWS", 64)
    shown = lab(f"{name} --preset small --show 2")
    assert shown.exit_code == 0, shown.output
    result = lab(f"{name} --preset small --audit --json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    scores = {score["name"]: score for score in found["scores"]}
    kind = TASKS[name]
    assert set(scores) == {"chance", "oracle", *kind(**kind.presets["small"].options).shortcuts()}
    accuracies = [score["accuracy"] for score in found["scores"]]
    assert accuracies == sorted(accuracies, reverse=True)
    if not kind.stochastic:
        assert scores["oracle"]["accuracy"] == 1
    for score in found["scores"]:
        if score["name"] != "chance":
            low, high = score["interval"]
            assert low <= score["accuracy"] <= high


def test_an_audit_scores_what_was_asked_for():
    result = lab("mqar --seq-len 16 --vocab-size 64 --n-pairs 1,4 --split probe --audit --json")
    found = json.loads(result.stdout)
    assert (found["rows"], found["split"]) == (1024, "probe")
    task = TASKS["mqar"](seq_len=16, vocab_size=64, n_pairs=(1, 4))
    batch = task.batch(split="probe", size=1024)
    expected = accuracy(task.shortcuts()["last value"](batch), batch.targets)
    (score,) = [s for s in found["scores"] if s["name"] == "last value"]
    assert score["accuracy"] == pytest.approx(expected)


def test_an_audit_tells_which_mixers_can():
    result = lab("word_problem --group Z2 --seq-len 16 --audit")
    assert result.exit_code == 0, result.output
    for words in ("oracle", "1.0000", "chance", "weights set by hand", "SSD", "solves"):
        assert words in result.stdout


def test_an_oracle_that_is_wrong_is_said(monkeypatch):
    def wrong(task, batch):
        return torch.full_like(batch.inputs, 0)

    monkeypatch.setattr(TASKS["induction"], "oracle", wrong)
    result = lab("induction --preset small --audit")
    assert result.exit_code == 1
    assert "induction: its oracle is not always right" in result.stderr


def test_an_oracle_that_a_shortcut_beats_is_said(monkeypatch):
    monkeypatch.setattr("lab.suite.audit.ROWS", 64)
    kind = TASKS["language"]
    monkeypatch.setattr(kind, "oracle", lambda task, batch: task.shortcuts()["unigram"](batch))
    result = lab("language --preset small --audit")
    assert result.exit_code == 1
    assert "language: its oracle is no better than a shortcut" in result.stderr


@pytest.mark.parametrize("options", ["--seq-len 16", "--seq-len 8,16"])
def test_chance_has_no_interval(options):
    text = lab(f"induction --vocab-size 9 {options} --audit").stdout
    (line,) = [line for line in text.splitlines() if "chance" in line]
    assert "0.1250" in line
    assert "…" not in line
    assert "computed" not in line


@pytest.mark.parametrize("action", ["show", "audit", "export"])
def test_what_only_training_takes_is_refused_beside_rows(action):
    given: dict[str, Any] = {action: 1, "rows": 3 if action == "export" else None}
    looking = RowOptions(**given)
    training = {"out": None, "learning-rate": 7.0, "model": "nosuch:X"}
    with pytest.raises(
        ValueError, match=f"^--learning-rate: has no effect with --{action}, which trains nothing$"
    ):
        looking.choose_action(training)
    assert looking.choose_action(dict.fromkeys(training)) == action
    assert RowOptions().choose_action(training) is None


def test_rows_are_exported_with_their_recipe(tmp_path):
    path = tmp_path / "rows.parquet"
    result = lab(f"mqar {SMALL} --n-pairs 1:4 --export {path} --rows 9 --split test --seed 7")
    assert result.exit_code == 0, result.output
    assert f"{path}: 9 rows" in result.stdout
    recipe = read_recipe(path)
    assert (recipe.task.name, recipe.split, recipe.seed, recipe.rows) == ("mqar", "test", 7, 9)
    assert pl.read_parquet(path)["inputs"].to_list() == (
        recipe.task.batch(split="test", size=9, seed=7).inputs.tolist()
    )
    again = lab(f"mqar {SMALL} --export {path} --rows 9")
    assert "already exists" in one_line(again)


def test_a_file_too_large_is_one_line_and_nothing_stays(tmp_path):
    path = tmp_path / "rows.parquet"
    code = (
        "import resource, sys, lab.cli.app\n"
        # What Python compiles would be cut off too, silently, and break every later import.
        "sys.dont_write_bytecode = True\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        f"lab.cli.app.app(['mqar', '--export', {str(path)!r}, '--rows', '300'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"Error: {path}: cannot be written: File too large (os error 27)\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--show 0", "show=0: must be in 1 … 64"),
        ("--show 65", "show=65: must be in 1 … 64"),
        ("--show 1 --audit", "--show and --audit: choose one"),
        ("--audit --export x.parquet --rows 2", "--audit and --export: choose one"),
        ("--show 1 --out run", "--out: has no effect with --show, which trains nothing"),
        ("--audit --eval seq_len=32", "--eval: has no effect with --audit, which trains nothing"),
        (
            "--show 1 --learning-rate 7",
            "--learning-rate: has no effect with --show, which trains nothing",
        ),
        ("--audit --model nosuch:X", "--model: has no effect with --audit, which trains nothing"),
        ("--show 1 --init oracle", "--init: has no effect with --show, which trains nothing"),
        ("--rows 3", "--rows: works only with --export"),
        ("--show 1 --rows 3", "--rows: works only with --export"),
        ("--whole", "--whole: works only with --show"),
        ("--audit --figure x.html", "--figure: works only with --show"),
        ("--split test", "--split: works only with --show, --audit or --export"),
        ("--show 1 --split probe", "split='probe': must be one of train, test"),
        ("--show 1 --seq-len 2", "seq_len=2: must be in 3"),
        ("--show 1 --figure x.gif", "x.gif: must end in .png, .svg or .html"),
        ("--export x.parquet", "--export: needs --rows N"),
        ("--export x.parquet --rows 0", "rows=0: must be in 1"),
        ("--export x.csv --rows 2", "export=x.csv: must end in .parquet"),
        ("--export nowhere/x.parquet --rows 2", "the folder nowhere does not exist"),
    ],
)
def test_what_contradicts_itself_is_one_clear_line(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    assert words in one_line(lab(f"induction {options}"))
    assert not list(tmp_path.iterdir())


def test_the_panel_of_rows_is_in_a_tasks_help():
    text = lab("mqar --help").output
    assert "Rows, shown without training" in text
    for option in ("--show", "--whole", "--figure", "--audit", "--export", "--rows", "--split"):
        assert option in text


@pytest.mark.parametrize("columns", ["80", "160"])
def test_the_suite_is_a_table_at_any_width(columns):
    result = lab("tasks", COLUMNS=columns)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns)
    for name, kind in TASKS.items():
        (line,) = [line for line in lines if re.match(rf"{name}\b", line)]
        assert kind.separates[:20] in line
    assert "2,048 × 8,192" in result.stdout
    assert "82 × 21 numbers" in result.stdout
    if columns == "80":  # a line that is broken goes on below its beginning
        assert all(re.match(r"    \S|\w+: |Sizes ", line) for line in lines)


def test_the_suite_as_json():
    result = lab("tasks --json")
    entries = {entry["name"]: entry for entry in map(json.loads, result.stdout.splitlines())}
    assert list(entries) == list(TASKS)
    mqar = entries["mqar"]
    assert mqar["size"] == {"seq_len": 256, "vocab_size": 8192, "d_input": 0}
    assert (mqar["scored"], mqar["chance"]) == (64, 2 / 8192)
    assert mqar["presets"]["small"] == {"seq_len": 64, "vocab_size": 256, "d_input": 0}
    assert all(entry["microseconds"] > 0 for entry in entries.values())
