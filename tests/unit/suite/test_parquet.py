"""Exported rows: the file holds them, and says how to make them again."""

import json
import os
from typing import Any

import polars as pl
import pytest
import torch

from lab.suite.parquet import KEY, Recipe, export, read_recipe
from tasks import TASKS
from tasks.base import Batch, Schedule, Task


def cases() -> list[Task]:
    """Return each task small, a mixture and a schedule."""
    small = [kind(**kind.presets["small"].options) for kind in TASKS.values()]
    n_pairs = Schedule(1, 3, 8)
    varied = [
        TASKS["induction"](seq_len=(8, 20), vocab_size=5),
        TASKS["mqar"](seq_len=16, vocab_size=64, n_pairs=n_pairs),
    ]
    return [*small, *varied]


def columns(batch: Batch) -> dict[str, torch.Tensor]:
    found = {"inputs": batch.inputs, "targets": batch.targets, "roles": batch.roles}
    return {**found, **batch.links}


def join(parts: list[dict[str, torch.Tensor]], name: str) -> list:
    return torch.cat([part[name] for part in parts]).tolist()


@pytest.mark.parametrize("task", cases(), ids=lambda task: f"{task.name}-{task.seq_len}")
def test_the_recipe_makes_the_files_rows_again(tmp_path, monkeypatch, task):
    monkeypatch.setattr("lab.suite.parquet.TOKENS_A_PART", 4 * task.seq_len)
    path = tmp_path / "rows.parquet"
    export(Recipe(task, "test", seed=3, rows=10), path)
    recipe = read_recipe(path)
    assert (recipe.task.options, recipe.split) == (task.options, "test")
    assert (recipe.seed, recipe.rows) == (3, 10)
    said = json.loads(pl.read_parquet_metadata(path)[KEY])
    assert tuple(said["role_names"]) == task.role_names
    made: dict[str, Any] = {}
    exec(said["python"], made)
    table = pl.read_parquet(path)
    assert table["row"].to_list() == list(range(10))
    whole = columns(task.batch(split="test", size=10, seed=3))
    assert table.columns == ["row", *whole]
    again = [columns(batch) for _, batch in recipe.generate()]
    said_again = [columns(batch) for batch in made["batches"]]
    assert len(said_again) == len(again) == 3
    for name, tensor in whole.items():
        # As text, because the numbers that are not scored are NaN.
        for found in (table[name].to_list(), *map(join, (again, said_again), (name, name))):
            assert str(found) == str(tensor.tolist())
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"]


def test_links_of_more_axes_become_nested_lists(tmp_path, monkeypatch):
    task = TASKS["induction"](seq_len=8)
    whole = task.batch(size=3)
    links = {"paths": torch.arange(12).reshape(3, 2, 2), "none": torch.zeros(3, 0).long()}

    def generate(self: Task, split: str, numbers: torch.Tensor, seed: int) -> Batch:
        chosen = {name: link[numbers] for name, link in links.items()}
        return Batch(whole.inputs[numbers], whole.targets[numbers], whole.roles[numbers], chosen)

    monkeypatch.setattr(type(task), "generate", generate)
    export(Recipe(task, "train", seed=0, rows=3), tmp_path / "rows.parquet")
    table = pl.read_parquet(tmp_path / "rows.parquet")
    assert table.schema["paths"] == pl.List(pl.List(pl.Int64))
    assert table["paths"].to_list() == links["paths"].tolist()
    assert table["none"].to_list() == [[], [], []]


def test_rows_are_made_part_by_part(monkeypatch):
    monkeypatch.setattr("lab.suite.parquet.TOKENS_A_PART", 64)
    recipe = Recipe(TASKS["induction"](seq_len=16), "train", seed=0, rows=11)
    assert [(start, len(batch.inputs)) for start, batch in recipe.generate()] == [
        *((0, 4), (4, 4), (8, 3)),
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rows.csv", r"must end in \.parquet"),
        ("taken.parquet", "already exists"),
        ("nowhere/rows.parquet", "folder .*nowhere does not exist"),
    ],
)
def test_paths_that_cannot_be_are_named_and_nothing_is_written(tmp_path, name, words):
    (tmp_path / "taken.parquet").write_text("mine")
    with pytest.raises(ValueError, match=words):
        export(Recipe(TASKS["induction"](), "train", seed=0, rows=2), tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["taken.parquet"]
    assert (tmp_path / "taken.parquet").read_text() == "mine"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(frame, path, **kwargs):
        path.write_bytes(b"PAR1")
        raise pl.exceptions.ComputeError("parquet: underlying IO error: No space left on device")

    monkeypatch.setattr(pl.LazyFrame, "sink_parquet", full)
    with pytest.raises(OSError, match=r"^No space left on device$"):
        export(Recipe(TASKS["induction"](), "train", seed=0, rows=2), tmp_path / "rows.parquet")
    assert not list(tmp_path.iterdir())


def test_a_link_that_was_planted_is_not_written_through(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("rows.parquet", ".rows.parquet.writing"):
        (folder / name).symlink_to(mine if name.startswith(".") else tmp_path / "nowhere")
    export(Recipe(TASKS["induction"](), "train", seed=0, rows=2), folder / "rows.parquet")
    assert mine.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
    assert read_recipe(folder / "rows.parquet").rows == 2


@pytest.mark.parametrize("rows", [0, -1, 2**36 + 1])
def test_row_counts_out_of_bounds_are_named(rows):
    with pytest.raises(ValueError, match=f"rows={rows}: must be in 1 … 68719476736"):
        Recipe(TASKS["induction"](), "train", seed=0, rows=rows)


def test_what_is_no_export_is_named(tmp_path):
    path = tmp_path / "other.parquet"
    path.write_text("not a table")
    with pytest.raises(ValueError, match="not a Parquet file"):
        read_recipe(path)
    pl.DataFrame({"a": [1]}).write_parquet(path)
    with pytest.raises(ValueError, match="was not written by"):
        read_recipe(path)
    said = {"task": {"name": "nonsense"}, "split": "train", "seed": 0, "rows": 1}
    pl.DataFrame({"a": [1]}).write_parquet(path, metadata={KEY: json.dumps(said)})
    with pytest.raises(ValueError, match="nonsense"):
        read_recipe(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a folder, a device or a pipe, must be a file"):
        read_recipe(path)
    with pytest.raises(OSError, match=r"missing\.parquet"):
        read_recipe(tmp_path / "missing.parquet")


GOOD = {"task": TASKS["induction"]().describe(), "split": "train", "seed": 0, "rows": 1}


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ("{", "its recipe is not JSON"),
        (json.dumps([GOOD]), "has no task"),
        (json.dumps(GOOD | {"task": ["induction"]}), "has no task of type dict"),
        (json.dumps({name: GOOD[name] for name in ("task", "seed", "rows")}), "has no split"),
        (json.dumps(GOOD | {"split": 1}), "has no split of type str"),
        (json.dumps(GOOD | {"split": "probe"}), "split='probe': induction has"),
        (json.dumps(GOOD | {"seed": "0"}), "has no seed of type int"),
        (json.dumps(GOOD | {"rows": 2.0}), "has no rows of type int"),
        (json.dumps(GOOD | {"rows": True}), "has no rows of type int"),
        (json.dumps(GOOD | {"rows": 0}), "rows=0: must be in"),
        (json.dumps(GOOD | {"task": {}}), "its task is not known"),
        (json.dumps(GOOD | {"task": {"name": []}}), "its task is not known"),
        (json.dumps(GOOD | {"task": GOOD["task"] | {"seq_len": "x"}}), "its task is not known"),
        (json.dumps(GOOD | {"task": GOOD["task"] | {"seq_len": {"a": 1}}}), "task is not known"),
        (json.dumps(GOOD | {"task": GOOD["task"] | {"depth": 1}}), "its task is not known"),
    ],
)
def test_a_damaged_recipe_is_named_with_its_file(tmp_path, unchecked, damaged, words):
    path = tmp_path / "rows.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(path, metadata={KEY: damaged})
    with pytest.raises(ValueError, match=rf"rows\.parquet: .*{words}"):
        read_recipe(path)
