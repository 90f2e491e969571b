"""Verdicts of the recall study on planted tables; its figure."""

import numpy as np
import polars as pl
import pytest

from analysis.pages.export import save
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


def test_the_verdict_speaks_of_what_was_run_alone():
    nothing = recall_frame(recall_rows("attention", None), recall_rows("soft mask", None))
    assert recalled.measure(nothing) == []
    assert recalled.summarize([], 16, 16) == [
        "Nothing was run, so there is nothing to compare: 16 runs are left."
    ]
    half = recall_frame(recall_rows("attention", 0.99), recall_rows("soft mask", None))
    settings = recalled.measure(half)
    assert recalled.count_runs(half) == (4, 8)
    said = recalled.summarize(settings, *recalled.count_runs(half))
    assert len(said) == 2
    assert said[0].startswith(
        "Against the paper, in 8 settings of attention: more accurate in 8; the largest gain"
    )
    assert "the largest gain is at T 2,048, d_model 64, 0.99 here and 0.09 there" in said[0]
    assert said[1] == "4 of the 8 runs of the study are not there."
    single = recalled.summarize(settings[:1], 1, 8)
    assert single[0].startswith("Against the paper, in 1 setting of attention: more")
    assert single[1] == "1 of the 8 runs of the study is not there."


def test_a_gain_does_not_hide_a_loss():
    rows = recall_rows("attention", 0.0)
    for row in rows:
        change = 0.2 if row["d_model"] == 64 else -0.05
        row["accuracy"] = PUBLISHED["attention", row["seq_len"], row["d_model"]] + change
    said = recalled.summarize(recalled.measure(recall_frame(rows)), 0, 4)[0]
    assert "more accurate in 4, less accurate in 4; the largest gain is" in said
    assert "; the largest loss is" in said


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
    found = recalled.measure(
        recall_frame(
            recall_runs("attention", 0, 0.02, 0),
            recall_runs("soft mask", 0, 0.02, 1),
            recall_runs("value mask", 0.3, 0.02, 2),
            recall_runs("literal mask", -0.3, 0.02, 3),
        )
    )
    paper, *said = recalled.summarize(found, 0, 8)[1:]
    assert paper.startswith(
        "In the paper the dynamic mask is better than attention without a mask in 4"
    )
    assert [text.split(" attention without a mask: ")[0] for text in said] == [
        "Here the value mask is better than",
        "Here the soft mask does not differ significantly from",
        "Here the literal mask is worse than",
    ]


@pytest.mark.parametrize(("pairs", "few"), [(1, True), (5, True), (6, False)])
def test_too_few_pairs_to_be_significant_are_said_to_be(pairs, few):
    runs = (
        recall_runs(mixer, gain, 0.01, 0) for mixer, gain in (("attention", 0), ("soft mask", 0.3))
    )
    rows = [row for mixer in runs for row in mixer if row["seed"] < pairs]
    said = recalled.summarize(recalled.measure(recall_frame(rows)), 0, 8)[-1]
    assert said.endswith("too few for any difference to be significant.") is few
    assert said.startswith("Here the soft mask is better than") is not few
    assert f"over {pairs} pair{'s' if pairs > 1 else ''} of runs" in said


def test_flips_of_signs_give_the_p_they_give_by_hand():
    assert recalled.sign_flip_p(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert recalled.sign_flip_p(np.array([1.0, -1.0])) == 1
    assert recalled.sign_flip_p(np.full(20, 0.1)) < 1e-3


def test_the_learning_rate_is_chosen_on_validation_rows():
    frame = recall_frame(
        recall_rows("attention", 0.9, "lab", validation=0.1),
        recall_rows("attention", 0.2, "0.001", validation=0.3),
    )
    assert {s.learning_rate for s in recalled.measure(frame)} == {"0.001"}


def test_the_papers_numbers_are_all_there():
    assert len(PUBLISHED) == 4 * 4 * 4
    assert PUBLISHED["attention", 2048, 256] == 0.36
    assert PUBLISHED["dynamic mask attention", 512, 64] == 0.79


def test_the_figure_is_drawn(tmp_path):
    settings = recalled.measure(
        recall_frame(recall_rows("attention", 0.9), recall_rows("SSD, RoPE", 0.4))
    )
    fig = recalled.draw(settings)
    names = [trace["name"] for trace in fig.to_dict()["data"] if trace["showlegend"]]
    assert names[:2] == ["attention", "SSD, RoPE"]
    assert "paper: Based" in names
    save(fig, tmp_path / "recall.html")
