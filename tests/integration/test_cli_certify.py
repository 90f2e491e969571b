"""`lab certify` as a user runs it: verdicts, programs, exit codes, and targets that crash."""

import json
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from lab import certification
from lab.cli.app import app
from lab.cli.certify import _write_programs, build_law_table
from lab.files import is_marked
from lab.laws.certification import select_laws

HERE = Path(__file__).parent
BROKEN = "tests.integration.certified:"
ALONE = "import runpy, sys; sys.modules['lab'] = None; runpy.run_path(sys.argv[1])"
"""Runs a program where this project cannot be imported."""


def lab(*words: str):
    return CliRunner().invoke(app, ["certify", *words], env={"COLUMNS": "200"})


def only(*laws: str) -> list[str]:
    return [word for law in laws for word in ("--only", law)]


def one_line(result) -> str:
    """Return the single line an error is answered with."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: ")
    return lines[0]


def test_a_long_name_takes_a_second_line_and_evidence_keeps_its_column():
    law: Any = {"law": "gradient is the derivative", "verdict": "holds", "counterexample": None}
    printed = StringIO()
    Console(width=80, file=printed).print(build_law_table(law | {"evidence": "largest " * 10}))
    first, second = (line.rstrip() for line in printed.getvalue().splitlines())
    assert first == "✓ gradient is the " + " ".join(["largest"] * 7)
    assert second == "  derivative      " + " ".join(["largest"] * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A user's folder, with a module of their own."""
    made = tmp_path_factory.mktemp("user")
    shutil.copy(HERE / "certified.py", made)
    return made


@pytest.fixture(scope="module")
def leaky(folder):
    words = ["--quick", "--json", "--snippets", "programs"]
    words += only("causal", "padding", "deterministic")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return lab("certified:Leaky", "--option", "width=8", *words)


@pytest.fixture(scope="module")
def fragile():
    laws = only("deterministic", "causal", "precision", "stable")
    return lab(f"{BROKEN}Fragile", "--quick", "--seconds", "4", "--memory", "8", *laws)


def test_a_program_replaces_an_earlier_one_and_no_file_of_the_users(leaky, folder, tmp_path):
    [written] = (folder / "programs").iterdir()
    assert is_marked(written)
    mine = tmp_path / written.name
    mine.write_text("mine")
    with pytest.raises(typer.Exit):
        _write_programs(tmp_path, {mine.name: "shown"}, force=False)
    assert mine.read_text() == "mine"
    _write_programs(tmp_path, {mine.name: "shown"}, force=True)
    assert mine.read_text() == "shown"


def test_a_failing_law_is_exit_code_1_and_one_json_object(leaky):
    assert leaky.exit_code == 1, leaky.output
    assert leaky.stderr == ""
    found = json.loads(leaky.stdout)
    assert list(found) == ["target", "notes", "lengths", "d_model", "seconds", "laws"]
    assert found["target"] == "certified:Leaky"
    assert found["lengths"] == [1, 2, 7, 33]
    assert found["d_model"] == 8
    keys = {"law", "verdict", "evidence", "counterexample", "measured", "allowed", "snippet"}
    assert all(set(law) == keys | {"where", "left", "note", "tokens"} for law in found["laws"])
    verdicts = {law["law"]: law["verdict"] for law in found["laws"]}
    assert verdicts == {"deterministic": "holds", "causal": "fails", "padding": "not applicable"}
    failed = found["laws"][1]
    assert failed["measured"] > failed["allowed"] > 0
    assert "moves output 0" in failed["counterexample"]
    assert {"length", "rows", "row", "position", "s"} <= set(failed["where"])


def test_its_program_shows_it_without_this_project(leaky, folder):
    (program,) = (folder / "programs").iterdir()
    assert program.name == "causal.py"
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, program], cwd=folder, capture_output=True, text=True
    )
    assert ran.returncode == 1, ran.stderr
    assert "moves output" in ran.stdout


def test_laws_that_hang_die_or_eat_memory_leave_the_others_decided(fragile):
    assert fragile.exit_code == 0, fragile.output
    lines = fragile.stdout.splitlines()
    assert lines[1] == "refuses lengths 7: raised RuntimeError: seven is not taken"
    assert lines[2] == "? deterministic   not decided: took longer than 4 s and was stopped"
    assert lines[3].startswith("✓ causal          largest relative error")
    assert lines[4].startswith("? precision       not decided: used more than 8 GiB: ")
    assert lines[-2] == "? stable          not decided: the process died with signal SIGSEGV"
    assert lines[-1].startswith("1 holds, 3 not decided; ")


def test_a_module_without_a_number_decides_nothing():
    said = one_line(lab(f"{BROKEN}Nothing", "--quick", *only("causal")))
    assert "no law could be decided; causal: length 1: output 0 of row 0 is not finite" in said


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (f"{BROKEN}Leaving", "Leaving, probing it: the process ended with code 3"),
        ("tests.integration.quitting_module:x", "SystemExit: has had enough"),
        ("torch.nn:Linear", "Linear needs in_features, out_features: give --option in_features=…"),
        ("torch:nn", "the target is a module, must be a class or a function"),
    ],
)
def test_a_target_that_cannot_be_examined_is_one_line(target, said):
    assert said in one_line(lab(target, "--quick", *only("causal")))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--option width", "option=width: must look like"),
        ("--lengths 7,x", "lengths=7,x: must be whole numbers"),
        ("--memory 0.5", "memory=0.5: must be ≥ 1 GiB"),
        ("--seconds 0", "seconds=0.0: must be > 0"),
        ("--seconds nan", "seconds=nan: must be > 0"),
        ("--seed 99999999999999999999", "must be in 0 … 2⁶² − 1"),
        ("--snippets /dev/null", "/dev/null: cannot be written"),
    ],
)
def test_a_bad_option_is_one_line_before_anything_runs(words, said, monkeypatch):
    monkeypatch.setattr("lab.cli.certify.certify_in_child", None)
    assert said in one_line(lab("torch.nn:Identity", *words.split()))


def test_an_unknown_law_lists_the_known():
    with pytest.raises(ValueError, match=r"only='casual': must be one of deterministic, causal, "):
        select_laws(["causal", "casual"])
    assert select_laws(["stable", "causal"]) == ["causal", "stable"]


def test_ctrl_c_ends_the_child(monkeypatch):
    children = []

    def interrupt(connection, child, seconds):
        children.append(child)
        raise KeyboardInterrupt

    monkeypatch.setattr(certification, "_receive", interrupt)
    result = lab("torch.nn:Identity")
    assert result.exit_code == 130
    assert [ended.returncode for ended in children] == [-9]


def test_a_child_that_does_not_start_is_said_so(monkeypatch):
    monkeypatch.setattr(certification, "CHILD", "no_such_module")
    said = one_line(lab("torch.nn:Identity"))
    assert "starting: the process ended with code 1: " in said
    assert said.endswith("No module named no_such_module")


def test_no_file_of_the_working_directory_takes_the_place_of_a_package(tmp_path, monkeypatch):
    for name in ("torch", "threading", "mine"):
        (tmp_path / f"{name}.py").write_text("from torch.nn import Identity")
    monkeypatch.chdir(tmp_path)
    result = lab("mine:Identity", "--quick", *only("causal"))
    assert result.exit_code == 0, result.output


def test_the_command_itself_imports_no_torch():
    modules = "lab.cli, lab.certification, lab.cli.certify"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
