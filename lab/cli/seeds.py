"""`lab TASK --seeds N`: a sweep of runs that differ in the seed alone, and what it found."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.cli.messages import report_usage_errors
from lab.cli.options import Span

if TYPE_CHECKING:
    from lab.sweeps import Sweep


def train_seeds(
    task: str,
    count: int,
    given: Mapping[str, Any],
    known: Mapping[str, Any],
    out: Path | None,
    evaluations: list[str] | None,
    *,
    fresh: bool,
    as_json: bool,
) -> None:
    """Train a run for each of several seeds, or go on with them, and print how they compare.

    Args:
        task: its name.
        count: how many seeds.
        given: options as typed, by field.
        known: settings from a file, by field.
        out: the folder of the runs' folders; None: one named after the settings.
        evaluations: what is given as --eval, which is for a single run.
        fresh: train all anew, and remove the runs that the folders hold.
        as_json: print the summary as JSON and nothing else.
    """
    from analysis.sweeps.seeds import summarize_seeds
    from lab.cli.console import open_table_console
    from lab.cli.sweep import PAGE, report_failed_runs, run_sweep
    from lab.cli.sweep_options import SweepOptions
    from lab.cli.tables.seeds import build_seeds_table

    with report_usage_errors():
        for name, value in (("seed", given.get("seed")), ("eval", evaluations)):
            if value is not None:
                raise ValueError(f"--{name}: is for a single run; leave it out, or --seeds")
        built = build_sweep(task, count, given, known)
    out = out or Path("runs") / built.name
    options = SweepOptions(out=out, max_minutes=given.get("max_minutes"), fresh=fresh)
    table, results = run_sweep(built, options)
    found = summarize_seeds(table)
    if as_json:
        typer.echo(json.dumps({"task": task, "out": str(out), **found.to_dict()}))
    else:
        open_table_console().print(build_seeds_table(found))
        typer.echo(found.describe())
    typer.echo(f"page: {out / PAGE}", err=as_json)
    typer.echo(f"One run: `lab analyze {out / built.cells[0].name}`", err=True)
    report_failed_runs(results)


def build_sweep(
    task: str, count: int, given: Mapping[str, Any], known: Mapping[str, Any]
) -> "Sweep":
    """Return the sweep whose runs have these settings, and differ in the seed alone.

    Raises:
        ValueError: for a number of seeds out of its bounds, an option that only a single run has,
            or settings that no run can have.
    """
    from lab.cli.messages import parse_assignments
    from lab.cli.sweep_settings import SweepSettings, read_seeds
    from tasks.schedule import Schedule

    seeds = read_seeds(count)
    if "log" in given:
        raise ValueError(f"--log={given['log']}: is for a single run; leave it out, or --seeds")
    for name, value in known.items():
        if isinstance(value, Schedule | Span) and name not in given:
            raise ValueError(f"--config: its {name} is a schedule; with --seeds give --{name}, too")
    # "auto" in a file is what a single run measures; the runs of a sweep must not differ in it.
    kept = {n: v for n, v in known.items() if (n, v) != ("precision", "auto") and v is not None}
    layers = {**kept.pop("options", {}), **parse_assignments(given.get("options", []))}
    mixed = {n: ",".join(map(str, v)) for n, v in kept.items() if isinstance(v, list | tuple)}
    fixed = {**kept, **mixed, **given, **layers}
    for name in ("seed", "options", "max_minutes"):
        fixed.pop(name, None)
    return SweepSettings(task, {}, fixed, seeds).build()
