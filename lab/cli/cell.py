"""The process that trains one cell of a study: `python -P -m lab.cli.cell FOLDER`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lab.cli.answers import report_failures, report_usage_errors
from lab.machine.spinning import wait_briefly

COMMAND = (sys.executable, "-P", "-m", "lab.cli.cell")
"""-P: files in the working directory must not take the place of the lab's packages."""


def train_cell(
    path: Annotated[Path, typer.Argument(help="The folder of a cell, with its cell.json.")],
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes; can be resumed.")
    ] = None,
) -> None:
    """Train a cell to its end, from its checkpoint if there is one, and evaluate its lengths."""
    from lab.cli.run_settings import describe_run
    from lab.config import Runtime
    from lab.machine.memory import keep_freed_memory
    from lab.studies.folder import CellFolder
    from lab.studies.lengths import evaluate_lengths
    from lab.training.experiment import carry_out

    with report_failures():
        folder = CellFolder(path)
        cell = folder.read_cell()
        with report_usage_errors():
            run, _ = describe_run(cell.task, dict(cell.options), folder.run_path)
        keep_freed_memory()
        result = carry_out(run, Runtime(max_minutes=max_minutes))
        if result["signal"]:
            raise typer.Exit(1)
        if list(cell.lengths) == [run.task.seq_len]:
            # The run's result has the test accuracy of its last weights.
            validation = [row["accuracy"] for row in run.read_metrics().evaluations]
            only = {
                "seq_len": run.task.seq_len,
                "step": result["steps"],
                "test": result["accuracy"],
                "validation": validation[-1] if validation else None,
            }
            folder.write_lengths([only])
        else:
            folder.write_lengths(evaluate_lengths(run, cell.lengths))


if __name__ == "__main__":
    wait_briefly()
    typer.run(train_cell)
