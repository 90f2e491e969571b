"""Claims: verdicts at their rate on planted tables, files that say what is wrong, the lab's own."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from analysis.claims import verdict
from analysis.claims.card import Card
from analysis.claims.claim import Claim, Statistic
from analysis.claims.verdict import (
    Floor,
    StatisticValue,
    compare,
    compute_power,
    correct,
    decide,
    judge,
)
from lab.api.claiming import HOME, build_sweep, check_parameters, measure_floor
from lab.cli.app import app
from lab.machine import describe_machine
from lab.suite.audit import audit
from lab.sweeps.table import MEASURED
from lab.training.run import Run
from tasks import TASKS

pytestmark = pytest.mark.usefixtures("forked_workers")

FACTORS = ("mixer", "d_model", "learning_rate", "seed")
DIFFERENCE = Statistic("difference", {"mixer": "a"}, {"mixer": "b"}, "above", 0.1, {})
LEAST = Statistic("least", {"mixer": "a"}, {}, "above", 0.9, {})


def plant(
    means: dict[str, float], rng, *, seeds=3, spread=0.05, rates=(0.001,), status="budget"
) -> pl.DataFrame:
    """A sweep of two widths whose accuracies are normal about the mixers' means."""
    rows = []
    for mixer, mean in means.items():
        for width, rate, seed in product((32, 64), rates, range(seeds)):
            accuracy = float(np.clip(rng.normal(mean, spread), 0, 1))
            measured = {"seq_len": 64, "status": status, "solved": False, "steps": 100}
            measured |= {"accuracy": accuracy, "validation": accuracy}
            factors = dict(zip(FACTORS, (mixer, width, rate, seed), strict=True))
            rows.append(factors | dict.fromkeys(MEASURED) | measured)
    kinds = {"mixer": pl.String, "d_model": pl.Int64, "learning_rate": pl.Float64}
    return pl.DataFrame(rows, schema={**kinds, "seed": pl.Int64, **MEASURED})


def count(statistic: Statistic, means: dict[str, float], draws: int = 40) -> dict[str, float]:
    rng = np.random.default_rng(0)
    found = [decide(plant(means, rng), statistic, FACTORS, Floor()).outcome for _ in range(draws)]
    return {outcome: found.count(outcome) / draws for outcome in ("holds", "fails", "undecided")}


def test_a_difference_is_judged_at_its_rate_on_planted_models():
    assert count(DIFFERENCE, {"a": 0.8, "b": 0.3}, 10)["holds"] == 1
    at_threshold = count(DIFFERENCE, {"a": 0.6, "b": 0.5})
    assert at_threshold["holds"] <= 0.05
    assert at_threshold["fails"] <= 0.05
    null = count(DIFFERENCE, {"a": 0.5, "b": 0.5})
    assert null["holds"] == 0
    assert null["fails"] > 0.3
    assert count(DIFFERENCE, {"a": 0.3, "b": 0.8}, 10)["fails"] == 1


def test_a_difference_that_had_no_room_is_undecided():
    rng = np.random.default_rng(0)
    full = decide(plant({"a": 0.99, "b": 0.98}, rng, spread=0.002), DIFFERENCE, FACTORS, Floor())
    assert full.outcome == "undecided"
    assert "leaves 0.02 to gain" in full.because
    # A setting that is surely worse needs no room.
    worse = decide(plant({"a": 0.5, "b": 0.98}, rng, spread=0.002), DIFFERENCE, FACTORS, Floor())
    assert worse.outcome == "fails"
    roomy = decide(plant({"a": 0.81, "b": 0.8}, rng, spread=0.002), DIFFERENCE, FACTORS, Floor())
    assert roomy.outcome == "fails"


def test_a_difference_of_settings_that_have_learned_nothing_is_undecided():
    rng = np.random.default_rng(0)
    lost = plant({"a": 0.07, "b": 0.06}, rng, spread=0.002)
    assert decide(lost, DIFFERENCE, FACTORS, Floor()).outcome == "undecided"
    begun = plant({"a": 0.15, "b": 0.14}, rng, spread=0.002)
    assert decide(begun, DIFFERENCE, FACTORS, Floor()).outcome == "fails"
    found = decide(begun, DIFFERENCE, FACTORS, floor=Floor(chance=0.08))
    assert found.outcome == "undecided"
    assert found.because.startswith("neither setting has surely learned enough to differ by 0.1: ")
    assert found.because.endswith("and chance is 0.08")
    # Nor where one lucky seed lifts the mean: how much was learned is not sure.
    lucky = StatisticValue(-0.2, -0.3, -0.1, 3, 1, best=0.3, surely=0.05)
    assert judge(lucky, DIFFERENCE)[0] == "undecided"
    assert judge(replace(lucky, surely=0.2), DIFFERENCE)[0] == "fails"
    # "No worse than" does not hold of two that know nothing.
    close = Statistic("difference", {"mixer": "a"}, {"mixer": "b"}, "above", -0.1, {})
    assert decide(begun, close, FACTORS, floor=Floor(chance=0.08)).outcome == "undecided"
    assert decide(begun, close, FACTORS, Floor()).outcome == "holds"
    # One setting that has learned is enough.
    one = plant({"a": 0.06, "b": 0.9}, rng, spread=0.002)
    assert decide(one, DIFFERENCE, FACTORS, floor=Floor(chance=0.08)).outcome == "fails"


def test_a_shortcut_that_beats_every_setting_is_said():
    rng = np.random.default_rng(0)
    table = plant({"a": 0.8, "b": 0.3}, rng, spread=0.002)
    better = decide(table, DIFFERENCE, FACTORS, Floor(0.1, "last value", 0.9))
    assert better.outcome == "holds"
    assert "no setting is right as often as the shortcut 'last value' (0.8" in better.because
    worse = decide(table, DIFFERENCE, FACTORS, Floor(0.1, "last value", 0.7))
    assert "shortcut" not in worse.because


def test_bits_are_compared_as_bits_that_are_saved():
    rng = np.random.default_rng(0)
    table = plant({"a": 0.6, "b": 0.6}, rng, spread=0.01)
    bits = pl.when(mixer="a").then(2.1).otherwise(2.2) + 0.002 * pl.col("seed")
    table = table.with_columns(loss=bits * np.log(2), validation_loss=bits * np.log(2))
    saved = replace(DIFFERENCE, threshold=0.05, measure="bits")
    floor = Floor(-8.0, "5-gram", -2.12)
    found = decide(table, saved, FACTORS, floor)
    assert (found.outcome, found.because) == ("holds", "the whole interval lies above 0.05")
    assert found.estimate.value == pytest.approx(0.1)
    assert decide(table, replace(saved, threshold=0.2), FACTORS, floor).outcome == "fails"
    better = decide(table, saved, FACTORS, replace(floor, shortcut=-2.0))
    assert "no setting takes as few bits as the shortcut '5-gram' (2.1 and 2)" in better.because
    lost = table.with_columns(loss=pl.col("loss") + 5.87 * np.log(2))
    assert "the better one takes 7.97 bits (" in decide(lost, saved, FACTORS, floor).because
    claim: Any = SimpleNamespace(statistic=saved)
    said = Card(claim, "smoke", found, None, 3, {}, ()).summarize()
    assert ". difference of bits +0.1000, 95 %: +0.09" in said
    diverged = table.with_columns(
        status=pl.when(mixer="b").then(pl.lit("diverged")).otherwise("status"),
        loss=pl.when(mixer="b").then(None).otherwise("loss"),
    )
    found = decide(diverged, saved, FACTORS, floor)
    assert found.estimate.value == pytest.approx(8 - 2.102)
    unknown = table.with_columns(loss=pl.when(seed=0).then(None).otherwise("loss"))
    found = decide(unknown, saved, FACTORS, floor, looks=2)
    assert (found.operational, found.estimate.confidence) == (True, 0.975)
    assert found.because == "runs without a loss on test rows: 4"


def test_bits_choose_the_learning_rate_with_the_smallest_validation_loss():
    rng = np.random.default_rng(0)
    often = plant({"a": 0.6, "b": 0.6}, rng, rates=(0.003,), spread=0.01)  # right more often
    often = often.with_columns(loss=1.5, validation_loss=1.5)
    seldom = plant({"a": 0.5, "b": 0.5}, rng, rates=(0.001,), spread=0.01)
    loss = pl.when(mixer="a").then(1.0).otherwise(1.2)
    seldom = seldom.with_columns(loss=loss, validation_loss=loss)
    saved = replace(DIFFERENCE, measure="bits")
    found = decide(pl.concat([often, seldom]), saved, FACTORS, Floor(-8.0))
    assert found.outcome == "holds"
    assert found.estimate.value == pytest.approx(0.2 / np.log(2))


def test_the_bits_of_a_task_are_those_of_its_references(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("a cat sat. " * 400)
    file = tmp_path / "tiny.toml"
    options = f'path = "{text}"\nbatch_size = 4'
    file.write_text(
        TINY.replace('"least"', '"difference"\nthan = { d_model = 12 }\nmeasure = "bits"')
        .replace("[8]", "[8, 12]")
        .replace('"mqar"', '"bytes"')
        .replace("vocab_size = 32\nbatch_size = 4", options)
        .replace("start_len = 8\n", "")
    )
    stated = Claim.read(file)
    found = measure_floor(stated.statistic, build_sweep(stated, "smoke"))
    assert (found.chance, found.shortcut_name) == (-8, "interpolated 5-gram")
    assert -0.2 < found.shortcut < 0
    file.write_text(file.read_text().replace('"bytes"', '"regression"').replace(options, ""))
    with pytest.raises(ValueError, match="measure=bits: regression's answers are numbers"):
        measure_floor(stated.statistic, build_sweep(Claim.read(file), "smoke"))
    file.write_text(
        file.read_text().replace('"regression"', '"grammar"').replace("= 8\n", "= 32\n")
    )
    found = measure_floor(stated.statistic, build_sweep(Claim.read(file), "smoke"))
    assert (found.chance, found.shortcut_name) == (-2, "")


def test_the_floor_is_that_of_the_lengths_that_a_claim_compares():
    stated = Claim.read(HOME / "rotary-extrapolation.toml")
    found = measure_floor(stated.statistic, build_sweep(stated, "smoke"))
    assert stated.statistic.at == {"seq_len": 1024}
    task = TASKS["induction"](seq_len=32).resize(1024)
    scores = {score.name: score.accuracy for score in audit(task, rows=64).scores}
    assert found == Floor(task.chance, found.shortcut_name, scores[found.shortcut_name])
    assert found.shortcut == max(scores[name] for name in scores if name != "oracle")


def test_the_least_of_several_places_is_judged_at_its_rate():
    assert count(LEAST, {"a": 0.99})["fails"] == 0
    assert count(LEAST, {"a": 0.9})["holds"] <= 0.05
    assert count(LEAST, {"a": 0.5}, 10)["fails"] == 1


def test_missing_runs_are_an_operational_failure_and_diverged_ones_a_result():
    rng = np.random.default_rng(0)
    table = plant({"a": 0.9, "b": 0.2}, rng)
    broken = table.with_columns(
        status=pl.when(pl.int_range(pl.len()) == 0).then(pl.lit("failed")).otherwise("status")
    )
    found = decide(broken, DIFFERENCE, FACTORS, Floor())
    assert (found.outcome, found.operational) == ("undecided", True)
    assert found.because == "not all runs have ended: 1 failed of 12"
    diverged = table.with_columns(
        status=pl.when(pl.col("mixer") == "b").then(pl.lit("diverged")).otherwise("status"),
        accuracy=pl.when(pl.col("mixer") == "b").then(None).otherwise("accuracy"),
    )
    found = decide(diverged, DIFFERENCE, FACTORS, Floor())
    assert (found.outcome, found.operational) == ("holds", False)
    assert found.estimate.value == pytest.approx(0.9, abs=0.05)


def test_an_order_that_changes_inside_the_window_of_rates_is_undecided():
    rng = np.random.default_rng(0)
    low = plant({"a": 0.9, "b": 0.1}, rng, rates=(0.001,), spread=0.01)
    high = plant({"a": 0.2, "b": 0.5}, rng, rates=(0.003,), spread=0.01)
    found = decide(pl.concat([low, high]), DIFFERENCE, FACTORS, Floor())
    assert found.outcome == "undecided"
    assert "the order changes inside the window of learning rates" in found.because
    same = plant({"a": 0.8, "b": 0.5}, rng, rates=(0.003,), spread=0.01)
    assert decide(pl.concat([low, same]), DIFFERENCE, FACTORS, Floor()).outcome == "holds"


def test_a_rate_at_the_edge_of_those_tried_is_said():
    rng = np.random.default_rng(0)
    parts = [
        plant({"a": a, "b": b}, rng, rates=(rate,), spread=0.01)
        for rate, a, b in ((0.001, 0.5, 0.1), (0.003, 0.8, 0.2), (0.01, 0.6, 0.4))
    ]
    found = decide(pl.concat(parts), DIFFERENCE, FACTORS, Floor())
    assert found.outcome == "holds"
    assert found.because.endswith(
        "; a better learning rate may lie beyond those tried: b is best at 0.01"
    )
    assert "beyond" not in decide(parts[0], DIFFERENCE, FACTORS, Floor()).because


def test_looking_again_errs_no_more_often_and_decides_more():
    """At a true effect at the threshold, any verdict is an error."""
    rng, looks, draws = np.random.default_rng(0), (3, 6, 12), 600
    wrong = {}
    for confidence in (correct(len(looks)), correct(1)):
        errs = 0
        for _ in range(draws):
            ours, theirs = rng.normal(0.6, 0.05, max(looks)), rng.normal(0.5, 0.05, max(looks))
            found = (compare(ours[:n], theirs[:n], 1, confidence) for n in looks)
            errs += any(each.low > 0.1 or each.high < 0.1 for each in found)
        wrong[confidence] = errs / draws
    assert wrong[correct(len(looks))] < 0.05 < wrong[correct(1)]
    power = verdict.Power(0.15, 0.03)
    assert compute_power(DIFFERENCE, power, looks) > compute_power(DIFFERENCE, power, [3]) + 0.2


CLAIMS = sorted(HOME.glob("*.toml"))


@pytest.mark.parametrize("file", CLAIMS, ids=lambda file: file.stem)
def test_every_claim_of_the_lab_can_be_run_and_has_power(file, monkeypatch):
    monkeypatch.setattr(verdict, "DRAWS", 60)
    stated = Claim.read(file)
    for scale in stated.sweeps:
        built = build_sweep(stated, scale)
        seeds = len({cell.factors["seed"] for cell in built.cells})
        assert seeds == 1 if stated.statistic.cost else seeds >= 3
        check_parameters(stated.equal, stated.statistic, built)
    if stated.power:
        assert compute_power(stated.statistic, stated.power, [3]) > 0.3
    assert stated.sweeps.keys() >= {"smoke", "small"}


TINY = """
claim = "Small attention recalls."
source = "A test."
refuted_by = "It does not."
[statistic]
kind = "least"
of = { d_model = 8 }
above = 0.9
[power]
effect = 0.99
spread = 0.01
[smoke]
task = "mqar"
seeds = 2
[smoke.options]
seq_len = 8
vocab_size = 32
batch_size = 4
test_rows = 8
max_steps = 2
start_len = 8
[smoke.grid]
d_model = [8]
"""


def test_a_claim_through_the_command_line(tmp_path):
    file, out = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text(TINY.replace("recalls.", "recalls.\\u001b[2J\\u009b", 1))
    words = ["claim", str(file), "--scale", "smoke", "--out", str(out), "--workers", "1"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    assert r"recalls.\x1b[2J\x9b" in answer.stderr
    assert not {"\x1b", "\x9b"} & {*answer.output, *(out / "claim.html").read_text()}
    assert answer.stdout.startswith("fails: the whole interval lies below 0.9. least 0.")
    assert ", with 2 seeds, a true effect of 0.99" in answer.stderr
    card = json.loads((out / "claim.json").read_text())
    assert (card["verdict"], card["seeds"], card["runs"]) == ("fails", 2, 2)
    assert set(card["digests"]) == {"data", "code", "configuration"}
    assert "Small attention recalls." in (out / "claim.html").read_text()
    assert card["machines"] == [describe_machine()]
    for seed, machine in enumerate(({"machine": "a laptop"}, {"machine": "a server"})):
        held = Run.open(out / f"d_model=8,seed={seed}")
        result = held.read_result() or {}
        held.write_result(result | machine)
    (out / "d_model=8,seed=0/config.json").rename(out / "aside")
    (out / "d_model=8,seed=0/config.json").write_text("{")
    damaged = CliRunner().invoke(app, [*words, "--show"])
    assert (damaged.exit_code, "failed: " in damaged.stderr) == (1, True), damaged.output
    (out / "aside").rename(out / "d_model=8,seed=0/config.json")
    again = json.loads(CliRunner().invoke(app, [*words, "--show", "--json"]).stdout)
    assert again["digests"] == card["digests"]
    assert again["machines"] == ["a laptop", "a server"]


def test_only_tuning_seeds_try_all_learning_rates(tmp_path):
    file, out = tmp_path / "tiny.toml", tmp_path / "out"
    grid = "learning_rate = [0.001, 0.1]\nd_model = [8, 16]"
    tuned = TINY.replace("seeds = 2", "seeds = 3\ntuning_seeds = 1")
    file.write_text(tuned.replace("d_model = [8]", grid).replace("_steps = 2", "_steps = 20"))
    words = ["claim", str(file), "--scale", "smoke", "--out", str(out), "--workers", "1", "--json"]
    assert CliRunner().invoke(app, words).exit_code == 0
    table = pl.read_parquet(out / "table.parquet")
    runs = table.group_by("d_model", "learning_rate").agg(pl.col("seed").sort())
    first = table.filter(pl.col("seed") == 0)
    for width in (8, 16):
        of_width = first.filter(pl.col("d_model") == width)
        best = of_width.sort("validation", descending=True)["learning_rate"][0]
        seeds = {rate: seeds for w, rate, seeds in runs.rows() if w == width}
        assert seeds == {rate: [0, 1, 2] if rate == best else [0] for rate in (0.001, 0.1)}
    judged = json.loads(CliRunner().invoke(app, [*words, "--show"]).stdout)
    assert (judged["seeds"], judged["runs"]) == (3, 8)
    assert "Seeds that tried all learning rates: 1." in (out / "claim.html").read_text()
    shutil.rmtree(out / "learning_rate=0.1,d_model=8,seed=0")
    (out / "table.parquet").unlink()
    judged = json.loads(CliRunner().invoke(app, [*words, "--show"]).stdout)
    assert judged["because"].startswith("of the runs that choose learning rates, not all runs have")
    toml = file.read_text().replace("of = { d_model = 8 }", "of = { seed = 0 }")
    for changes, said in (
        ({"seeds = 1": "seeds = 4"}, "smoke.tuning_seeds=4: must be ≤ 3, the seeds of the first"),
        ({"[0.001, 0.1]": "[0.1]"}, "must be of a sweep with several values of learning_rate"),
        ({"seq_len = 8\n": "", "d_model = [8": "seq_len = [8"}, "without seq_len in its grid"),
    ):
        text = toml
        for old, new in changes.items():
            text = text.replace(old, new)
        file.write_text(text)
        answer = CliRunner().invoke(app, words)
        assert said in " ".join(answer.stderr.split())


@pytest.mark.parametrize(
    ("above", "seeds"), [(0.9, 2), (0.05, 3)], ids=["decided at once", "looked at twice"]
)
def test_more_seeds_are_run_while_a_claim_is_undecided(above, seeds, tmp_path):
    file, out = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text(TINY.replace("seeds = 2", "looks = [2, 3]").replace("0.9", f"{above}", 1))
    words = ["claim", str(file), "--scale", "smoke", "--out", str(out), "--workers", "1", "--json"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    assert ", with 2 or 3 seeds, a true effect of 0.99" in answer.stderr
    card = json.loads(answer.stdout)
    assert (card["seeds"], card["runs"], card["looks"]) == (seeds, seeds, [2, 3])
    assert card["confidence"] == 0.975
    assert len([*out.glob("d_model=8,seed=*")]) == seeds
    if seeds == 3:  # the verdict of the first look stays while the second is not whole
        shutil.rmtree(out / "d_model=8,seed=2")
        (out / "table.parquet").unlink()
        shown = json.loads(CliRunner().invoke(app, [*words, "--show"]).stdout)
        assert (shown["verdict"], shown["failure"], shown["seeds"]) == ("undecided", None, 2)
        assert shown["because"].endswith(
            "; with more seeds, not all runs have ended: 1 not run of 3"
        )
    assert "The interval is one of 97.5\xa0%" in (out / "claim.html").read_text()


def test_a_claim_with_a_run_that_fails_names_it_and_exits_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.sweeps.pool.Worker.train", lambda *given: "planted")
    file, out = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text(TINY)
    words = ["claim", str(file), "--scale", "smoke", "--out", str(out), "--workers", "1"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 1
    assert answer.stdout == (
        "undecided (operational failure): not all runs have ended: 2 failed of 2.\n"
    )
    assert "failed: planted (d_model=8, seed=0; d_model=8, seed=1)" in answer.stderr
    assert json.loads((out / "claim.json").read_text())["failure"] == "operational"


def test_settings_of_a_claim_must_have_equal_parameters_if_it_says_so(tmp_path):
    file = tmp_path / "tiny.toml"
    sizes = "[equal]\ntotal = 0.5\nactive = 0.5\n[power]"
    file.write_text(TINY.replace("[power]", sizes).replace("[8]", "[8, 12]"))
    stated = Claim.read(file)
    built = build_sweep(stated, "smoke")
    # A table of 32 tokens, two blocks of attention and MLP, five norms: 32 d + 2 (4 + 8) d² + 5 d.
    assert check_parameters({"total": 2.0}, stated.statistic, built) == [
        "total parameters: d_model=8 1,832, d_model=12 3,900"
    ]
    answer = CliRunner().invoke(app, ["claim", str(file), "--scale", "smoke"])
    assert answer.exit_code == 2
    assert "equal.total=0.5: the settings differ by 112.88%" in " ".join(answer.stderr.split())
    assert check_parameters({}, stated.statistic, built) == []


def test_the_lab_lists_its_claims():
    answer = CliRunner().invoke(app, ["claim", "--list"])
    assert answer.exit_code == 0
    # The name is what a user types; runs of a claim are in a folder of that name.
    lines = answer.stdout.splitlines()
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names == [file.stem for file in CLAIMS]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("claim =", "clam =", "unknown part clam"),
        ('source = "A test."', 'source = ""', "source: must be a text"),
        ("above = 0.9", "", "must have a threshold, either above or below"),
        ("above = 0.9", "above = 2", "above=2.0: must be in -1 … 1"),
        ('"least"', '"mean"', "kind='mean': must be one of difference, least, greatest, ratio"),
        ("spread = 0.01", "spread = 0", "power.spread=0.0: must be > 0"),
        ("effect = 0.99", 'effect = "big"', "power.effect: must be a number"),
        ("of = { d_model = 8 }", "", "of: must name a setting"),
        (
            "above = 0.9",
            "above = 0.9\nthan = { d_model = 8 }",
            "than: must differ from the setting",
        ),
        ("d_model = 8 }", "d_model = 9 }", "d_model=9 is not a value of the sweep tiny-smoke"),
        ("d_model = [8]", "d_modl = [8]", "grid=d_modl: is not an option"),
        ("[smoke]", "[smke]", "unknown part smke"),
        ("[power]", "[equal]\ntotal = 2\n[power]", "equal.total=2.0: must be in [0, 1)"),
        ("[power]", "[equal]\nheads = 0\n[power]", "unknown part equal.heads"),
        ("[power]", "[power", "cannot be read"),
        ("above = 0.9", 'above = 0.9\nmeasure = "bits"', "measure=bits: must be of a difference"),
        ("spread = 0.01", "spread = 2", "power.spread=2.0: must be in 0 … 1"),
        ("above = 0.9", 'above = 0.9\nmeasure = "bit"', "measure='bit': must be one of accuracy"),
        ("seeds = 2", "looks = [3, 2]", "smoke.looks=[3, 2]: must be whole numbers ≥ 2, ascending"),
        ("seeds = 2", "seeds = 2\nlooks = [2]", "smoke.looks=[2]: has seeds too"),
        ("seeds = 2", "seeds = 2\ntuning_seeds = 0", "tuning_seeds=0: must be a whole number ≥ 1"),
        ("seeds = 2", "seeds = 2\ntuning_seeds = 1", "several values of learning_rate"),
    ],
)
def test_a_wrong_claim_names_the_field(old, new, said, tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.replace(old, new))
    answer = CliRunner().invoke(app, ["claim", str(file), "--scale", "smoke"])
    assert answer.exit_code == 2
    assert said in " ".join(answer.stderr.split())


def test_a_claim_may_have_the_sweeps_of_another(tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(TINY)
    head = TINY[: TINY.index("[smoke]")]
    second.write_text(f'sweeps_of = "first"{head}')
    found = Claim.read(second)
    assert found.sweeps == Claim.read(first).sweeps
    first.write_text(TINY.replace("max_steps = 2", "max_steps = 3"))
    assert Claim.read(second).digest != found.digest
    for line, said in (
        ("sweeps_of = 1", "sweeps_of=1: must be the name of a claim in the same folder"),
        ('sweeps_of = "../first"', "must be the name of a claim in the same folder"),
        ('sweeps_of = "third"', "third.toml: cannot be read"),
    ):
        second.write_text(line + head)
        with pytest.raises(ValueError, match=said):
            Claim.read(second)
    second.write_text(f'sweeps_of = "first"{TINY}')
    with pytest.raises(ValueError, match=r"sweeps_of=first: has \[smoke\] too"):
        Claim.read(second)


def test_a_claim_runs_what_it_compares_of_another_sweep_and_shares_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    several = TINY.replace("[8]", "[8, 12, 16]").replace("seeds = 2", "seeds = 1")
    Path("first.toml").write_text(several)
    head = TINY[: TINY.index("[smoke]")].replace("d_model = 8", "d_model = 12")
    head = head.replace('"least"', '"difference"\nthan = { d_model = 8 }')
    Path("second.toml").write_text(f'sweeps_of = "first"{head}')
    words = ["--scale", "smoke", "--workers", "1"]
    answer = CliRunner().invoke(app, ["claim", "second.toml", *words])
    assert answer.exit_code == 0, answer.output
    runs = Path("runs/claims")
    assert {file.name for file in runs.glob("first-smoke/d_model=*")} == {
        "d_model=8,seed=0",
        "d_model=12,seed=0",
    }
    assert json.loads((runs / "second-smoke/claim.json").read_text())["runs"] == 2
    answer = CliRunner().invoke(app, ["claim", "first.toml", *words])
    assert "1 of 3 runs to do" in answer.stderr
    assert json.loads((runs / "first-smoke/claim.json").read_text())["runs"] == 3


@pytest.mark.parametrize(
    ("means", "seeds", "says"),
    [
        ({"a": 0.9, "b": 0.5}, 3, "holds: the whole interval lies above 0.1. difference +0."),
        ({"a": 0.9, "b": 0.5}, 1, "undecided: one seed has no interval. difference +0."),
        ({"a": 0.5, "b": 0.5}, 3, "fails: the whole interval lies below 0.1. difference "),
    ],
)
def test_a_card_says_verdict_value_and_the_interval_if_there_is_one(means, seeds, says):
    rows = plant(means, np.random.default_rng(0), seeds=seeds, spread=0.002)
    found = decide(rows, DIFFERENCE, FACTORS, Floor())
    claim: Any = SimpleNamespace(statistic=DIFFERENCE)
    said = Card(claim, "smoke", found, None, seeds, {}, ()).summarize()
    assert said.startswith(f"{found.outcome}: {found.because}. difference ")
    assert says in said
    assert (", 95 %: " in said) == (seeds > 1)
    assert f"n = {seeds} seed{'s' * (seeds > 1)} of each setting, {2 * seeds * 2} runs." in said
