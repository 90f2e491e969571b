"""`lab study` and `lab reproduce`: what they print, write and refuse."""

import importlib.util
import json
import sys

import polars as pl
import pytest
from typer.testing import CliRunner

from lab.cli.app import app
from lab.studies import trainability, trainability_ssd
from lab.studies.trainability import BASELINE
from tests.unit.sweeps.test_cells import TINY

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("transformers", "mqar --model lab.foreign.mixers:Mamba --stack UN*2"),
        ("transformers", "save-pretrained runs/mqar mqar-hf"),
    ],
)
def test_a_missing_library_is_one_line_before_anything_is_run(
    missing, words, monkeypatch, tmp_path
):
    find = importlib.util.find_spec
    absent = lambda name: None if name == missing else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, words.split())
    assert answer.exit_code == 2, answer.output
    said = " ".join(answer.stderr.split())
    assert said.startswith("Error: ")
    assert f"{missing} is not installed" in said.replace(", which", "")
    assert f"pip install {missing}" in said.replace("'", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "module", "stack"),
    [("trainability", trainability, "AM*1"), ("trainability-ssd", trainability_ssd, "SM*1")],
)
def test_a_study_through_the_command_line(name, module, stack, tmp_path, monkeypatch):
    tiny = {**TINY, "stack": stack}
    monkeypatch.setattr(module, "SETTING", tiny)
    changes = {BASELINE: {}, "2 heads": {"n_heads": 2}}
    monkeypatch.setattr(module, "CHANGES", changes)
    monkeypatch.setattr(trainability, "BASELINE_SEEDS", 1)
    out, file, picture = tmp_path / "out", tmp_path / "t.csv", tmp_path / "f.html"
    words = ["study", name, "--seeds", "1", "--out", out, "--table", file]
    show = ["--show", "--figure", picture]
    early = CliRunner().invoke(app, [str(word) for word in [*words, *show]])
    assert early.exit_code == 2
    assert "no run has ended yet, so there is nothing to draw" in " ".join(early.stderr.split())
    assert not picture.exists()
    answer = CliRunner().invoke(app, [*map(str, words), "--workers", "1"])
    assert answer.exit_code == 0, answer.output
    assert "2 heads" in answer.stdout
    assert "too few runs" in answer.stdout
    found = pl.read_csv(file)
    assert found["status"].to_list() == ["budget"] * 2
    file.unlink()
    again = CliRunner().invoke(app, [str(word) for word in [*words, *show]])
    assert again.exit_code == 0, again.output
    assert pl.read_csv(file).equals(found)
    assert picture.exists()
    assert json.loads(next(out.glob("*/config.json")).read_text())["task"]["name"] == "mqar"
    elsewhere = [*map(str, [*words[:-3], tmp_path / "elsewhere"]), "--table", str(file)]
    assert CliRunner().invoke(app, elsewhere).exit_code == 0
    assert [file.name for file in (tmp_path / "elsewhere").iterdir()] == ["sweep.html"]
    assert pl.read_csv(file).equals(found)


def test_wrong_options_are_one_line(tmp_path):
    for words in (
        ["--only", "colour=blue"],
        ["--workers", "0"],
        ["--seeds", "0"],
        ["--seeds", "1001"],
        ["--learning-rate", "nan"],
        ["--precision", "fp8"],
        ["--max-minutes", "0"],
        ["--max-minutes", "nan"],
        ["--table", "t.xls"],
        ["--figure", "f.gif"],
    ):
        answer = CliRunner().invoke(app, ["reproduce", "recall", "--out", str(tmp_path), *words])
        assert answer.exit_code == 2, words
        assert len(answer.stderr.strip().splitlines()) == 1
