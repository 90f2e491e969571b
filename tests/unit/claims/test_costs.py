"""Claims about costs: ratios at their rate on planted rounds, exact counts, the command line."""

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from analysis.claims.claim import Statistic
from analysis.claims.verdict import collect_costs, decide_costs, estimate_ratio
from lab.bench import costs
from lab.cli.app import app
from lab.machine import describe_machine

FASTER = Statistic("ratio", {"model": "a"}, {"model": "b"}, "above", 1.0, {}, "training")


def plant(ratio: float, rng, *, rounds=9, noise=0.1) -> pl.DataFrame:
    """Costs of two models at two row lengths; each round's logarithms are normal."""
    rows = []
    for length in (64, 256):
        for model, mean in (("a", ratio), ("b", 1.0)):
            for i in range(rounds):
                cost = mean * length * math.exp(rng.normal(0, noise))
                rows.append({"seq_len": length, "model": model, "round": i, "cost": cost})
    return pl.DataFrame(rows)


def count(ratio: float, draws: int = 60) -> dict[str, float]:
    rng = np.random.default_rng(0)
    found = [decide_costs(plant(ratio, rng), FASTER).outcome for _ in range(draws)]
    return {outcome: found.count(outcome) / draws for outcome in ("holds", "fails", "undecided")}


def test_a_ratio_is_judged_at_its_rate_on_planted_rounds():
    assert count(2.0, 10)["holds"] == 1
    assert count(0.5, 10)["fails"] == 1
    null = count(1.0)
    assert null["holds"] + null["fails"] <= 0.1


def test_a_ratio_is_the_geometric_mean_over_places():
    exact = plant(3.0, np.random.default_rng(0), rounds=1, noise=0)
    found = estimate_ratio(exact, FASTER)
    assert (found.value, found.low, found.high) == pytest.approx((3, 3, 3))
    assert (found.seeds, found.places) == (1, 2)
    twice = exact.with_columns(
        cost=pl.when((pl.col("model") == "a") & (pl.col("seq_len") == 256))
        .then(pl.col("cost") / 9)
        .otherwise("cost")
    )
    assert estimate_ratio(twice, FASTER).value == pytest.approx(1)
    assert decide_costs(twice.head(0), FASTER).outcome == "undecided"


TINY = """
claim = "Two blocks have more parameters than one."
source = "A test."
refuted_by = "They have as many."
[statistic]
kind = "ratio"
cost = "parameters"
of = { blocks = "two" }
than = { blocks = "one" }
above = 1.0
[smoke]
task = "mqar"
seeds = 1
[smoke.options]
seq_len = 8
vocab_size = 32
d_model = 8
batch_size = 4
[smoke.grid.blocks.one]
stack = "AM"
[smoke.grid.blocks.two]
stack = "AM*2"
"""
# A table of 32 tokens, blocks of attention, MLP and two norms, and a last norm.
ONE, TWO = (32 * 8 + blocks * (12 * 8**2 + 2 * 8) + 8 for blocks in (1, 2))


def run(file: Path, text: str, *words: str):
    file.write_text(text)
    out = file.parent / "out"
    return CliRunner().invoke(
        app, ["claim", str(file), "--scale", "smoke", "--out", str(out), *words]
    )


def test_lines_are_of_settings_and_not_of_row_lengths():
    table = plant(2.0, np.random.default_rng(0), rounds=2, noise=0).with_columns(
        tokens=pl.when(pl.col("seq_len") == 64).then(pl.lit("short")).otherwise(pl.lit("long"))
    )
    found = collect_costs(table, "training").settings
    assert {name: list(costs) for name, costs in found.items()} == {"a": [64, 256], "b": [64, 256]}
    assert found["a"][256] == [512, 512]


def test_a_claim_about_sizes_is_exact(tmp_path):
    file = tmp_path / "tiny.toml"
    answer = run(file, TINY, "--json")
    assert answer.exit_code == 0, answer.output
    card = json.loads(answer.stdout)
    assert (card["verdict"], card["power"], card["seeds"], card["runs"]) == ("holds", None, 1, 2)
    assert card["value"] == card["low"] == card["high"] == pytest.approx(TWO / ONE)
    page = (tmp_path / "out" / "claim.html").read_text()
    assert "Rounds in which costs were taken on the machine named below: 1." in page
    assert card["machines"] == [describe_machine()]
    held = tmp_path / "out" / "claim.json"
    held.write_text(held.read_text().replace(describe_machine(), "an old laptop"))
    assert json.loads(run(file, TINY, "--show", "--json").stdout)["machines"] == ["an old laptop"]
    shown = run(file, TINY, "--show")
    assert shown.stdout.startswith(
        "holds: the whole interval lies above 1. ratio of parameters 1.7"
    )
    assert "n = 1 round, 2 settings." in shown.stdout


def test_times_and_memory_grow_with_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "ROUNDS", 3)
    file = tmp_path / "tiny.toml"
    bigger = TINY.replace("AM*2", "AM*16").replace("above = 1.0", "above = 2.0")
    for cost in ("training", "forward", "memory"):
        answer = run(file, bigger.replace('parameters"', f'{cost}"'), "--json")
        card = json.loads(answer.stdout)
        assert card["value"] > 2, cost
        assert card["seeds"] == (1 if cost == "memory" else 3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('cost = "parameters"', 'cost = "money"', "cost='money': must be one of training, forward"),
        ('cost = "parameters"', "", "cost='': must be one of training, forward"),
        ("above = 1.0", "above = 0", "above=0.0: must be > 0 and finite for a ratio"),
        (
            'kind = "ratio"',
            'kind = "difference"',
            "cost=parameters: must be given for a ratio only",
        ),
        ('than = { blocks = "one" }', "", "than: must be given for a difference or a ratio"),
        ("[smoke]", "[power]\neffect = 1\n[smoke]", "power: is of accuracies"),
        ("seeds = 1", "seeds = 2", "seeds=2: must be 1, since costs are measured in rounds"),
    ],
)
def test_a_wrong_claim_about_costs_names_the_field(old, new, said, tmp_path):
    answer = run(tmp_path / "tiny.toml", TINY.replace(old, new))
    assert answer.exit_code == 2
    assert said in " ".join(answer.stderr.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workers", "2"), "workers=2: costs are measured in one process, one at a time"),
        (("--max-minutes", "1"), "max_minutes=1: nothing is trained"),
        (("--show",), "show: nothing has been measured yet"),
    ],
)
def test_options_of_training_are_refused(words, said, tmp_path):
    answer = run(tmp_path / "tiny.toml", TINY, *words)
    assert answer.exit_code == 2
    assert said in " ".join(answer.stderr.split())


@pytest.mark.parametrize("name", ["claim.json", "claim.html", "table.parquet"])
def test_files_that_the_lab_did_not_make_are_not_overwritten(name, tmp_path):
    mine = tmp_path / "out" / name
    mine.parent.mkdir()
    mine.write_text("{}")
    answer = run(tmp_path / "tiny.toml", TINY)
    assert answer.exit_code == 2
    assert f"out={mine}: is there, and the lab did not make it" in " ".join(answer.stderr.split())
    assert mine.read_text() == "{}"
    assert run(tmp_path / "tiny.toml", TINY, "--force").exit_code == 0
    assert run(tmp_path / "tiny.toml", TINY).exit_code == 0
