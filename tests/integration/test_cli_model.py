"""`lab model` and `lab errata` as a user meets them."""

import base64
import json
import re
import zlib

import pytest
from typer.testing import CliRunner

from lab.cli.app import app
from lab.errata import ERRATA
from lab.models import ARCHITECTURES


def lab(*words: str):
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_shown_at_the_papers_size(name):
    result = lab("model", name)
    assert result.exit_code == 0, result.output
    assert "active for a token" in result.output
    assert "the paper's 320M" in result.output
    assert re.search(r"state of a row: [\d,]+ bytes at 2,048 tokens", result.output)


def test_a_mixer_of_ones_own_is_shown():
    own = ("--model", "tests.unit.models.test_stack:Shift", "--d-model", "16", "--json")
    found = json.loads(lab("model", "UM AM", *own).stdout)
    assert found["unit"][0]["pair"]["mixer"]["name"] == "Shift"
    assert found["unit"][0]["pair"]["mixer"]["parameters"] == 16 * 16 + 16  # and its norm
    assert "Shift has neither state_bytes nor" in found["state"]["unknown"]


def test_the_larger_size_as_json_with_a_figure(tmp_path):
    drawing = tmp_path / "cheems.html"
    result = lab("model", "cheems", "--size", "1.3B", "--json", "--figure", str(drawing))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert abs(found["paper"]["difference"]) < 0.01
    assert found["total"] == round(1.3e9 * (1 + found["paper"]["difference"]))
    assert found["active"] < found["total"]
    assert found["times"] == 3
    (packed,) = re.findall(r'data-figure="[^"]*">(.*?)</script>', drawing.read_text(), re.DOTALL)
    assert b"InnerFunctionAttention" in zlib.decompress(base64.b64decode(packed))


def test_a_stack_takes_sizes_and_options():
    result = lab(
        *(
            "model",
            "AM*2",
            "--d-model",
            "16",
            "--vocab-size",
            "10",
            "--option",
            "M.d_ff=4",
            "--seq-len",
            "64",
            "--json",
        )
    )
    assert result.exit_code == 0, result.output
    per_block = 4 * 16 * 16 + 2 * 16 * 4 + 2 * 16
    found = json.loads(result.stdout)
    assert found["total"] == 10 * 16 + 2 * per_block + 16
    assert found["state"] == {"tokens": 64, "bytes": 64 * 2 * 2 * 16 * 4, "unknown": ""}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chems"], "'chems'"),
        (["cheems", "--size", "7B"], "'--size': '7B' is not one of '320M', '1.3B'"),
        (["cheems", "--size", "320M", "--d-model", "64"], "sets d_model too"),
        (["AM", "--size", "320M"], "applies only to a named architecture"),
        (["AM", "--n-layers", "3"], "n_layers=3"),
        (["AM", "--seq-len", "0"], "seq_len=0: must be in 1 … 1048576"),
        (["cheems", "--n-layers", "0"], "n_layers=0"),
        (["cheems", "--n-layers", "100000"], "n_layers=100000 must be in 1 … 1000"),
        (["cheems", "--vocab-size", "0"], "vocab_size=0: must be ≥ 1"),
        (["AM", "--d-model", "100000000000000"], "d_model=100000000000000: must be at most"),
        (
            ["AM", "--option", "M.d_ff=9999999999999999999999"],
            "M.d_ff=9999999999999999999999: must",
        ),
        (
            ["NE", "--option", "E.n_experts=1000000007000"],
            "n_experts=1000000007000: must be in 1 …",
        ),
        (["cheems", "--option", "S.d_sate=3"], "Did you mean d_state"),
        (["llama", "--option", "S.d_state=3"], "has no such layer"),
        (["AM", "--d-model", "15", "--n-heads", "2"], "15"),
        (["AM", "--figure", "stack.png"], "figure=stack.png: must end in .html"),
    ],
)
def test_bad_input_is_answered_in_a_line(words, said):
    result = lab("model", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_figure_that_cannot_be_written(tmp_path):
    result = lab("model", "AM", "--figure", str(tmp_path / "none" / "at.html"))
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_some_errata_by_row():
    result = lab("errata", "r2", "C4", "--json")
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["row"] for row in found] == ["R2", "C4"]
    assert all(row["confirmed"] for row in found)


def test_every_erratum_prints_its_evidence():
    result = lab("errata")
    assert result.exit_code == 0, result.output
    for row in ERRATA:
        assert f"✓ {row}" in result.output


def test_an_unknown_row():
    result = lab("errata", "R1", "Q9")
    assert result.exit_code == 2
    assert "'Q9': must be one of R1" in result.stderr
    assert result.stdout == ""
