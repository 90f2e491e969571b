"""Show, audit or export the rows of a task."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lab.cli.figures import save_figure
from lab.cli.messages import refuse, report_failures, report_usage_errors, say
from lab.config import ModelConfig

if TYPE_CHECKING:
    from tasks.base import Task


def show_rows(
    task: "Task",
    split: str,
    seed: int,
    count: int,
    *,
    whole: bool,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Print the first rows of a split, and draw them into a file if one is given."""
    if figure is not None:
        _draw(task, split, seed, count, figure)
    if as_json:
        for number in range(count):
            batch = task.batch(split=split, start=number, size=1, seed=seed)
            found = {"inputs": batch.inputs, "targets": batch.targets, "roles": batch.roles}
            row = {name: tensor[0].tolist() for name, tensor in found.items()}
            links = {name: link[0].tolist() for name, link in batch.links.items()}
            typer.echo(json.dumps({"row": number, **row, "links": links}))
    else:
        from lab.cli.console import open_table_console
        from lab.cli.tables.rows import print_rows

        console = open_table_console()
        print_rows(console, task, split=split, seed=seed, count=count, whole=whole)
    if figure is not None:
        say(f"figure: {figure}", err=as_json)


def _draw(task: "Task", split: str, seed: int, count: int, path: Path) -> None:
    """Draw rows into a file."""
    from analysis.figures.theme import add_title
    from analysis.rows import lay_out

    layout = lay_out(task, task.batch(split=split, size=count, seed=seed))
    save_figure(add_title(layout.figure(), layout.title, f"{split}, seed {seed}"), path)


def audit_rows(
    task: "Task", split: str, seed: int, *, sizes: dict[str, int], as_json: bool
) -> None:
    """Print what predictors and models set by hand reach; exit with 1 if the oracle is unsound."""
    from lab.constructions import ladder
    from lab.machine import explain_lack_of_memory
    from lab.suite.audit import audit

    d_model = sizes.get("d_model", ModelConfig.d_model)
    n_heads = sizes.get("n_heads", ModelConfig.n_heads)
    with report_usage_errors(), explain_lack_of_memory(f"an audit, seq_len={task.seq_len}"):
        found = audit(task, split=split, seed=seed)
        rungs = ladder(task, d_model=d_model, n_heads=n_heads, seed=seed)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "task": task.describe(),
                    "split": split,
                    "seed": seed,
                    "rows": found.rows,
                    "scored": found.scored,
                    "scores": [asdict(score) for score in found.best_first],
                    "models": [asdict(rung) for rung in rungs],
                }
            )
        )
    else:
        from lab.cli.console import open_table_console
        from lab.cli.tables.audit import build_audit_table, build_ladder_table

        console = open_table_console()
        title = f"{task.name}: accuracy of predictors, {split}, seed {seed}"
        console.print(build_audit_table(found, title))
        if rungs:
            console.print(build_ladder_table(rungs))
    if not found.sound:
        less = "no better than a shortcut" if task.stochastic else "not always right"
        raise refuse(f"{task.name}: its oracle is {less}", 1)


def export_rows(
    task: "Task", split: str, seed: int, rows: int, path: Path, *, as_json: bool
) -> None:
    """Write the first rows of a split to a file, with the recipe that makes them again."""
    from lab.files import explain_write_errors
    from lab.suite.parquet import Recipe, export

    with report_failures(), report_usage_errors(), explain_write_errors(path):
        export(Recipe(task, split, seed, rows), path)
    summary = {"path": str(path), "rows": rows, "bytes": path.stat().st_size}
    typer.echo(
        json.dumps(summary) if as_json else f"{path}: {rows:,} rows, {summary['bytes']:,} bytes"
    )
