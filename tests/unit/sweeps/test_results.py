"""What a sweep's table shows, on planted tables; its figures and its page."""

from itertools import product

import numpy as np
import polars as pl
import pytest
import typer

from analysis.base import NotApplicableError
from analysis.pages.page import draw_findings
from analysis.pages.sweep import render
from analysis.sweeps.results import (
    FIGURES,
    collect_results,
    measure_costs,
    measure_rates,
    measure_solving,
    measure_widths,
)
from analysis.sweeps.settings import collect_settings
from lab.cli.sweep import report_failed_runs
from lab.sweeps.table import MEASURED

FACTORS = ("stack", "d_model", "seq_len", "learning_rate", "seed")


def plant(seeds: int = 3, noise: float = 0.01) -> pl.DataFrame:
    """A sweep in which AM*2 solves all and SM*2 gets better with width and worse with length.

    The rate 0.003 is best on validation rows, and the worst on test rows.
    """
    rng, rows = np.random.default_rng(0), []
    for stack, width, length, rate, seed in product(
        ("AM*2", "SM*2"), (32, 64, 128), (64, 256), (0.001, 0.003, 0.03), range(seeds)
    ):
        solved = stack == "AM*2" and rate < 0.01
        mean = 0.995 if solved else min(0.9, width / length)
        test = mean - (0.05 if rate == 0.003 and not solved else 0.0)
        share = float(np.clip(test + (0 if solved else noise * rng.standard_normal()), 0, 1))
        rows.append(
            dict(zip(FACTORS, (stack, width, length, rate, seed), strict=True))
            | dict.fromkeys(MEASURED)
            | {
                "seq_len": length,
                "status": "solved" if solved else "budget",
                "solved": solved,
                "steps": int(1 / rate) + 10 * seed if solved else 2000,
                "accuracy": share,
                "low": max(0.0, share - 0.01),
                "high": min(1.0, share + 0.01),
                "validation": mean + (0.02 if rate == 0.003 else 0.0),
                "rows": 2000,
                "seconds": width / 10 + 3.0 * (stack == "SM*2"),
                "parameters": width * 1000,
                "state_bytes": 8 * width * length if stack == "AM*2" else width * 4,
            }
        )
    kinds = {"stack": pl.String, "d_model": pl.Int64, "learning_rate": pl.Float64}
    return pl.DataFrame(rows, schema={**kinds, "seed": pl.Int64, **MEASURED})


def test_the_learning_rate_is_chosen_on_validation_rows_and_among_solving_ones_by_steps():
    settings = collect_settings(plant())
    assert {s.factors["learning_rate"] for s in settings} == {0.003}
    assert len(settings) == 12
    slow = plant().with_columns(
        steps=pl.when(pl.col("learning_rate") == 0.003).then(5000).otherwise("steps")
    )
    chosen = {s.factors["stack"]: s.factors["learning_rate"] for s in collect_settings(slow)}
    assert chosen == {"AM*2": 0.001, "SM*2": 0.003}


def test_a_rate_that_was_run_with_fewer_seeds_is_not_chosen():
    table, seed = plant(), pl.col("seed")
    fewer = (pl.col("learning_rate") == 0.003) & (seed == 2)
    for partial in (
        table.filter(~fewer),
        table.with_columns(
            accuracy=pl.when(~fewer).then("accuracy"), status=pl.when(~fewer).then("status")
        ),
    ):
        chosen = {s.factors["stack"]: s.factors["learning_rate"] for s in collect_settings(partial)}
        assert chosen == {"AM*2": 0.001, "SM*2": 0.001}
    alike = table.filter((pl.col("learning_rate") == 0.003) == (seed == 2))
    assert {s.factors["learning_rate"] for s in collect_settings(alike)} == {0.001}
    alike = table.filter((seed < 1) | (pl.col("learning_rate") == 0.03))
    assert {s.factors["learning_rate"] for s in collect_settings(alike)} == {0.03}


def test_a_rate_at_which_most_runs_diverge_is_not_chosen_for_the_one_that_did_not():
    lucky = (pl.col("learning_rate") == 0.03) & (pl.col("seed") == 0)
    lost = (pl.col("learning_rate") == 0.03) & (pl.col("seed") > 0)
    solved = pl.col("status") == "solved"
    table = plant().with_columns(
        status=pl.when(lost).then(pl.lit("diverged")).otherwise("status"),
        accuracy=pl.when(lost).then(None).otherwise("accuracy"),
        validation=pl.when(lost).then(None).otherwise(pl.col("validation") + 0.1 * lucky),
        solved=pl.when(lost).then(None).otherwise(solved),
    )
    assert {s.factors["learning_rate"] for s in collect_settings(table)} == {0.003}
    (found,) = measure_rates(table)
    assert {curve.chosen for curve in found.curves} == {0.003}


def test_a_setting_without_a_result_is_there_and_has_no_number():
    table = plant().with_columns(
        accuracy=pl.when(pl.col("d_model") == 32).then(None).otherwise("accuracy"),
        status=pl.when(pl.col("d_model") == 32).then(pl.lit("failed")).otherwise("status"),
        error=pl.when(pl.col("d_model") == 32).then(pl.lit("planted <b>")).otherwise(None),
    )
    found = collect_results(table, FACTORS)
    without = [s for s in found.settings if not s.seeds]
    assert {s.factors["d_model"] for s in without} == {32}
    assert found.counts["failed"] == len(found.errors["failed: planted <b>"]) == 36
    page = render(found, "planted")
    assert "none of 3 has a result" in page
    assert "planted &lt;b&gt;" in page


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("diverged", 0)])
def test_a_failed_run_is_tried_again_and_one_that_diverged_is_a_result(status, code, capsys):
    ill = (pl.col("stack") == "AM*2") & (pl.col("d_model") == 32) & (pl.col("seed") == 1)
    table = plant().with_columns(
        status=pl.when(ill).then(pl.lit(status)).otherwise("status"),
        error=pl.when(ill).then(pl.lit("loss=nan")).otherwise(None),
    )
    try:
        report_failed_runs(collect_results(table, FACTORS))
        ended = 0
    except typer.Exit as stop:
        ended = stop.exit_code
    assert ended == code
    said = capsys.readouterr().err
    assert f"{status}: loss=nan (stack=AM*2, d_model=32, seq_len=64, " in said
    assert ("tries the runs that failed again" in said) == bool(code)


@pytest.mark.parametrize(
    ("means", "says"),
    [
        (
            {("a", 64): 0.9, ("b", 64): 0.5, ("c", 64): 0.88, ("c", 16): 0.99},
            "The highest mean accuracy is 90.0 % (a, seq_len=64); its interval lies above those of "
            "1 of 2 other settings. 8 runs: 8 solved.",
        ),
        (
            {("a", 64): 0.9, ("b", 64): 0.88},
            "The highest mean accuracy is 90.0 % (a); its interval lies above those of 0 of 1 "
            "other settings. 4 runs: 4 solved.",
        ),
        ({("a", 64): 0.5, ("b", 64): 0.5}, "4 runs: 4 solved."),
        ({("a", 64): 0.5}, "2 runs: 2 solved."),
    ],
)
def test_the_summary_names_the_best_and_what_it_surely_beats(means, says):
    rows = [
        {"stack": name, "seq_len": length, "seed": seed, "accuracy": mean + (seed - 0.5) / 500}
        for (name, length), mean in means.items()
        for seed in (0, 1)
    ]
    known: dict = {"status": "solved", "solved": True, "steps": 9, "seconds": 1.0, "low": None}
    table = pl.DataFrame([{**known, **row, "high": None, "validation": 0.5} for row in rows])
    table = table.with_columns(parameters=9, state_bytes=9, error=pl.lit(None, pl.String))
    assert collect_results(table, ["stack", "seq_len", "seed"]).summarize() == says


def list_numbers(finding) -> list[str]:
    return [" | ".join(row) for row in finding.numbers().rows]


def test_curves_by_width_name_the_planted_best():
    (found,) = measure_widths(plant())
    assert "7.0 % (SM*2, d_model=32, seq_len=256, learning_rate=0.003)" in found.says
    assert "the highest 99.5 % (AM*2, " in found.says
    assert [note["text"] for note in found.figure().layout["annotations"]] == [
        "64 tokens",
        "256 tokens",
    ]
    with pytest.raises(NotApplicableError, match="one width"):
        measure_widths(plant().filter(pl.col("d_model") == 32))


def test_the_window_of_learning_rates_is_that_of_the_planted_curve():
    (found,) = measure_rates(plant())
    attention = next(c for c in found.curves if c.name.startswith("AM*2, d_model=32, seq_len=256"))
    assert attention.chosen == 0.003
    assert attention.window == (0.001, 0.003)
    assert "SM*2, d_model=128, seq_len=64 | 0.003 | 0.001 … 0.03 | no" in list_numbers(found)


def test_accuracy_is_drawn_against_the_cost_that_a_reader_chooses():
    (found,) = measure_costs(plant())
    assert found.costs == ["seconds of training", "bytes of state", "parameters"]
    assert found.says.endswith("By bytes of state: 3 of 12. By parameters: 1 of 12.")
    names = [s.name() for s in found.find_frontier("bytes of state")]
    assert names[0] == "SM*2, d_model=32, seq_len=64, learning_rate=0.003"
    assert names[-1] == "AM*2, d_model=32, seq_len=64, learning_rate=0.003"
    figure = found.figure()
    views = {view["name"]: view for view in figure.layout["meta"]["views"]}
    assert [*views] == [f"against {cost}" for cost in found.costs]
    chosen = views["against bytes of state"]
    assert chosen["layout"]["xaxis"]["title"]["text"] == "bytes of state"
    _, *points = chosen["data"]
    assert [trace["name"] for trace in points] == ["AM*2", "SM*2"]
    assert {*points[0]["x"]} == {8 * w * n for w in (32, 64, 128) for n in (64, 256)}
    assert {*points[1]["x"]} == {4 * w for w in (32, 64, 128)}
    page = render(collect_results(plant(), FACTORS), "planted")
    assert "<option>against bytes of state</option>" in page
    assert page.count('data-name="state bytes">65,536') == 2
    alike = plant().with_columns(state_bytes=pl.lit(None, pl.Int64), parameters=9)
    (found,) = measure_costs(alike)
    assert found.costs == ["seconds of training"]
    assert not found.figure().layout["meta"]


def test_survival_counts_unsolved_runs_as_censored():
    (found,) = measure_solving(plant())
    by_stack = {c.name.split(",")[0]: c for c in found.curves}
    assert by_stack["AM*2"].median == 343
    assert by_stack["SM*2"].median == np.inf
    assert by_stack["SM*2"].unsolved[-1] == 1
    assert list_numbers(found)[-1].endswith(" | 0 of 3 | – | –")


def test_a_run_that_diverged_is_not_solved_by_the_end_of_the_others():
    lost = (pl.col("stack") == "AM*2") & (pl.col("seed") > 0)
    table = plant().with_columns(
        status=pl.when(lost).then(pl.lit("diverged")).otherwise("status"),
        solved=pl.when(lost).then(None).otherwise("solved"),
        **{n: pl.when(lost).then(None).otherwise(n) for n in ("accuracy", "validation", "steps")},
    )
    (found,) = measure_solving(table)
    curve = next(c for c in found.curves if c.name.startswith("AM*2"))
    assert (curve.solved, curve.runs, curve.median) == (1, 3, np.inf)
    assert curve.unsolved[-1] == pytest.approx(2 / 3)


def test_every_figure_that_applies_is_drawn_and_others_say_why_not():
    found = collect_results(plant(), FACTORS)
    assert set(found.findings) == set(FIGURES) - {"capacity"}
    assert found.missing["capacity"] == "the runs that have ended have one number of pairs"
    drawn = {name.rpartition("-")[0] for name in draw_findings(found.findings, "planted")}
    assert drawn == set(found.findings)
    assert found.summarize().endswith("108 runs: 36 solved, 72 not solved: step limit reached.")
    empty = collect_results(plant().clear(), FACTORS)
    assert not empty.findings
