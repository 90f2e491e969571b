"""Verdicts of the trainability map on planted tables; its figure."""

import math

import numpy as np
import polars as pl

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
    (found,) = trained.measure(
        pl.concat(
            [
                BEFORE,
                plant("half", [100, 200, 700, 700], [True, True, False, False]),
                plant("most", [100, 200, 300, 700], [True, True, True, False]),
                plant("never", [700, 700, 700], [False] * 3),
            ]
        )
    )
    medians = {effect.factor: effect.median for effect in found.effects}
    assert medians == {"half": 200, "most": 200, BASELINE: 380, "never": math.inf}
    assert found.effects[-1].factor == "never"
    assert next(e for e in found.effects if e.factor == "most").rows == 64 * 200


def test_a_planted_effect_is_found_and_a_null_is_not():
    rng = np.random.default_rng(0)
    nulls = [plant(f"null {i}", [int(s) for s in rng.integers(300, 480, 3)]) for i in range(20)]
    (found,) = trained.measure(
        pl.concat([BEFORE, plant("fast", [100, 110, 120]), plant("slow", [600, 610, 620]), *nulls])
    )
    assert {effect.factor for effect in found.effects if effect.counts} == {"fast", "slow"}
    assert found.says.endswith(
        f"sooner than the baseline, {BASELINE}: 1 of 22; later: 1; with too few runs to differ, "
        "whatever their effect: 0."
    )
