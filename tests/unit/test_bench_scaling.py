"""Growth with a size, the history of benchmarks, and the command that writes both."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from analysis.studies.scaling import draw
from lab.bench import BENCHMARKS, ON_GPU, history, scaling
from lab.bench.ratio import Ratio
from lab.cli import app
from lab.cli.output import is_marked
from lab.files import RunError
from lab.machine import describe_machine
from lab.peers import MissingPeerError

SMALL = {"seq_len": 16, "n_pairs": 4, "vocab_size": 64, "d_model": 16, "rows": 2}
VALUES = {"seq_len": (16, 32), "d_model": (8, 16), "n_pairs": (2, 4), "vocab_size": (64, 128)}


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_its_power(power):
    sizes = (16, 32, 64, 128)
    assert scaling.fit_exponent(sizes, [3 * n**power for n in sizes]) == pytest.approx(power)


def test_the_exponent_is_that_of_the_largest_sizes():
    sizes = (1, 2, 4, 8, 16)
    assert scaling.fit_exponent(sizes, [1e3, 1e3, 4, 8, 16]) == pytest.approx(1)


@pytest.fixture(scope="module")
def curves() -> list[scaling.CostCurve]:
    """Every axis, at small values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "BASE", scaling.BASE | SMALL)
        patch.setattr(scaling, "REPEATS", 1)
        found = []
        for axis in scaling.AXES:
            least = {"n_experts": (256, 1024)}.get(axis.name, (1, 2))
            changes = {n: v for n, v in axis.changes.items() if n == "stack"}
            values = VALUES.get(axis.name, least)
            found.append(scaling.trace(replace(axis, values=values, changes=changes)))
        return found


def test_every_axis_changes_its_size(curves):
    assert [curve.axis for curve in curves] == [axis.name for axis in scaling.AXES]
    for curve in curves:
        # More of anything takes more memory, so the size did reach the model or its rows.
        assert curve.mebibytes[0] < curve.mebibytes[1], curve.name
        assert min(curve.milliseconds) > 0


def test_the_figure_has_time_memory_and_bound_of_each_axis(curves):
    traces = draw(curves).to_dict()["data"]
    assert len(traces) == 3 * len(curves)
    assert {trace["name"] for trace in traces} == {"CPU ms", "MiB of tensors", "time at the bound"}


def test_a_history_tells_a_ratio_that_became_worse(tmp_path):
    file, ratio = tmp_path / "history.jsonl", Ratio("thing", 1.0, 2.0, "ms", 2.0, None)
    assert history.read(file) == []
    for value in (2.0, 2.2, 1.9):
        history.append(file, [replace(ratio, ratio=value)], "unknown")
    known = history.read(file)
    assert [entry["ratio"] for entry in known] == [2.0, 2.2, 1.9]
    assert history.compare(ratio, known).startswith("before: 2 × (n 3, last ")
    assert history.compare(replace(ratio, ratio=1.5), known).startswith("WORSE than before: 2 ×")
    assert history.compare(replace(ratio, name="other"), known) == ""
    elsewhere = [entry | {"machine": "another"} for entry in known]
    assert history.compare(ratio, elsewhere) == ""


@pytest.mark.parametrize("text", ["not json\n", '{"date": 1}\n', "[1]\n"])
def test_a_file_that_is_no_history_is_refused_and_kept(tmp_path, text):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(RunError, match="history="):
        history.read(file)
    assert file.read_text() == text


def test_the_command_adds_to_the_history_and_draws(tmp_path, monkeypatch, curves):
    monkeypatch.setattr(scaling, "measure", lambda: curves)
    words = ["bench", "--only", "scaling", "--history", str(tmp_path / "history.jsonl")]
    figure = tmp_path / "figure.html"
    first = CliRunner().invoke(app, [*words, "--figure", str(figure)])
    assert first.exit_code in (0, 1), first.output  # 1: a promise that these sizes do not keep
    assert "before" not in first.stdout
    assert is_marked(figure)
    assert {line["machine"] for line in history.read(tmp_path / "history.jsonl")} == {
        describe_machine()
    }
    again = CliRunner().invoke(app, [*words, "--json"])
    names = [json.loads(line)["name"] for line in again.stdout.splitlines()]
    assert names == [curve.name for curve in curves]
    assert again.stderr.count("before: ") == len(curves)
    table = CliRunner().invoke(app, [*words, "--markdown"])
    assert "before: " not in table.stdout
    assert table.stderr.count("before: ") == len(curves)
    refused = CliRunner().invoke(app, ["bench", "--only", "rows", "--figure", str(figure)])
    assert refused.exit_code == 2
    assert "only scaling has a figure" in refused.stderr


def test_the_command_prints_a_table(monkeypatch, curves):
    monkeypatch.setattr(scaling, "measure", lambda: curves)
    found = CliRunner().invoke(app, ["bench", "--only", "scaling", "--markdown"])
    machine, _, header, rule, *rows = found.stdout.splitlines()
    assert "torch" in machine
    assert header.count("|") == rule.count("|") == 8
    assert rows == [curve.to_markdown() for curve in curves]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only rows --only graphs", "only=graphs: needs a GPU, and this machine has none"),
        ("--only rows --json --markdown", "--json and --markdown: choose one"),
    ],
)
def test_the_command_refuses(monkeypatch, words, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused = CliRunner().invoke(app, ["bench", *words.split()])
    assert refused.exit_code == 2
    assert message in refused.stderr


@pytest.mark.parametrize("gpu", [False, True])
def test_without_a_gpu_the_command_names_what_it_leaves_out(monkeypatch, gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(history, "describe_machine", lambda: "a machine")
    measured = []
    monkeypatch.setattr("lab.cli.bench._measure", lambda name: measured.append(name) or [])
    found = CliRunner().invoke(app, ["bench"])
    assert measured == [name for name in BENCHMARKS if gpu or name not in ON_GPU]
    assert ("left out: graphs" in found.stderr) == (not gpu)
    measured.clear()
    asked = CliRunner().invoke(app, ["bench", "--only", "rows", "--only", "gpu", "--only", "rows"])
    assert measured == (["rows", *ON_GPU] if gpu else [])
    assert ("only=gpu: needs a GPU" in asked.stderr) == (not gpu)


def test_what_was_measured_before_a_missing_package_is_kept(tmp_path, monkeypatch, curves):
    def measure(name: str):
        yield curves[0]
        raise MissingPeerError("fla is not installed")

    monkeypatch.setattr("lab.cli.bench._measure", measure)
    file = tmp_path / "history.jsonl"
    found = CliRunner().invoke(app, ["bench", "--only", "ssd", "--history", str(file)])
    assert found.exit_code == 2
    assert "Error: fla is not installed" in found.stderr
    assert [line["name"] for line in history.read(file)] == [curves[0].name]
