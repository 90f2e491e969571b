"""The table of runs that differ in the seed alone, for the terminal."""

from rich.table import Table

from analysis.sweeps.seeds import SeedSummary
from lab.cli.tables.durations import format_duration
from lab.training.records import name_ending


def build_seeds_table(found: SeedSummary) -> Table:
    """Return a line for each seed: its accuracy and interval over rows, steps, and its ending."""
    table = Table(box=None, title="test accuracy by seed", title_justify="left")
    for name in ("seed", "accuracy", "95 %", "steps", "time", "ended"):
        table.add_column(name, justify="left" if name == "ended" else "right")
    for run in found.runs:
        table.add_row(
            str(run.seed),
            "—" if run.accuracy is None else f"{run.accuracy:.4f}",
            "" if run.low is None else f"{run.low:.4f} … {run.high:.4f}",
            "" if run.steps is None else f"{'' if run.solved else '> '}{run.steps:,}",
            "" if run.seconds is None else format_duration(run.seconds),
            name_ending(run.status),
        )
    return table
