"""Cells that train in a folder elsewhere: what comes home, and going on from it."""

from collections.abc import Generator
from pathlib import Path

import pytest

from lab.cli.cell import COMMAND, claim_run
from lab.files import RunError
from lab.sweeps.folder import CellFolder
from lab.sweeps.parcels import Delivery, Sender, pack, receive
from lab.sweeps.remote import train_elsewhere
from lab.training.runs import Run
from tests.unit.sweeps.test_cells import cell

pytestmark = pytest.mark.usefixtures("forked_workers")

LONG = {"max_steps": 30, "checkpoint_every": 10, "early_stop": False}


def claim(out: Path, *seeds: int) -> list[CellFolder]:
    """Make the folders of cells at home, with the configuration of their runs."""
    folders = []
    for seed in seeds:
        each = cell(seed, **LONG)
        folders.append(CellFolder(out / each.name))
        folders[-1].claim(each)
        with claim_run(folders[-1]):
            pass
    return folders


def train(folders: list[CellFolder]) -> Generator[Delivery, None, None]:
    """Train cells elsewhere; yield what came home, after it was written."""
    by_name = {folder.path.name: folder for folder in folders}
    parcels = {name: pack(folder) for name, folder in by_name.items()}
    for delivery in train_elsewhere(COMMAND[1:], parcels, None):
        receive({by_name[name]: files for name, files in delivery.files.items()})
        yield delivery


def read_end(folder: CellFolder) -> tuple[bytes, list, list]:
    """Return the last weights of a cell's run, its losses and its accuracies by length."""
    run = Run.open(folder.run_path)
    (home,) = run.list_checkpoints().values()
    losses = [row["loss"] for row in run.read_metrics()]
    return (home / "model.safetensors").read_bytes(), losses, folder.read_lengths()


def test_cells_cut_off_elsewhere_go_on_from_what_came_home_and_end_with_the_same_bits(tmp_path):
    cut = claim(tmp_path / "cut", 0, 1)
    losing = train(cut)
    while not all(Run.open(folder.run_path).list_checkpoints() for folder in cut):
        next(losing)
    losing.close()
    steps = {max(Run.open(folder.run_path).list_checkpoints()) for folder in cut}
    assert len(steps) == 1
    assert 0 < min(steps) < LONG["max_steps"]
    assert [len(Run.open(folder.run_path).read_metrics()) for folder in cut] == [*steps] * 2
    whole, ended = claim(tmp_path / "whole", 0, 1), []
    for folders in (cut, whole):
        ended += [name for delivery in train(folders) for name, _ in delivery.ended]
    assert sorted(ended) == sorted(2 * [folder.path.name for folder in cut])
    assert [*map(read_end, cut)] == [*map(read_end, whole)]
    assert {folder.find_status() for folder in cut} == {"budget"}


def test_a_cell_that_fails_elsewhere_says_why_at_home(tmp_path):
    (folder,) = claim(tmp_path, 0)
    damaged = folder.run_path / "checkpoint" / "step-00000010"
    damaged.mkdir(parents=True)
    (damaged / "state.json").write_text("{}")
    ((_, ended),) = train([folder])
    ((name, error),) = ended
    assert name == folder.path.name
    assert error is not None
    assert "step-00000010: format None" in error
    assert error in folder.log.read_text()


def test_nothing_is_sent_twice_and_nothing_of_the_sweep_itself(tmp_path):
    (folder,) = claim(tmp_path, 0)
    sender = Sender([folder])
    assert sender.collect([folder]) == {}
    checkpoint = folder.run_path / "checkpoint" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    (folder.run_path / "metrics.jsonl").write_text("1\n2\n3\n")
    files = sender.collect([folder])[folder]
    assert files == {
        "run/checkpoint/step-00000002/state.json": b"{}",
        "run/metrics.jsonl": b"1\n2\n",
    }
    assert sender.collect([folder]) == {}
    assert sender.collect_ended(folder) == {"run/metrics.jsonl": b"1\n2\n3\n"}


def test_what_comes_home_stays_in_the_folder_of_its_cell(tmp_path):
    (folder,) = claim(tmp_path, 0)
    (folder.path / "run" / "history").symlink_to(tmp_path)
    for name in ("../outside", "run/history/outside"):
        with pytest.raises((RunError, OSError)):
            receive({folder: {name: b""}})
    assert not [*tmp_path.rglob("outside")]
