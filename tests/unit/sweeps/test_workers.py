"""Processes that train cells: killed ones are started again, and those of a killed sweep end."""

import json
import subprocess
import time

from lab.sweeps.folder import CellFolder
from lab.sweeps.runner import run_cells
from lab.sweeps.workers import MOST_DEATHS
from tests.unit.sweeps.test_cells import COMMAND, cell, fake, study


def test_a_cell_whose_process_is_killed_is_tried_again_but_not_for_ever(tmp_path):
    die = "os.kill(os.getpid(), signal.SIGKILL)"
    one = study(cell(0))
    run_cells(one, tmp_path / "once", fake(f"if len(deaths.read_text()) < {MOST_DEATHS}: {die}"))
    folder = CellFolder(tmp_path / "once" / one.cells[0].name)
    assert folder.read_error() is None
    run_cells(one, tmp_path / "always", fake(die))
    error = CellFolder(tmp_path / "always" / one.cells[0].name).read_error()
    assert error == (
        f"its process was killed by SIGKILL, {MOST_DEATHS} times without a new checkpoint"
    )


def test_a_worker_whose_sweep_was_killed_writes_a_checkpoint_and_ends(tmp_path):
    long = cell(max_steps=4000, eval_every=1000, early_stop=False)
    folder = CellFolder(tmp_path / long.name)
    folder.claim(long)
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        order = {"folders": [str(folder.path)], "max_minutes": None}
        worker.stdin.write(json.dumps(order).encode() + b"\n")
        worker.stdin.flush()
        while "step" not in folder.read_last_step():
            assert worker.poll() is None
            time.sleep(0.05)
        worker.stdin.close()
        assert worker.wait() == 0
    run = folder.open_run()
    assert run is not None
    (step,) = run.list_checkpoints()
    assert 0 < step < 4000


def test_a_worker_whose_sweep_was_killed_while_it_started_begins_nothing(tmp_path):
    folder = CellFolder(tmp_path / cell().name)
    folder.claim(cell())
    order = {"folders": [str(folder.path)], "max_minutes": None}
    subprocess.run(COMMAND, input=json.dumps(order).encode() + b"\n", check=True)
    assert not folder.run_path.exists()
