"""Settings are ranked over seeds of one task, on planted differences, and never on a null."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.pages.ranking import group_settings, rank
from lab.config import ModelConfig, TrainConfig
from lab.training.run import Run
from tasks.mqar import MQAR
from tests.planted_runs import make_result, make_row, write_rows

TASK = MQAR(seq_len=16, vocab_size=32)
MOST = 1000


class Folder:
    """Makes run folders without training."""

    def __init__(self, path: Path):
        self.path, self.count = path, 0

    def add(self, seed: int, solved: int | None, *, accuracy: float = 0.5, task=TASK, **train):
        """Return a run that was solved at a step, or took all of its steps."""
        self.count += 1
        width = train.pop("d_model", 8)
        scale = width**-0.5  # as the lab's protocol sets it
        model = ModelConfig(stack=train.pop("stack", "AM"), d_model=width, logit_scale=scale)
        config = TrainConfig(**{"max_steps": MOST, "batch_size": 4, "seed": seed, **train})
        run = Run(self.path / str(self.count), task, model, config)
        run.claim()
        last = solved or config.max_steps
        rows = [make_row(step, seq_len=task.seq_len) for step in range(1, last + 1)]
        rows[-1]["validation_accuracy"] = 1.0 if solved else accuracy
        write_rows(run, rows)
        ended = {"stopped": "solved" if solved else "budget", "steps": last, "rows": 4 * last}
        run.write_result(make_result(**ended, accuracy=accuracy))
        return run

    def add_all(self, times, **options):
        return [self.add(seed, time, **options) for seed, time in enumerate(times)]


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path)


def says(runs) -> str:
    found = rank(runs)
    assert (found.draw() is None) == bool(found.refusal)
    return found.describe().says


def test_one_seed_is_no_ranking(folder):
    runs = [folder.add(0, 100), folder.add(0, 900, stack="SM")]
    assert says(runs) == "One seed: no ranking."
    assert says([*runs, folder.add(1, 100)]) == "One seed for all but stack=AM: no ranking."
    # The same seed twice is one seed.
    assert says([*runs, folder.add(0, 101), folder.add(0, 901, stack="SM")]) == (
        "One seed: no ranking."
    )


def test_runs_of_different_tasks_are_not_ranked(folder):
    other = replace(TASK, fillers="zero")
    runs = [*folder.add_all([100, 110]), *folder.add_all([900, 910], task=other)]
    assert says(runs) == (
        "The runs have different tasks, or different options of a task: no ranking."
    )
    same = folder.add_all([100, 110])
    assert says(same) == "The runs differ in nothing but the seed: no ranking."
    again = [folder.add(0, 100), folder.add(0, 110)]
    assert says(again) == "The runs have the same settings and seed: no ranking."


def test_a_planted_difference_in_steps_is_found_and_unsolved_runs_are_censored(folder):
    runs = [
        *folder.add_all([None, 900, None, None, None], stack="SM"),
        *folder.add_all([100, 110, 120, 130, 140]),
        folder.add(0, 500, stack="NM"),
    ]
    found = rank(runs)
    assert found.measure == "steps"
    assert [contender.name for contender in found.contenders] == ["stack=AM", "stack=SM"]
    assert found.contenders[1].solved == (False, True, False, False, False)
    assert found.describe().says == (
        "stack=AM (median 120 steps) is solved sooner than stack=SM (fewer than half of its runs "
        "solved). One seed, so no rank: stack=NM."
    )
    fig = found.draw()
    assert fig is not None
    drawn = {trace["name"]: len(trace["x"]) for trace in fig.to_plotly_json()["data"]}
    assert drawn == {"a run": 6, "a run, not solved by then": 4, "median": 1}


def test_a_null_is_silent(folder):
    rng = np.random.default_rng(0)
    times = rng.integers(100, 900, (20, 2, 5))
    claims = 0
    for trial in times.tolist():
        runs = [*folder.add_all(trial[0]), *folder.add_all(trial[1], stack="SM")]
        claims += len(rank(runs).better)
    assert claims <= 2
    few = [*folder.add_all([100, 110]), *folder.add_all([900, 910], stack="SM")]
    assert says(few) == (
        "No difference between settings is significant: stack=AM (median 100 steps) and stack=SM "
        "(median 900 steps). With so few seeds no difference could be: train more seeds."
    )


def test_other_batch_sizes_are_compared_by_rows(folder):
    runs = [
        *folder.add_all([100, 101, 102, 103], batch_size=8),
        *folder.add_all([110, 111, 112, 113]),
    ]
    found = rank(runs)
    assert found.measure == "rows"
    assert found.better == (("batch_size=4", "batch_size=8"),)


def unsolved(folder, values, **options) -> list[Run]:
    return [folder.add(seed, None, accuracy=value, **options) for seed, value in enumerate(values)]


def test_at_equal_budget_unsolved_settings_are_ranked_by_accuracy(folder):
    low, high = [0.1, 0.11, 0.12, 0.13], [0.5, 0.51, 0.52, 0.53]
    runs = [*unsolved(folder, low), *unsolved(folder, high, stack="SM")]
    assert says(runs) == "stack=SM (51.5 %) is more often right than stack=AM (11.5 %)."
    shorter = unsolved(folder, high, stack="SM", max_steps=500)
    assert says([*runs[:4], *shorter]).endswith("nor of the same budget: no ranking.")


def test_settings_are_named_by_what_sets_them_apart(folder):
    runs = [folder.add(0, 1), folder.add(1, 1), folder.add(0, 1, stack="SM", learning_rate=0.5)]
    assert {name: len(group) for name, group in group_settings(runs).items()} == {
        f"stack=AM, learning_rate={TrainConfig().learning_rate}": 2,
        "stack=SM, learning_rate=0.5": 1,
    }


def test_what_follows_from_an_option_does_not_name_a_setting(folder):
    runs = [folder.add(0, 1), folder.add(0, 1, d_model=24)]
    assert list(group_settings(runs)) == ["d_model=8", "d_model=24"]
