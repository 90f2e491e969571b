"""Verdicts of the trainability map on planted tables; its figure."""

import math

import numpy as np
import polars as pl
import pytest

from analysis.pages.export import save
from analysis.statistics.holm import holm
from analysis.studies import trainability as trained
from lab.studies.trainability import BASELINE
from lab.sweeps.table import MEASURED


def plant(factor: str, steps: list[int], solved: list[bool] | None = None) -> pl.DataFrame:
    solved = solved or [True] * len(steps)
    return pl.DataFrame(
        [
            {
                "factor": factor,
                "seed": seed,
                **dict.fromkeys(MEASURED),
                "status": "solved" if ended else "budget",
                "solved": ended,
                "steps": count,
                "rows": 64 * count,
            }
            for seed, (count, ended) in enumerate(zip(steps, solved, strict=True))
        ],
        schema={"factor": pl.String, "seed": pl.Int64, **MEASURED},
    )


BEFORE = plant(BASELINE, [300 + 10 * i for i in range(18)])


def test_medians_know_that_censored_runs_take_longer():
    found = trained.measure(
        pl.concat(
            [
                BEFORE,
                plant("half", [100, 200, 700, 700], [True, True, False, False]),
                plant("most", [100, 200, 300, 700], [True, True, True, False]),
                plant("never", [700, 700, 700], [False] * 3),
            ]
        )
    )
    medians = {effect.factor: effect.median for effect in found}
    assert medians == {"half": 200, "most": 200, BASELINE: 380, "never": math.inf}
    assert [effect.factor for effect in found][-1] == "never"
    assert next(e for e in found if e.factor == "most").rows == 64 * 200


def test_a_planted_effect_is_found_and_a_null_is_not():
    rng = np.random.default_rng(0)
    nulls = [plant(f"null {i}", [int(s) for s in rng.integers(300, 480, 3)]) for i in range(20)]
    found = trained.measure(
        pl.concat([BEFORE, plant("fast", [100, 110, 120]), plant("slow", [600, 610, 620]), *nulls])
    )
    assert {effect.factor for effect in found if effect.counts} == {"fast", "slow"}
    faster, slower, same = trained.summarize(found, 0)
    assert faster.startswith(f"Solved sooner than the baseline, {BASELINE} (")
    assert faster.endswith(": fast (110 steps).")
    assert slower.endswith(": slow (610 steps).")
    assert all(f"null {i}" in same for i in range(20))


def test_the_verdict_is_silent_on_a_null_and_says_when_runs_are_too_few():
    three = plant(BASELINE, [300, 310, 320])
    found = trained.measure(pl.concat([three, plant("fast", [100, 110, 120])]))
    assert not any(effect.counts for effect in found)
    said = trained.summarize(found, 5)
    assert not any(text.startswith("Solved") for text in said)
    assert "1 of 1 factors has too few runs" in said[1]
    assert said[-1].startswith("5 runs have not ended")
    assert trained.summarize(found, 1)[-1] == "1 run has not ended and is left out."
    assert trained.summarize(trained.measure(three), 0) == [
        "Nothing to compare yet: the baseline and at least one factor must be run first."
    ]


def test_the_log_rank_test_is_exact_and_near_the_usual_one_for_many_runs():
    few = [300, 310, 320], [True] * 3
    assert trained.log_rank_p([100, 110, 120], [True] * 3, *few) == pytest.approx(0.1)
    assert trained.log_rank_p(*few, *few) == 1
    from lifelines.statistics import logrank_test

    rng = np.random.default_rng(1)
    samples = [rng.exponential(90, 50).round(), rng.exponential(160, 60).round()]
    seen = [(np.minimum(t, 250).astype(int).tolist(), (t < 250).tolist()) for t in samples]
    usual = logrank_test(seen[0][0], seen[1][0], seen[0][1], seen[1][1]).p_value
    assert 0.001 < usual < 0.2
    assert trained.log_rank_p(*seen[0], *seen[1]) == pytest.approx(usual, rel=0.3)


def test_holm_is_as_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert trained.compute_least_p(3, 3) == pytest.approx(0.1)


def test_the_figure_is_drawn(tmp_path):
    effects = trained.measure(pl.concat([BEFORE, plant("never <b>", [700] * 3, [False] * 3)]))
    fig = trained.draw(effects)
    save(fig, tmp_path / "map.html")
    assert "never &lt;b&gt;" in str(fig)
