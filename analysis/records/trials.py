"""The runs of a candidate, read from the folders of a sweep."""

from pathlib import Path

from analysis.records.entry import RecordTrial
from lab.files import RunError
from lab.sweeps.outcome import ENDED, find_status, open_run, read_spent
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
    return tuple(_read(out / cell.name) for cell in cells)


def _read(path: Path) -> RecordTrial:
    status, run = find_status(path), open_run(path)
    result = None if run is None else run.read_result()
    if status not in ENDED or run is None or result is None:
        _, why = read_spent(path)
        raise RunError(f"{path}: {status}{f': {why}' if why else ''}; it must have ended")
    metrics = run.read_metrics()
    return RecordTrial(
        seed=run.train.seed,
        solved=status == "solved",
        rows=count_training_rows(run, metrics),
        cpu_seconds=round(sum(row["cpu_seconds"] for row in metrics), 3),
        steps=result["steps"],
        accuracy=result["accuracy"],
    )
