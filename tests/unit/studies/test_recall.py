"""Verdicts of the recall study on planted tables; its figure."""

import numpy as np
import polars as pl
import pytest

from analysis.base import Finding
from analysis.studies import recall as recalled
from lab.studies import recall
from lab.studies.published import PUBLISHED
from lab.sweeps.table import MEASURED


def recall_rows(mixer: str, accuracy: float | None, rate: str = "lab", validation: float = 0.0):
    return [
        {
            "mixer": mixer,
            "d_model": width,
            "learning_rate": rate,
            "seed": seed,
            **dict.fromkeys(MEASURED),
            "seq_len": length,
            "status": "not run" if accuracy is None else "budget",
            "solved": None if accuracy is None else False,
            "accuracy": None if accuracy is None else accuracy + seed / 1000,
            "validation": validation,
        }
        for width in (64, 128)
        for length in recall.LENGTHS
        for seed in range(2)
    ]


def recall_frame(*rows) -> pl.DataFrame:
    head = {"mixer": pl.String, "d_model": pl.Int64, "learning_rate": pl.String, "seed": pl.Int64}
    return pl.DataFrame([row for part in rows for row in part], schema={**head, **MEASURED})


def compare(*rows) -> tuple[Finding, ...]:
    return recalled.measure(recalled.collect_settings(recall_frame(*rows)))


def list_rows(finding: Finding) -> tuple[tuple[str, ...], ...]:
    numbers = finding.numbers()
    assert numbers is not None
    return numbers.rows


def test_the_verdict_speaks_of_what_was_run_alone():
    nothing = recall_frame(recall_rows("attention", None), recall_rows("soft mask", None))
    assert recalled.collect_settings(nothing) == recalled.measure(()) == ()
    half = recall_rows("attention", 0.99), recall_rows("soft mask", None)
    assert recalled.count_runs(recall_frame(*half)) == (4, 8)
    (found,) = compare(*half)
    assert found.says.startswith("Settings that are more accurate than in the paper: 8 of 8; less")
    row = list_rows(found)[0]
    assert row[:5] == ("attention", "8", "8", "0", "+0.90 at T 2,048, d 64")


def test_a_gain_does_not_hide_a_loss():
    rows = recall_rows("attention", 0.0)
    for row in rows:
        change = 0.2 if row["d_model"] == 64 else -0.05
        row["accuracy"] = PUBLISHED["attention", row["seq_len"], row["d_model"]] + change
    (found,) = compare(rows)
    assert "than in the paper: 4 of 8; less accurate: 4; " in found.says
    assert [text[:5] for text in list_rows(found)[0][4:]] == ["+0.20", "-0.05"]


def recall_runs(mixer: str, gain: float, spread: float, seed: int):
    """Return eight runs of a mixer at one width, each about `gain` better than a half."""
    noise = np.random.default_rng(seed).normal(0, spread, 8)
    rows = recall_rows(mixer, 0.5)[: 2 * len(recall.LENGTHS)]
    return [
        {**row, "seed": run, "accuracy": 0.5 + gain + float(noise[run])}
        for run in range(8)
        for row in rows
        if row["seed"] == 0
    ]


def test_a_mask_that_is_level_with_attention_is_not_ahead_and_a_better_one_is():
    _, found = compare(
        recall_runs("attention", 0, 0.02, 0),
        recall_runs("soft mask", 0, 0.02, 1),
        recall_runs("value mask", 0.3, 0.02, 2),
        recall_runs("literal mask", -0.3, 0.02, 3),
    )
    assert "attention without a mask: 1 of 3; worse: 1; the paper's mask is better at 4 of" in (
        found.says
    )
    assert [(row[0], row[-1]) for row in list_rows(found)] == [
        ("value mask", "better"),
        ("soft mask", "not significant"),
        ("literal mask", "worse"),
    ]


@pytest.mark.parametrize(("pairs", "verdict"), [(1, "too few"), (5, "too few"), (6, "better")])
def test_too_few_pairs_to_be_significant_are_said_to_be(pairs, verdict):
    runs = (
        recall_runs(mixer, gain, 0.01, 0) for mixer, gain in (("attention", 0), ("soft mask", 0.3))
    )
    _, found = compare([row for mixer in runs for row in mixer if row["seed"] < pairs])
    [row] = list_rows(found)
    assert row[2] == str(pairs)
    assert row[-1].startswith(verdict)


def test_the_learning_rate_is_chosen_on_validation_rows():
    frame = recall_frame(
        recall_rows("attention", 0.9, "lab", validation=0.1),
        recall_rows("attention", 0.2, "0.001", validation=0.3),
    )
    assert {s.learning_rate for s in recalled.collect_settings(frame)} == {"0.001"}


def test_the_papers_numbers_are_all_there():
    assert len(PUBLISHED) == 4 * 4 * 4
    assert PUBLISHED["attention", 2048, 256] == 0.36
    assert PUBLISHED["dynamic mask attention", 512, 64] == 0.79
