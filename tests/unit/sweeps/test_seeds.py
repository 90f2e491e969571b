"""`lab TASK --seeds N`: runs that differ in the seed alone, their summary, and what is refused."""

import json

import polars as pl
import pytest
from typer.testing import CliRunner

from analysis.sweeps.seeds import summarize_seeds
from lab.api.settings import read_config
from lab.api.sweeping import build_seeds
from lab.cli.app import app
from lab.sweeps.table import MEASURED
from lab.training.run import Run
from tasks.schedule import Schedule
from tests.unit.sweeps.test_commands import TINY

pytestmark = pytest.mark.usefixtures("forked_workers")


def invoke(words: str, *more: object):
    return CliRunner().invoke(app, [*words.split(), *map(str, more)])


def plant(steps, solved, accuracies=None):
    given = accuracies or [0.99 if yes else 0.5 for yes in solved]
    rows = [
        dict.fromkeys(MEASURED)
        | {"seed": n, "status": "solved" if yes else "budget", "solved": yes, "steps": taken}
        | {"accuracy": share, "low": share, "high": share, "seconds": 1.0}
        for n, (taken, yes, share) in enumerate(zip(steps, solved, given, strict=True))
    ]
    return pl.DataFrame(rows, schema={"seed": pl.Int64, **MEASURED})


def test_unsolved_seeds_are_censored_not_left_out():
    found = summarize_seeds(plant([100, 300, 500, 50], [True, True, True, False]))
    assert found.median == 300
    assert found.to_dict()["steps"]["most"] is None
    said = found.describe().splitlines()
    assert said[:2] == [
        "seeds solved: 3 of 4",
        "steps until solved: median 300, from 100 to more than 500",
    ]
    assert said[2].startswith("not solved, counted as taking longer than they ran: ")
    few = summarize_seeds(plant([100, 900, 900], [True, False, False]))
    assert few.median is None
    assert "median unknown, from 100 to more than 900" in few.describe()
    none = summarize_seeds(plant([900], [False]))
    assert none.describe().startswith("seeds solved: 0 of 1\nnot solved, ")
    assert json.loads(json.dumps(none.to_dict()))["steps"]["least"] is None


def test_all_solved_has_a_range_and_an_interval_over_seeds():
    found = summarize_seeds(plant([100, 200, 300], [True] * 3, [0.98, 0.99, 1.0]))
    assert (found.median, found.to_dict()["steps"]["most"]) == (200, 300)
    assert found.mean == pytest.approx(0.99)
    assert found.interval is not None
    assert found.interval[0] < 0.98
    assert "mean accuracy: 0.9900, 95 %: 0.9" in found.describe()
    for blank in ({"accuracy": None}, {"low": None, "high": None}):
        bare = summarize_seeds(plant([100], [True]).with_columns(**blank))
        assert bare.describe().endswith("from 100 to 100")


def test_seeds_are_trained_in_folders_of_their_own_and_found_again(tmp_path):
    out = tmp_path / "seeds"
    first = invoke(f"mqar {TINY} --d-model 8 --seeds 2 --option A.mask=soft", "--out", out)
    assert first.exit_code == 0, first.output
    assert "seeds solved: 0 of 2" in first.stdout
    runs = [Run.open(out / f"seed={seed}") for seed in range(2)]
    assert [run.train.seed for run in runs] == [0, 1]
    assert runs[0].model.options == {"A.mask": "soft"}
    again = invoke(f"mqar {TINY} --d-model 8 --seeds 2 --option A.mask=soft --json", "--out", out)
    assert again.exit_code == 0, again.output
    found = json.loads(again.stdout)
    assert [run["steps"] for run in found["runs"]] == [4, 4]
    assert found["accuracy"]["mean"] is not None
    assert "all 2 runs have ended" in again.stderr
    single = invoke(f"mqar {TINY} --seeds 2", "--out", runs[0].path)
    assert single.exit_code == 2
    assert "holds a single run" in " ".join(single.stderr.split())


def test_a_file_of_settings_is_taken_with_other_seeds(tmp_path):
    file = tmp_path / "config.json"
    parts = {
        "task": {"name": "mqar", "seq_len": 16, "vocab_size": 32, "n_pairs": [2, 4]},
        "model": {"stack": "SM", "options": {"S.d_state": 4}},
        "train": {"seed": 7, "precision": "auto", "start_len": 16},
    }
    file.write_text(json.dumps(parts))
    known = read_config(file, "mqar", trust=True)
    sweep = build_seeds("mqar", 2, {"d_model": 8, "options": ["S.d_state=8"]}, known)
    assert [cell.factors for cell in sweep.cells] == [{"seed": 0}, {"seed": 1}]
    options = sweep.cells[1].options
    assert (options["seed"], options["precision"], options["d_model"]) == (1, "fp32", 8)
    assert (options["n_pairs"], options["options"]) == ("2,4", ["S.d_state=8"])
    planned = {**known, "n_pairs": Schedule(2, 4, 64)}
    with pytest.raises(ValueError, match="n_pairs is a schedule"):
        build_seeds("mqar", 2, {}, planned)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seeds 0", "seeds=0: must be in 1 … 1,000"),
        ("--seeds 1000000000", "seeds=1000000000: must be in 1 … 1,000"),
        ("--seeds 1e9", "Invalid value for '--seeds'"),
        ("--seeds 2 --seed 0", "--seed: is for a single run"),
        ("--seeds 2 --eval seq_len=16", "--eval: is for a single run"),
        ("--seeds 2 --log tensorboard", "--log=tensorboard: is for a single run"),
        ("--seeds 2 --show 1", "--seeds: has no effect with --show"),
        ("--seeds 2 --precision auto", "precision=auto: would differ"),
        ("--seeds 2 --seq-len 7", "seq_len"),
        ("--seeds 2 --max-minutes 0", "max_minutes=0"),
    ],
)
def test_what_seeds_cannot_go_with_gets_a_line(words, said, tmp_path):
    answer = invoke(f"mqar {words}", "--out", tmp_path / "out")
    assert answer.exit_code == 2, answer.output
    assert said in " ".join(answer.stderr.split())
    assert not (tmp_path / "out").exists()
