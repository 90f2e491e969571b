"""The GitHub Action: its shell steps, with commands that stand in for pip and lab."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lab.cli.app import app

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "certify"
STAND_IN = """#!/bin/bash
printf '%q ' "$(basename "$0")" "$@" >> "$RECORD"; echo >> "$RECORD"
[[ "$*" != *Leaky* ]]
"""


def read_action() -> dict[str, Any]:
    return yaml.safe_load((ACTION / "action.yml").read_text())


@pytest.fixture
def run_step(tmp_path: Path):
    """Run a step's script where `python` and `lab` only record their words."""
    for name in ("python", "lab"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(name: str, **inputs: str) -> tuple[int, list[list[str]]]:
        action = read_action()
        (step,) = [s for s in action["runs"]["steps"] if s.get("name") == name]
        defaults = {key: field.get("default") for key, field in action["inputs"].items()}
        given = {f"${{{{ inputs.{key} }}}}": v for key, v in {**defaults, **inputs}.items()}
        given["${{ github.action_path }}"] = str(ACTION)
        record = tmp_path / "record"
        record.write_text("")
        environment = {
            **os.environ,
            **{key: given[value] for key, value in step["env"].items()},
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "RECORD": str(record),
        }
        # As GitHub runs `shell: bash`.
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        ran = subprocess.run(bash, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert not ran.stderr
        return ran.returncode, [shlex.split(line) for line in record.read_text().splitlines()]

    return run


def test_it_installs_this_project_and_what_the_modules_need(run_step):
    code, ((*words, project, first, second),) = run_step("install", requirements="einops timm>=1")
    assert (code, words) == (0, ["python", "-m", "pip", "install"])
    assert Path(project).resolve() == ROOT
    assert (first, second) == ("einops", "timm>=1")


def test_each_target_is_certified_and_one_failure_fails_the_step(run_step):
    targets = "my_mixers:Average d_model=16 gain=2\n\n  my_mixers:Leaky\nmy_mixers:Other\n"
    code, calls = run_step("certify", targets=targets, programs="shown")
    assert code == 1
    assert calls == [
        f"lab certify {words} --quick --snippets shown/{folder}".split()
        for words, folder in (
            ("my_mixers:Average --option d_model=16 --option gain=2", "my_mixers-Average"),
            ("my_mixers:Leaky", "my_mixers-Leaky"),
            ("my_mixers:Other", "my_mixers-Other"),
        )
    ]
    assert run_step("certify", targets="my_mixers:Average")[0] == 0


@pytest.mark.parametrize("effort", ["quick", "usual", "thorough"])
def test_the_command_takes_what_the_action_gives(run_step, effort: str):
    _, ((_, *words),) = run_step("certify", targets="torch.nn:GRU input_size=8", effort=effort)
    group: Any = typer.main.get_command(app)
    with group.make_context("lab", list(words)) as context:
        name, command, rest = group.resolve_command(context, words)
        with command.make_context(name, rest, parent=context) as certify:
            assert certify.params["options"] == ["input_size=8"]
            assert (certify.params["quick"], certify.params["thorough"]) == (
                effort == "quick",
                effort == "thorough",
            )


def test_the_guide_lists_every_input():
    guide = (ROOT / "docs" / "gate.md").read_text()
    inputs = read_action()["inputs"]
    assert all(f"| `{name}` |" in guide for name in inputs)
    assert all(field.get("required") or "default" in field for field in inputs.values())
