"""The runs of a candidate, read from the folders of a sweep."""

from pathlib import Path

from analysis.records.entry import RecordTrial
from lab.files import RunError
from lab.sweeps.folder import ENDED, CellFolder
from lab.sweeps.sweep import Sweep
from lab.sweeps.table import count_training_rows

FACTOR = "entry"
"""The factor of the sweep that names a candidate or the holder."""


def read_trials(sweep: Sweep, out: Path, name: str) -> tuple[RecordTrial, ...]:
    """Return the runs of one entry.

    Args:
        sweep: of the runs of one or two entries.
        out: the folder of its cells.
        name: of the entry.

    Raises:
        RunError: for a run that has not ended, or was begun by a version of the lab that did not
            measure processor time.
    """
    cells = [cell for cell in sweep.cells if cell.factors[FACTOR] == name]
    return tuple(_read(CellFolder(out / cell.name)) for cell in cells)


def _read(folder: CellFolder) -> RecordTrial:
    status, run = folder.find_status(), folder.open_run()
    result = None if run is None else run.read_result()
    if status not in ENDED or run is None or result is None:
        why = folder.read_error()
        raise RunError(f"{folder.path}: {status}{f': {why}' if why else ''}; it must have ended")
    metrics = run.read_metrics()
    if metrics.cpu_seconds is None:
        raise RunError(f"{folder.path}: has steps without CPU seconds; choose another --out")
    return RecordTrial(
        seed=run.train.seed,
        solved=status == "solved",
        rows=count_training_rows(run, metrics),
        cpu_seconds=round(metrics.cpu_seconds, 3),
        steps=result["steps"],
        accuracy=result["accuracy"],
    )
