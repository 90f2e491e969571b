"""Cells of a study: chosen, trained, resumed, and failing alone; one tidy table of them."""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from lab.cli.run_settings import describe_run, read_settings
from lab.cli.sweeping import SweepJob
from lab.files import RunError
from lab.models.evaluation import evaluate
from lab.studies import recall, trainability, trainability_ssd
from lab.sweeps import Cell, Sweep
from lab.sweeps.earlier import EarlierResults
from lab.sweeps.folder import CellFolder
from lab.sweeps.lengths import evaluate_last, evaluate_lengths, find_stage_ends
from lab.sweeps.runner import run_cells
from lab.sweeps.table import MEASURED, save_table, tabulate_cells
from lab.sweeps.workers import Trainer, start_processes
from lab.training.experiment import carry_out
from lab.training.runs import Run

pytestmark = pytest.mark.usefixtures("forked_workers")

TINY = {
    "seq_len": 8,
    "vocab_size": 32,
    "d_model": 8,
    "batch_size": 4,
    "eval_every": 4,
    "test_rows": 8,
    "max_steps": 8,
    "start_len": 8,
    "precision": "fp32",
}
COMMAND = [sys.executable, "-m", "lab.cli.cell"]
TRAIN = partial(start_processes, COMMAND)
FAIL = partial(start_processes, ["false"])
FAKE = """
import json, os, pathlib, signal, sys
for line in sys.stdin:
    paths = json.loads(line)["folders"]
    for folder in map(pathlib.Path, paths):
        deaths = folder / "deaths"
        deaths.write_text(deaths.read_text() + "x" if deaths.exists() else "x")
        {does}
        print(json.dumps({{"folder": str(folder), "error": None}}), flush=True)
"""


def fake(does: str) -> Callable[..., Sequence[Trainer]]:
    """A process that trains nothing and does this for each cell."""
    return partial(start_processes, [sys.executable, "-c", FAKE.format(does=does)])


def cell(seed: int = 0, lengths: tuple[int, ...] = (8,), **options) -> Cell:
    return Cell(
        {"factor": "tiny", "seed": seed}, "mqar", {**TINY, "seed": seed, **options}, lengths
    )


def study(*cells: Cell) -> Sweep:
    return Sweep("tiny", "?", cells)


WRONG = cell(2, options=["A.no_such=1"])
THREE = study(cell(0), WRONG, cell(1))


def test_a_study_has_cells_of_the_same_factors_and_names_none_twice():
    with pytest.raises(ValueError, match="names 2 cells"):
        study(cell(), cell())
    with pytest.raises(ValueError, match="has the factors seed"):
        study(cell(), Cell({"seed": 3}, "mqar", {}, (8,)))
    with pytest.raises(ValueError, match="no cells"):
        study()


def test_the_name_of_a_folder_is_never_too_long_and_still_its_own(tmp_path):
    one, other = (replace(cell(), factors={"stack": "SM ÄM*2 " * 40, "seed": i}) for i in (0, 1))
    assert one.name != other.name
    assert one.name.startswith("stack=SM_ÄM_2_SM")
    assert max(len(each.name.encode()) for each in (one, other)) <= 200
    assert cell().name == "factor=tiny,seed=0"
    CellFolder(tmp_path / one.name).claim(one)
    assert CellFolder(tmp_path / one.name).read_cell() == one


def test_only_takes_any_value_of_a_factor_and_all_factors():
    whole = recall.build_study(seeds=2)
    some = whole.select(["mixer=attention", "mixer=soft mask", "d_model=64", "learning_rate=lab"])
    assert [(c.factors["mixer"], c.factors["seed"]) for c in some.cells] == [
        *(("attention", 0), ("soft mask", 0), ("attention", 1), ("soft mask", 1))
    ]
    for wrong in ("mixer", "colour=blue", "mixer=blue"):
        with pytest.raises(ValueError, match=f"only={wrong}"):
            whole.select([wrong])


def test_the_first_cells_are_all_mixers_at_64_with_the_first_seed():
    first = recall.build_study().cells[: len(recall.MIXERS)]
    assert {c.factors["mixer"] for c in first} == set(recall.MIXERS)
    assert {(c.factors["d_model"], c.factors["seed"]) for c in first} == {(64, 0)}


@pytest.mark.parametrize(
    "each",
    [
        *trainability.build_study(seeds=1).cells[: len(trainability.CHANGES)],
        *trainability_ssd.build_study(seeds=1).cells[: len(trainability_ssd.CHANGES)],
        *recall.build_study(seeds=1).select(["d_model=32", "learning_rate=lab"]).cells,
        *recall.build_study(seeds=1).select(["d_model=32", "mixer=attention"]).cells[1:],
    ],
    ids=lambda each: each.name,
)
def test_every_cell_makes_a_run(each, tmp_path):
    run, _ = describe_run(each.task, dict(each.options), tmp_path)
    assert run.train.seed == each.factors["seed"]
    assert max(each.lengths) == run.task.seq_len


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Two cells, and between them one that cannot be built, as one process trained them."""
    out, begun = tmp_path_factory.mktemp("trained"), []
    run_cells(THREE, out, TRAIN, on_begin=begun.append)
    assert begun == [*THREE.cells]
    return out


def copy_first(trained: Path, out: Path) -> Path:
    """Copy the first trained cell into a folder, and return that."""
    shutil.copytree(trained / cell(0).name, out / cell(0).name)
    return out


def test_trained_cells_are_skipped_and_told_apart_from_those_not_run(trained, tmp_path):
    two = study(cell(0), cell(1))
    copy_first(trained, tmp_path)
    found = tabulate_cells(two, tmp_path)
    assert found.columns == ["factor", "seed", *MEASURED]
    assert found["status"].to_list() == ["budget", "not run"]
    run = Run.open(tmp_path / two.cells[0].name / "run")
    result = run.read_result()
    assert result is not None
    row = found.row(0, named=True)
    assert (row["steps"], row["rows"], row["solved"]) == (8, 32, False)
    assert row["accuracy"] == result["accuracy"]
    assert row["parameters"] == run.build().parameter_count()
    assert found.row(1, named=True)["accuracy"] is None
    begun = []
    run_cells(study(cell(0)), tmp_path, FAIL, on_begin=begun.append)
    assert not begun


def test_a_cell_that_an_earlier_table_shows_as_ended_is_not_run_again(trained, tmp_path):
    both, file = study(cell(0), cell(1)), tmp_path / "table.csv"
    there = tabulate_cells(both, copy_first(trained, tmp_path / "there"))
    there.write_csv(file)
    settings = {c.name: read_settings(c.task, dict(c.options))[0].settings for c in both.cells}
    earlier = EarlierResults.read(file, both, settings)
    assert [earlier.has_ended(c) for c in both.cells] == [True, False]
    begun = []
    run_cells(both, tmp_path / "here", fake("pass"), skip=earlier.has_ended, on_begin=begun.append)
    assert begun == [both.cells[1]]
    assert tabulate_cells(study(cell(0)), tmp_path / "here", earlier.rows).equals(there.head(1))
    changed = cell(0, learning_rate=1e-3)
    settings[changed.name] = read_settings("mqar", dict(changed.options))[0].settings
    other = EarlierResults.read(file, study(changed), settings)
    assert (other.rows, other.others) == ({}, {changed.name})
    assert not earlier.others


def test_a_run_of_other_settings_counts_where_it_is_in_the_folder(trained, tmp_path):
    """The folder comes before the table, whatever was a default when the run began."""
    one, file = study(cell(0)), tmp_path / "table.csv"
    found = tabulate_cells(one, copy_first(trained, tmp_path / "here"))
    found.with_columns(settings=pl.lit("deadbeef")).write_csv(file)
    for out, ignored in (("here", 0), ("elsewhere", 1)):
        job = SweepJob(one, tmp_path / out, file)
        earlier = job.read_earlier()
        assert job.count_ignored(earlier) == ignored
        assert job.tabulate(earlier)["status"].to_list() == [["budget"], ["not run"]][ignored]


def test_a_result_in_a_table_gives_place_to_another_result_only(trained, tmp_path):
    both, file = study(cell(0), cell(1)), tmp_path / "table.csv"
    here = tabulate_cells(both, copy_first(trained, tmp_path / "here"))
    ended = here.with_columns(settings=pl.lit("deadbeef"), accuracy=pl.lit(0.5))
    for out, kept in (("elsewhere", ended), ("here", here)):
        ended.write_csv(file)
        job = SweepJob(both, tmp_path / out, file)
        job.write_table(job.read_earlier())
        assert job.read_earlier().table.head(1).equals(kept.head(1))
        assert job.read_earlier().table["status"].to_list() == ["budget", "not run"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_part_of_a_sweep_leaves_the_rows_of_the_others_in_its_table(trained, tmp_path, suffix):
    whole, file = study(cell(0), cell(1)), tmp_path / f"table{suffix}"
    before = tabulate_cells(whole, copy_first(trained, tmp_path))
    save_table(before, file)
    content = file.read_bytes()
    part = SweepJob(study(cell(1)), tmp_path, file)
    shown = part.tabulate(part.read_earlier())
    assert shown["seed"].to_list() == [1]
    assert file.read_bytes() == content
    part.write_table(part.read_earlier())
    job = SweepJob(whole, tmp_path / "elsewhere", file)
    assert job.tabulate(job.read_earlier()).equals(before)
    assert job.read_earlier().table["seed"].to_list() == [0, 1]  # each row in its place
    more = SweepJob(study(cell(2), cell(0)), tmp_path / "elsewhere", file)
    more.write_table(more.read_earlier())
    assert more.read_earlier().table["seed"].to_list() == [0, 1, 2]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_whole_number_beside_a_fraction_is_the_same_cell(trained, tmp_path, suffix):
    """A column that holds 2.5 holds 2.0 for 2; neither is rounded, lost or run again."""
    first = cell(0)
    cells = [replace(first, factors={**first.factors, "seed": seed}) for seed in (2, 2.5)]
    whole, part, file = study(*cells), study(cells[0]), tmp_path / f"table{suffix}"
    copy_first(trained, tmp_path)
    found = tabulate_cells(study(first), tmp_path)
    both = pl.concat([found.with_columns(seed=pl.lit(n)) for n in (2.0, 2.5)])
    save_table(both, file)
    settings = {c.name: found["settings"][0] for c in cells}
    for sweep in (whole, part):
        earlier = EarlierResults.read(file, sweep, settings)
        assert all(earlier.has_ended(c) for c in sweep.cells)
        merged = earlier.merge(tabulate_cells(sweep, tmp_path / "elsewhere", earlier.rows))
        assert merged["seed"].to_list() == [2.0, 2.5]
        assert merged["accuracy"].to_list() == both["accuracy"].to_list()


def test_numbers_beside_text_are_the_same_cells(trained, tmp_path):
    """In a table such a column is text."""
    values = ("lab", 2.0, 0.5, 1e-5)
    cells = [replace(cell(0), factors={"factor": "tiny", "seed": value}) for value in values]
    found = tabulate_cells(study(cell(0)), copy_first(trained, tmp_path))
    numbers = pl.concat([found.with_columns(seed=pl.lit(n)) for n in values[1:]])
    settings = {c.name: found["settings"][0] for c in cells}
    file, sweep = tmp_path / "table.csv", study(*cells)
    for _ in range(2):
        save_table(numbers, file)
        earlier = EarlierResults.read(file, sweep, settings)
        assert [earlier.has_ended(c) for c in cells] == [False, True, True, True]
        numbers = earlier.merge(tabulate_cells(sweep, tmp_path / "elsewhere", earlier.rows))
        assert sorted(numbers["status"].to_list()) == ["budget"] * 3 + ["not run"]


def test_the_type_of_a_column_is_never_narrowed(trained, tmp_path):
    file, one = tmp_path / "table.parquet", replace(cell(0), factors={"factor": "tiny", "seed": 2})
    found = tabulate_cells(study(cell(0)), copy_first(trained, tmp_path))
    save_table(found.with_columns(seed=pl.lit(0.5, pl.Float32)), file)
    other = replace(one, factors={"factor": "tiny", "seed": 0.001})
    sweep = study(one, other)
    merged = EarlierResults.read(file, sweep, {}).merge(tabulate_cells(sweep, tmp_path / "no"))
    assert merged["seed"].to_list() == [0.5, 2.0, 0.001]


def test_text_in_place_of_numbers_is_refused(trained, tmp_path):
    file, one = tmp_path / "table.parquet", study(cell(0))
    found = tabulate_cells(one, copy_first(trained, tmp_path))
    save_table(found.with_columns(accuracy=pl.lit("high")), file)
    with pytest.raises(RunError, match=r"table\.parquet: cannot be read: .*accuracy"):
        EarlierResults.read(file, one, {})


def test_a_table_of_another_sweep_is_refused(tmp_path):
    file = tmp_path / "table.csv"
    for content, said in (
        ("factor,seed\ntiny,0\n", "is not a table of the sweep tiny"),
        ("", "cannot be read"),
        ("factor,seed\n\0\xff,zero\n", "table="),
    ):
        file.write_text(content)
        with pytest.raises(RunError, match=said):
            EarlierResults.read(file, study(cell()), {})
    assert not EarlierResults.read(tmp_path / "none.csv", study(cell()), {}).rows


def test_a_failing_cell_is_recorded_and_stops_no_other(tmp_path):
    fails = 'if "seed=0" in folder.name: print("planted", file=sys.stderr); sys.exit(3)'
    ended = []
    both = study(cell(0), cell(1))
    run_cells(
        both,
        tmp_path,
        fake(fails),
        workers=2,
        on_end=lambda cell, folder, error: ended.append(error),
    )
    assert set(ended) == {"exit code 3: planted", None}
    found = tabulate_cells(both, tmp_path)
    assert found["status"].to_list() == ["failed", "unfinished"]
    assert found["error"].to_list() == ["exit code 3: planted", None]


def test_one_process_trains_several_cells_and_the_error_of_one_is_its_own(trained):
    found = tabulate_cells(THREE, trained)
    assert found["status"].to_list() == ["budget", "failed", "budget"]
    assert found["error"][1].startswith("unknown option A.no_such")
    assert "Error: unknown option" in CellFolder(trained / WRONG.name).log.read_text()
    assert all(
        0 <= low <= acc <= high <= 1
        for low, acc, high in found[[0, 2], ["low", "accuracy", "high"]].rows()
    )


def test_an_error_that_no_folder_can_keep_is_told_at_the_end(tmp_path, monkeypatch):
    def refuse(folder: CellFolder, minutes: float, error: str | None) -> None:
        raise RunError("cannot be written")

    monkeypatch.setattr(CellFolder, "note", refuse)
    monkeypatch.setattr("lab.cli.sweeping.COMMAND", ["false"])
    job = SweepJob(study(cell(0), cell(1)), tmp_path / "out", workers=1, lanes=False)
    with pytest.raises(RunError, match=r"2 of 2 runs failed: exit code 1 \(factor=tiny,seed=0; "):
        job.run()


def test_a_folder_of_another_cell_is_an_error_of_that_cell(tmp_path):
    CellFolder(tmp_path / cell().name).claim(cell())
    other = cell(d_model=16)
    run_cells(study(other), tmp_path, FAIL)
    error = CellFolder(tmp_path / other.name).read_error()
    assert error is not None
    assert "holds runs with d_model=8 there and 16 here; choose another --out" in error


def test_minutes_that_are_up_end_a_cell_and_more_of_them_resume_it(tmp_path):
    long = study(cell(max_steps=60))
    folder = CellFolder(tmp_path / long.cells[0].name)
    run_cells(long, tmp_path, TRAIN, max_minutes=1e-3)
    row = tabulate_cells(long, tmp_path).row(0, named=True)
    assert row["status"] == "out of time"
    assert row["solved"] is False
    assert 1 <= row["steps"] < 60
    assert row["accuracy"] is not None
    run_cells(long, tmp_path, FAIL, max_minutes=1e-3)
    assert folder.find_status() == "out of time", "its minutes are up: nothing is tried"
    run_cells(long, tmp_path, TRAIN)
    assert tabulate_cells(long, tmp_path).row(0, named=True)["steps"] == 60


def test_a_signal_leaves_a_cell_that_goes_on(tmp_path):
    steps = 4000
    long = study(cell(max_steps=steps, eval_every=1000, early_stop=False))
    path = tmp_path / long.cells[0].name
    metrics = path / "run" / "metrics.jsonl"

    def interrupt() -> None:
        while not metrics.exists() or not metrics.read_text().count("\n") > 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run_cells(long, tmp_path, TRAIN) == signal.SIGINT
    folder = CellFolder(path)
    assert (folder.find_status(), folder.read_error()) == ("unfinished", None)
    (step,) = Run.open(path / "run").list_checkpoints()
    assert 0 < step < steps


def test_lengths_are_evaluated_with_the_weights_at_the_end_of_their_stage(tmp_path, monkeypatch):
    def praise(*given, **options):  # so that every stage is passed at its first evaluation
        return replace(evaluate(*given, **options), accuracy=1.0)

    monkeypatch.setattr("lab.training.validation.evaluate", praise)
    given = {**TINY, "seq_len": 32, "vocab_size": 64, "max_steps": 12}
    run, runtime = describe_run("mqar", given, tmp_path / "run")
    result = carry_out(run, runtime)
    ends = find_stage_ends(run)
    assert ends == {8: 4, 16: 8}
    found = evaluate_lengths(run, [8, 16, 32])
    assert [entry["seq_len"] for entry in found] == [8, 16, 32]
    assert [entry["step"] for entry in found] == [4, 8, result["steps"]]
    assert found[-1]["test"] == result["accuracy"]


def test_validation_rows_of_shorter_stages_do_not_count_for_the_full_length(tmp_path):
    for start in (8, 32):  # a run that never leaves rows of 8, and one of rows of 32
        given = {**TINY, "seq_len": 32, "vocab_size": 64, "start_len": start}
        run, runtime = describe_run("mqar", given, tmp_path / str(start))
        carry_out(run, runtime)
        (found,), last = evaluate_lengths(run, [32]), evaluate_last(run)
        stage = run.read_metrics().stages[-1]
        assert found["test"] == last["test"]
        assert stage.seq_len == start
        if start == 32:
            assert found["validation"] == last["validation"] == stage.accuracy
        else:
            assert last["validation"] is None
            model = run.load_model(stage.steps)
            right = evaluate(run.task, model, rows=2, rows_at_once=2, seed=0, split="validation")
            assert found["validation"] == right.accuracy
