"""`lab analyze` and `lab compare` as a user meets them: files, options, refusals in one line."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from analysis.pages import comparison
from lab.cli.app import app
from lab.training.run import Run

SMALL = "--seq-len 16 --vocab-size 64 --d-model 16 --batch-size 4 --eval-every 4 --test-rows 16"


def lab(*words: str):
    return CliRunner().invoke(app, list(words))


def one_line(result) -> str:
    """Return the single line an error is answered with."""
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    command = f"mqar {SMALL} --max-steps 8 --out {out}"
    assert lab(*command.split()).exit_code == 0
    return out


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_everything_is_written_and_what_does_not_apply_is_said(run):
    result = lab("analyze", str(run), "--rows", "8")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [f"{run}/analysis.json", f"{run}/report.html"]
    assert "state_space: does not apply, no block has a mixer with a state" in result.stderr
    recorded = json.loads((run / "analysis.json").read_text())
    assert f"mechanism: {recorded['analyses']['mechanism'][0]['says']}" in result.stderr
    assert {"mechanism", "heads", "dynamics"} <= set(recorded["analyses"])
    assert (recorded["rows"], recorded["step"]) == (8, 8)


def test_one_analysis_of_other_weights_on_stdout(run):
    result = lab("analyze", str(run), "--only", "matrices", "--step", "4", "--rows", "2", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told == json.loads((run / "analysis-step4.json").read_text())
    assert list(told["analyses"]) == ["matrices"]
    assert told["step"] == 4
    assert (
        "the model after step 4, which is not its last" in (run / "report-step4.html").read_text()
    )


def state_of(run: Path) -> dict[str, tuple[int, str]]:
    """Return when each file was last written, and its digest."""
    return {
        str(path.relative_to(run)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in run.rglob("*")
        if path.is_file()
    }


def test_a_finished_run_is_shown_without_torch(run):
    before = state_of(run)
    for words in (f"mqar {SMALL} --max-steps 8 --out {run}", f"resume {run}"):
        code = (
            f"import sys, lab.cli.app; lab.cli.app.app({words.split()}, standalone_mode=False); "
            "sys.exit('torch' in sys.modules)"
        )
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        assert "not solved: step limit reached after 8 steps" in shown.stdout
        assert f"`lab analyze {run}`" in shown.stderr
    assert state_of(run) == before


def test_a_finished_training_command_prints_its_result_and_touches_nothing(run):
    before = state_of(run)
    command = f"mqar {SMALL} --max-steps 8 --out {run}".split()
    result = lab(*command)
    assert result.exit_code == 0, result.output
    assert "not solved: step limit reached after 8 steps" in result.stdout
    assert f"report: {run}/report.html" in result.stdout
    assert state_of(run) == before
    # More evaluations are new: they join the report, and nothing leaves it.
    analyses = json.loads((run / "analysis.json").read_text())["analyses"]
    assert "generalisation" not in analyses
    assert lab(*command, "--eval", "n_pairs=2").exit_code == 0
    assert {*analyses, "generalisation"} == {
        *json.loads((run / "analysis.json").read_text())["analyses"]
    }
    # A report that is gone is made again.
    (run / "report.html").unlink()
    assert lab(*command).exit_code == 0
    assert (run / "report.html").exists()


def test_a_partial_analysis_joins_the_report(run):
    before = json.loads((run / "analysis.json").read_text())
    assert "heads" not in before["analyses"]
    result = lab("analyze", str(run), "--only", "heads")
    assert result.exit_code == 0, result.output
    after = json.loads((run / "analysis.json").read_text())
    assert after["analyses"].pop("heads")
    assert after["analyses"] == before["analyses"]
    page = (run / "report.html").read_text()
    for name in (*before["analyses"], "heads"):
        assert f'<section class="analysis" id="{name}">' in page


def test_figures_are_saved(run, tmp_path):
    figures = tmp_path / "figures"
    options = ("--only", "curves", "--only", "anatomy", "--figures", str(figures))
    result = lab("analyze", str(run), *options, "--format", "html")
    assert result.exit_code == 0, result.output
    names = {path.name for path in figures.iterdir()}
    assert names == {"curves-1.html", "curves-2.html", "anatomy-1.html"}
    assert 'data-figure="figure"' in (figures / "curves-1.html").read_text()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--only matrix", "only=matrix: is not an analysis. Did you mean matrices?"),
        ("--only experts", "only=experts: no block"),
        ("--rows 0", "rows=0: must be ≥ 1"),
        ("--rows 99999999", "rows=99999999 of 16 tokens take about"),
        ("--rows 64 --memory 0.000001", "not even one row fits"),
        ("--memory -1", "memory=-1.0: must be > 0"),
        ("--memory inf", "memory=inf: must be > 0 and ≤ 1,048,576 GiB"),
        ("--step 5", "step=5: must be one of 0, 1, 2, 3, 4"),
        ("--format pdf", "'--format': 'pdf' is not one of 'png', 'svg', 'html'"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(run, options, line):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    result = lab("analyze", str(run), *options.split())
    assert line in one_line(result)
    assert result.exit_code == 2
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def without_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoint")


def newer(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "format": 2}))


def spoiled_result(**entries):
    def spoil(run: Path) -> None:
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, **entries}))

    return spoil


def metrics_folder(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


def configured(part: str, **entries: object):
    def spoil(run: Path) -> None:
        config = json.loads((run / "config.json").read_text())
        config[part] |= entries
        (run / "config.json").write_text(json.dumps(config))

    return spoil


def halved(name: str):
    def spoil(run: Path) -> None:
        (file,) = run.rglob(name)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return spoil


def edited(name: str, was: str | bytes, now: str | bytes):
    was, now = (text.encode() if isinstance(text, str) else text for text in (was, now))

    def spoil(run: Path) -> None:
        (file,) = run.rglob(name)
        assert was in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(was, now, 1))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (without_checkpoint, "has no checkpoint; give a step: 0, 1, 2"),
        (newer, "format=2: must be 1, which this lab reads"),
        (halved("config.json"), "is not a run folder"),
        (halved("result.json"), "result.json cannot be read"),
        (halved("model.safetensors"), "truncated or changed"),
        (edited("result.json", '"budget"', '"bugdet"'), "stopped='bugdet': must be 'solved'"),
        (edited("metrics.jsonl", '"step": 2', '"step": 3'), "line 2 is of step 3; lines are"),
        (edited("step-00000004.safetensors", b"\x00\x3c", b"\x00\x3d"), "was changed or damaged"),
        (spoiled_result(accuracy="x"), "result.json holds no result"),
        (spoiled_result(baselines={"chance": None}), "result.json holds no result"),
        (metrics_folder, "metrics.jsonl: cannot be read"),
        (configured("model", stack=3), "stack=3: must be text"),
        (configured("task", name="mqr"), "task='mqr': must be one of mqar"),
        (configured("task", lag=3), "unknown option 'lag' of mqar. Known: seq_len"),
        (halved("state.json"), "is incomplete"),
        (halved("step-00000004.safetensors"), "truncated, or no weights"),
    ],
)
def test_a_broken_run_is_one_line_and_nothing_is_written(run, unchecked, spoil, line):
    spoil(run)
    for name in ("analysis.json", "report.html"):
        (run / name).unlink()
    result = lab("analyze", str(run), "--rows", "2")
    assert line in one_line(result)
    assert result.exit_code == 1
    assert not (run / "analysis.json").exists()
    assert not (run / "report.html").exists()


def test_rows_of_metrics_without_numbers_are_no_rows(run):
    with open(run / "metrics.jsonl", "a") as file:
        print('{"step": 9, "loss": null, "accuracy": "x", "seconds": 1}', file=file)
    assert lab("analyze", str(run), "--only", "curves").exit_code == 0


def test_a_folder_of_figures_that_cannot_be_is_said_first(run, tmp_path):
    before = (run / "report.html").stat().st_mtime_ns
    (tmp_path / "file").write_text("")
    result = lab("analyze", str(run), "--figures", str(tmp_path / "file"))
    assert "cannot be written" in one_line(result)
    assert (run / "report.html").stat().st_mtime_ns == before


def test_a_page_of_other_runs_is_not_replaced_unless_named(run, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "compare", lambda subjects: None)
    monkeypatch.setattr(comparison, "render", lambda subjects, found, mark: f"<!-- {mark} -->")
    first, second = (Run.open(path) for path in (run, trained))
    for runs, rows, page in (
        ((first, second), None, "compare.html"),
        ((first, second), 4, "compare-2.html"),
        ((second, first), None, "compare-3.html"),
        ((first, second), 4, "compare-2.html"),
    ):
        assert comparison.choose_page(runs, rows) == Path(page)
        comparison.write_comparison(runs, Path(page), rows)
    Path("compare-2.html").unlink()
    os.mkfifo("compare-2.html")
    Path("compare-3.html").unlink()
    Path("compare-3.html").symlink_to("/dev/zero")
    assert comparison.choose_page((first, second), 4) == Path("compare-4.html")


def test_runs_side_by_side(run, trained, tmp_path):
    page = tmp_path / "compare.html"
    result = lab("compare", str(run), str(trained), "--out", str(page), "--rows", "4", "--json")
    assert result.exit_code == 0, result.output
    assert comparison.make_mark([Run.open(run), Run.open(trained)], 4) in page.read_text()
    told = json.loads(result.stdout)
    assert [row["steps"] for row in told["runs"]] == [8, 8]
    assert page.exists()


@pytest.mark.parametrize(
    ("words", "line", "code"),
    [
        (["RUN"], "runs=1: must be at least 2 to compare", 2),
        (["RUN", "RUN"], "run: is given twice", 2),
        (["RUN", "nowhere"], "nowhere is not a run folder", 1),
        (["RUN", "OTHER", "--rows", "0"], "rows=0: must be ≥ 1", 2),
    ],
)
def test_what_cannot_be_compared_is_one_line(run, trained, tmp_path, words, line, code):
    page = tmp_path / "page.html"
    named = {"RUN": str(run), "OTHER": str(trained)}
    chosen = [str(named.get(word, word)) for word in words]
    result = lab("compare", *chosen, "--out", str(page))
    assert line in one_line(result)
    assert result.exit_code == code
    assert not page.exists()
