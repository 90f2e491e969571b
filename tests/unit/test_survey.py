"""A survey adds a line for each module, whatever becomes of its process, and can go on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.bench.survey import Line, describe, main, read, select_cases, summarize, survey
from lab.bench.survey_cases import Case
from lab.certify_settings import QUICK

HERE = __name__
SETTINGS = replace(QUICK, d_model=8, lengths=(1, 2), conditions=QUICK.conditions[:1])


class Centred(nn.Module):
    """Subtracts a mean that later tokens enter."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Endless(nn.Module):
    """Computes for ever."""

    def forward(self, x: Tensor) -> Tensor:
        while True:
            x = x + 1


def take(path: Path, *cases: Case, seconds: int = 60) -> list[Line]:
    torch.set_num_threads(1)
    seen: list[Line] = []
    survey(path, cases, SETTINGS, seconds, seen.append)
    return seen


def build_case(name: str, **options: Any) -> Case:
    return Case(name, f"{HERE}:{name}", options)


def test_a_line_for_each_is_added_once(tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    centred, refused = build_case("Centred"), build_case("Centred", width=3)._replace(name="wide")
    seen = take(path, centred, refused)
    assert [line["name"] for line in seen] == ["Centred", "wide"]
    assert {law["law"]: law["verdict"] for law in seen[0]["laws"]}["causal"] == "fails"
    assert "width" in seen[1]["refused"]
    assert read(path) == seen
    assert take(path, centred, refused) == []
    assert describe(seen[0]).splitlines()[1].startswith("  causal fails: length 2: ")
    assert describe(seen[1]).startswith("wide: not built: Centred raised TypeError: ")
    assert next(summarize(seen)).startswith("2 tried, 1 built, ")


def test_one_that_never_ends_is_stopped(tmp_path: Path):
    (line,) = take(tmp_path / "lines.jsonl", build_case("Endless"), seconds=1)
    # By the clock where other programs hold the processor.
    assert line["ended"] in ("SIGXCPU", "SIGKILL", "SIGALRM")
    assert line["laws"] == []
    assert line["cpu"] < 10


def test_named_cases_are_taken_in_their_order():
    cases = [build_case("Centred"), build_case("Endless")]
    assert select_cases(cases, []) == cases
    assert select_cases(cases, ["Endless", "Centred"]) == cases[::-1]
    with pytest.raises(ValueError, match="name='endless': must be one of"):
        select_cases(cases, ["endless"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("missing.jsonl --show", "missing.jsonl: there is no such file; a survey writes it"),
        (". --show", "file=.: must be a file, and is none"),
        (".", "file=.: must be a file, and is none"),
    ],
)
def test_a_file_that_is_none_is_named_in_a_line(words, reason, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["survey", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(reason)
