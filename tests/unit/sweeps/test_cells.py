"""Cells of a sweep: chosen, trained, resumed, and failing alone; one tidy table of them."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from lab.api.options import SweepOptions
from lab.api.settings import describe_run, read_settings
from lab.api.sweeping import InterruptedSweepError, SweepJob
from lab.files import RunError
from lab.models.evaluation import evaluate
from lab.studies import recall, trainability, trainability_ssd
from lab.sweeps import Cell, Sweep
from lab.sweeps.outcome import (
    LENGTHS,
    LOG,
    SPENT,
    evaluate_lengths,
    find_stage_ends,
    find_status,
    read_last_step,
    read_lengths,
    read_records,
    read_spent,
)
from lab.sweeps.pool import MOST_KILLS, CellRun, KilledError, Worker, run_cells
from lab.sweeps.table import (
    MEASURED,
    EarlierResults,
    is_table,
    read_table,
    save_table,
    tabulate_cells,
)
from lab.training.experiment import carry_out
from lab.training.run import Run

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


class FakeWorker(Worker):
    """Trains nothing, and does this for each run."""

    def __init__(self, does: Callable[[CellRun], str | None]):
        super().__init__(threading.Event())
        self.does = does

    def train(self, each: CellRun, max_minutes: float | None) -> str | None:
        return self.does(each)


def cell(seed: int = 0, lengths: tuple[int, ...] = (8,), **options) -> Cell:
    return Cell(
        {"factor": "tiny", "seed": seed}, "mqar", {**TINY, "seed": seed, **options}, lengths
    )


def study(*cells: Cell) -> Sweep:
    return Sweep("tiny", "?", cells)


def train(sweep: Sweep, out: Path, **options) -> list[tuple[str, str | None]]:
    """Train the runs of a sweep by one process; return the names of those that ended, and why."""
    runs, ended, stop = describe(sweep, out), [], threading.Event()
    workers = [Worker(stop)]
    run_cells(runs, workers, stop, on_end=lambda c, e: ended.append((c.name, e)), **options)
    return ended


def describe(sweep: Sweep, out: Path) -> list[CellRun]:
    return [
        CellRun(each, *read_settings(each.task, dict(each.options), out / each.name))
        for each in sweep.cells
    ]


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
    (tmp_path / one.name).mkdir()


def test_only_takes_any_value_of_a_factor_and_all_factors():
    whole = recall.build_study(seeds=2)
    some = whole.select(["mixer=attention", "mixer=soft mask", "d_model=64", "learning_rate=lab"])
    assert [(c.factors["mixer"], c.factors["seed"]) for c in some.cells] == [
        *(("attention", 0), ("soft mask", 0), ("attention", 1), ("soft mask", 1))
    ]
    for wrong in ("mixer", "colour=blue", "mixer=blue"):
        with pytest.raises(ValueError, match=f"only={wrong}"):
            whole.select([wrong])


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
    out = tmp_path_factory.mktemp("trained")
    assert [name for name, _ in train(THREE, out)] == [each.name for each in THREE.cells]
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
    run = Run.open(tmp_path / two.cells[0].name)
    result = run.read_result()
    assert result is not None
    row = found.row(0, named=True)
    assert (row["steps"], row["rows"], row["solved"]) == (8, 32, False)
    assert row["accuracy"] == result["accuracy"]
    assert row["parameters"] == run.build().parameter_count()
    assert row["state_bytes"] == run.build().state_bytes(run.task.seq_len)
    assert found.row(1, named=True)["accuracy"] is None
    assert not {LENGTHS, SPENT, LOG} & {file.name for file in run.path.iterdir()}


def test_a_cell_that_an_earlier_table_shows_as_ended_is_not_run_again(trained, tmp_path):
    both, file = study(cell(0), cell(1)), tmp_path / "table.csv"
    there = tabulate_cells(both, copy_first(trained, tmp_path / "there"))
    there.write_csv(file)
    settings = {c.name: read_settings(c.task, dict(c.options))[0].settings for c in both.cells}
    earlier = EarlierResults.read(file, both, settings)
    assert [earlier.has_ended(c) for c in both.cells] == [True, False]
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
        job = SweepJob(one, tmp_path / out, SweepOptions(table=file))
        earlier = job.read_earlier()
        assert job.count_ignored(earlier) == ignored
        assert job.tabulate(earlier)["status"].to_list() == [["budget"], ["not run"]][ignored]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_part_of_a_sweep_leaves_the_rows_of_the_others_in_its_table(trained, tmp_path, suffix):
    whole, file = study(cell(0), cell(1)), tmp_path / f"table{suffix}"
    before = tabulate_cells(whole, copy_first(trained, tmp_path))
    save_table(before, file)
    content = file.read_bytes()
    part = SweepJob(study(cell(1)), tmp_path, SweepOptions(table=file))
    shown = part.tabulate(part.read_earlier())
    assert shown["seed"].to_list() == [1]
    assert file.read_bytes() == content
    part.write_table(part.read_earlier())
    job = SweepJob(whole, tmp_path / "elsewhere", SweepOptions(table=file))
    assert job.tabulate(job.read_earlier()).equals(before)
    assert job.read_earlier().table["seed"].to_list() == [0, 1]  # each row in its place
    more = SweepJob(study(cell(2), cell(0)), tmp_path / "elsewhere", SweepOptions(table=file))
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


def test_tables_that_never_end_are_refused(tmp_path):
    equal, nested, pipe = (tmp_path / f"{name}.parquet" for name in ("equal", "nested", "pipe"))
    pl.LazyFrame({"a": [0]}).select(pl.lit(0, pl.Int8).repeat_by(2**21).explode()).sink_parquet(
        equal, row_group_size=2**21
    )
    pl.DataFrame({"a": [[0] * 10]}).write_parquet(nested)
    os.mkfifo(pipe)
    (tmp_path / "link.csv").symlink_to("/dev/zero")
    for file, said in (
        (equal, "has 2,097,152 rows, must have ≤ 1,000,000"),
        (nested, "has lists in the column a"),
        (pipe, "is a folder, a device or a pipe, must be a file"),
        (tmp_path / "link.csv", "is a link, must be a file"),
    ):
        with pytest.raises(RunError, match=f"table={file}: cannot be read: .*{said}"):
            EarlierResults.read(file, study(cell()), {})
        assert not is_table(file, ("a",))


def test_one_process_trains_several_runs_and_the_error_of_one_is_its_own(trained):
    found = tabulate_cells(THREE, trained)
    assert found["status"].to_list() == ["budget", "failed", "budget"]
    assert "unknown option A.no_such" in found["error"][1]
    assert "unknown option A.no_such" in (trained / WRONG.name / LOG).read_text()
    assert all(
        0 <= low <= acc <= high <= 1
        for low, acc, high in found[[0, 2], ["low", "accuracy", "high"]].rows()
    )


def test_a_process_that_fails_ends_its_run_and_the_next_one_trains_the_others(tmp_path):
    both, ended = study(cell(0), cell(1)), []

    def does(each: CellRun) -> str | None:
        return "exit code 3: planted" if each.cell == both.cells[0] else None

    workers = [FakeWorker(does) for _ in range(2)]
    runs = describe(both, tmp_path)
    run_cells(runs, workers, threading.Event(), on_end=lambda c, e: ended.append(e))
    assert {*ended} == {"exit code 3: planted", None}
    found = tabulate_cells(both, tmp_path)
    assert found["status"].to_list() == ["failed", "unfinished"]
    assert found["error"].to_list() == ["exit code 3: planted", None]


@pytest.mark.parametrize("kills", [MOST_KILLS - 1, MOST_KILLS])
def test_a_run_whose_process_is_killed_is_tried_again_but_not_for_ever(tmp_path, kills):
    left, ended = [True] * kills, []

    def die(each: CellRun) -> str | None:
        if left and left.pop():
            raise KilledError("its process was killed by SIGKILL")
        return None

    runs, path = describe(study(cell(0)), tmp_path), tmp_path / cell(0).name
    run_cells(runs, [FakeWorker(die)], threading.Event(), on_end=lambda c, e: ended.append(e))
    said = f"its process was killed by SIGKILL, {MOST_KILLS} times without a new checkpoint"
    assert ended == [said if kills == MOST_KILLS else None]
    assert read_spent(path)[1] == ended[0]


def test_a_folder_of_another_run_is_named_before_anything_starts(trained, tmp_path):
    copy_first(trained, tmp_path)
    job = SweepJob(study(cell(0, d_model=16), cell(1)), tmp_path)
    with pytest.raises(ValueError, match=r"1 of 2 runs .*model.d_model=8, this one has .*=16.*\("):
        job.run()
    assert not (tmp_path / cell(1).name).exists()


def test_a_damaged_folder_is_the_error_of_its_cell_alone(tmp_path):
    damaged = tmp_path / cell(0).name
    damaged.mkdir()
    (damaged / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"1 of 2 runs failed: .*config.json is not valid JSON"):
        SweepJob(study(cell(0), cell(1)), tmp_path, SweepOptions(workers=1)).run()
    assert find_status(tmp_path, cell(1)) == "budget"


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("config.json", lambda text: "{", "is not a run folder: config.json is not valid JSON"),
        ("config.json", lambda text: text.replace('"n_pairs"', '"path": "/a", "n"'), "/a, which "),
        ("result.json", lambda text: text.replace('"loss"', '"los"'), "loss is missing"),
        ("metrics.jsonl", lambda text: text[: len(text) // 2], "lines are missing"),
        ("spent.json", lambda text: '{"minutes": 1}', "error is missing"),
    ],
)
def test_a_damaged_run_has_failed_and_the_others_are_in_the_table(
    trained, tmp_path, name, damage, said
):
    out = shutil.copytree(trained, tmp_path / "out")
    file = out / cell(0).name / name
    file.write_text(damage(file.read_text() if file.exists() else ""))
    if name == "spent.json":  # which only a run that has not ended has
        (file.parent / "result.json").unlink()
    found = tabulate_cells(study(cell(0), cell(1)), out)
    assert found["status"].to_list() == ["failed", "budget"]
    assert said in found["error"][0]


def test_minutes_that_are_up_end_a_run_and_more_of_them_resume_it(tmp_path):
    long = study(cell(max_steps=60))
    SweepJob(long, tmp_path, SweepOptions(max_minutes=1e-3)).run()
    row = tabulate_cells(long, tmp_path).row(0, named=True)
    assert row["status"] == "out of time"
    assert row["solved"] is False
    assert 1 <= row["steps"] < 60
    assert row["accuracy"] is not None
    again = SweepJob(long, tmp_path, SweepOptions(max_minutes=1e-3)).run()
    assert again.row(0, named=True) == row, "its minutes are up: nothing is tried"
    assert SweepJob(long, tmp_path).run().row(0, named=True)["steps"] == 60
    assert not (tmp_path / long.cells[0].name / SPENT).exists()


LONG = cell(max_steps=4000, eval_every=1000, early_stop=False, checkpoint_every=10)


def wait_for_steps(path: Path) -> None:
    while read_last_step(path).get("step", 0) < 3:
        time.sleep(0.05)


def test_a_signal_leaves_a_run_that_goes_on(tmp_path):
    path = tmp_path / LONG.name

    def interrupt() -> None:
        wait_for_steps(path)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(InterruptedSweepError, match="run the same command again to resume") as stop:
        SweepJob(study(LONG), tmp_path, SweepOptions(workers=1)).run()
    assert stop.value.signal == signal.SIGINT
    assert (find_status(tmp_path, LONG), read_spent(path)[1]) == ("unfinished", None)
    (step,) = Run.open(path).list_checkpoints()
    assert 0 < step < 4000


def test_a_worker_whose_sweep_was_killed_writes_a_checkpoint_and_ends(tmp_path):
    (each,) = describe(study(LONG), tmp_path)
    each.run.claim()
    worker = Worker(threading.Event())
    training = threading.Thread(target=lambda: train_or_lose(worker, each), daemon=True)
    training.start()
    wait_for_steps(each.run.path)
    process = worker.process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    training.join()
    (step,) = each.run.list_checkpoints()
    assert 0 < step < 4000


def train_or_lose(worker: Worker, each: CellRun) -> None:
    with suppress(KilledError):
        worker.train(each, None)


def test_a_killed_process_is_replaced_and_its_run_goes_on_to_the_same_bits(tmp_path):
    one, ends = cell(max_steps=400, early_stop=False, checkpoint_every=10), []
    for kills in (0, 1):
        out = tmp_path / str(kills)
        (each,) = describe(study(one), out)
        worker = Worker(threading.Event())

        def kill(path: Path = each.run.path, worker: Worker = worker) -> None:
            wait_for_steps(path)
            os.kill(getattr(worker.process, "pid"), signal.SIGKILL)  # noqa: B009

        if kills:
            threading.Thread(target=kill, daemon=True).start()
        assert not run_cells([each], [worker], worker.stop)
        (home,) = each.run.list_checkpoints().values()
        losses = [row["loss"] for row in each.run.read_metrics()]
        ends.append(((home / "model.safetensors").read_bytes(), losses))
        assert find_status(each.run.path.parent, each.cell) == "budget"
    assert ends[0] == ends[1]


def test_lengths_are_evaluated_with_the_weights_at_the_end_of_their_stage(tmp_path, monkeypatch):
    def praise(*given, **options):  # so that every stage is passed at its first evaluation
        return replace(evaluate(*given, **options), accuracy=1.0)

    monkeypatch.setattr("lab.training.loop.evaluate", praise)
    given = {**TINY, "seq_len": 32, "vocab_size": 64, "max_steps": 12}
    run, runtime = describe_run("mqar", given, tmp_path / "run")
    result = carry_out(run, runtime)
    ends = find_stage_ends(run)
    assert ends == {8: 4, 16: 8}
    evaluate_lengths(run, [8, 16, 32])
    found = read_lengths(run)
    assert {length: entry["step"] for length, entry in found.items()} == {
        8: 4,
        16: 8,
        32: result["steps"],
    }
    assert found[32]["test"] == result["accuracy"]


def test_validation_rows_of_shorter_stages_do_not_count_for_the_full_length(tmp_path):
    for start in (8, 32):  # a run that never leaves rows of 8, and one of rows of 32
        given = {**TINY, "seq_len": 32, "vocab_size": 64, "start_len": start}
        run, runtime = describe_run("mqar", given, tmp_path / str(start))
        carry_out(run, runtime)
        evaluate_lengths(run, [32])
        found, last = read_lengths(run)[32], read_records(run)
        assert last is not None
        assert (run.path / LENGTHS).exists() == (start == 8)
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


def test_a_table_of_an_earlier_version_lacks_its_losses(tmp_path):
    row = {name: [0.5] if kind == pl.Float64 else [None] for name, kind in MEASURED.items()}
    table = pl.DataFrame(row, schema=MEASURED)
    save_table(table.drop("loss", "validation_loss"), tmp_path / "old.csv")
    found = read_table(tmp_path / "old.csv", MEASURED)
    assert {*found.columns} == {*MEASURED}
    assert found.row(0, named=True)["loss"] is None
    assert found.row(0, named=True)["validation"] == 0.5
    assert is_table(tmp_path / "old.csv")
