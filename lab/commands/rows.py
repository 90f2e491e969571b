"""`lab TASK --show | --audit | --export`: a task's rows, without training on them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lab.commands.answers import answering, refusal, usage
from lab.config import ModelConfig

if TYPE_CHECKING:
    from tasks.base import Task

Action = Literal["show", "audit", "export"]
PANEL = "Rows: look, without training"
MOST_SHOWN = 64

OPTIONS: dict[str, Any] = {
    "show": Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Print N rows, 1 … {MOST_SHOWN}, coloured by role.",
            rich_help_panel=PANEL,
        ),
    ],
    "whole": Annotated[
        bool | None,
        typer.Option("--whole", help="Show long rows without folding them.", rich_help_panel=PANEL),
    ],
    "figure": Annotated[
        Path | None,
        typer.Option(help="Draw the rows shown: .html, .png or .svg.", rich_help_panel=PANEL),
    ],
    "audit": Annotated[
        bool | None,
        typer.Option(
            "--audit",
            help="Score chance, the shortcuts, the oracle, and models set by hand.",
            rich_help_panel=PANEL,
        ),
    ],
    "export": Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.parquet",
            help="Write rows, and how to make them again.",
            rich_help_panel=PANEL,
        ),
    ],
    "rows": Annotated[
        int | None,
        typer.Option(metavar="N", help="How many are exported.", rich_help_panel=PANEL),
    ],
    "split": Annotated[
        str | None,
        typer.Option(
            help="Whose rows.", show_default="train; test to audit", rich_help_panel=PANEL
        ),
    ],
}
"""Of every task's command, beside those it trains with; None stands for "not given"."""


def asked(given: dict[str, Any], training: dict[str, Any]) -> Action | None:
    """Return what is to be done with rows, or None where a model is to be trained.

    Args:
        given: values of `OPTIONS`.
        training: values of options that only make sense in training, by flag.

    Raises:
        ValueError: for options that contradict each other, or numbers out of their bounds.
    """
    actions: list[Action] = [a for a in ("show", "audit", "export") if given[a] is not None]
    if len(actions) > 1:
        raise ValueError(f"{' and '.join(f'--{a}' for a in actions)}: choose one")
    action = actions[0] if actions else None
    needs = {"whole": "show", "figure": "show", "rows": "export"}
    for option, needed in needs.items():
        if given[option] is not None and action != needed:
            raise ValueError(f"--{option}: goes with --{needed}")
    if action is None:
        if given["split"] is not None:
            raise ValueError("--split: goes with --show, --audit or --export")
        return None
    for flag, value in training.items():
        if value is not None:
            raise ValueError(f"--{flag} with --{action}: nothing is trained")
    if action == "show" and not 1 <= given["show"] <= MOST_SHOWN:
        raise ValueError(f"show={given['show']}: must be in 1 … {MOST_SHOWN}")
    if action == "export" and given["rows"] is None:
        raise ValueError("--export: needs --rows N")
    return action


def act(
    action: Action,
    task: "Task",
    seed: int,
    given: dict[str, Any],
    *,
    sizes: dict[str, int],
    as_json: bool,
) -> None:
    """Do what is asked with a task's rows.

    Args:
        action: from `asked`.
        task: whose rows.
        seed: of the rows.
        given: values of `OPTIONS`.
        sizes: d_model and n_heads of the models set by hand, where given.
        as_json: print JSON alone.
    """
    split = given["split"] or ("test" if action == "audit" else "train")
    with usage():
        task.batch(split=split, size=1, seed=seed)
    if action == "show":
        _show(task, split, seed, given, as_json)
    elif action == "audit":
        _audit(task, split, seed, sizes, as_json)
    else:
        _export(task, split, seed, given, as_json)


def _show(task: "Task", split: str, seed: int, given: dict[str, Any], as_json: bool) -> None:
    if given["figure"] is not None:
        _draw(task, split, seed, given["show"], given["figure"])
    if as_json:
        for number in range(given["show"]):
            batch = task.batch(split=split, start=number, size=1, seed=seed)
            found = {"inputs": batch.inputs, "targets": batch.targets, "roles": batch.roles}
            row = {name: tensor[0].tolist() for name, tensor in found.items()}
            links = {name: link[0].tolist() for name, link in batch.links.items()}
            typer.echo(json.dumps({"row": number, **row, "links": links}))
    else:
        from rich.console import Console

        from lab.console_rows import show

        console = Console(highlight=False, markup=False)
        whole = bool(given["whole"])
        show(console, task, split=split, seed=seed, count=given["show"], whole=whole)
    if given["figure"] is not None:
        typer.echo(f"figure: {given['figure']}", err=as_json)


def _draw(task: "Task", split: str, seed: int, count: int, path: Path) -> None:
    """Draw the rows into a file."""
    from analysis import rows
    from analysis.export import BrowserError, save
    from analysis.figures.style import stamped
    from lab.files import writing

    found = rows.laid_out(task, task.batch(split=split, size=count, seed=seed))
    drawn = stamped(rows.draw(found), rows.describe(found).title, f"{split}, seed {seed}")
    try:
        with answering(), usage(), writing(path):
            save(drawn, path)
    except BrowserError as error:
        raise refusal(error, 2) from error


def _audit(task: "Task", split: str, seed: int, sizes: dict[str, int], as_json: bool) -> None:
    from lab.audit import audit
    from lab.oracles import ladder

    found = audit(task, split=split, seed=seed)
    with usage():
        rungs = ladder(
            task,
            d_model=sizes.get("d_model", ModelConfig.d_model),
            n_heads=sizes.get("n_heads", ModelConfig.n_heads),
            seed=seed,
        )
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "task": task.described(),
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
        from rich.console import Console

        from lab.console_audit import audit_table, ladder_table

        console = Console(markup=False, highlight=False)
        title = f"{task.name}: accuracy of rules, {split}, seed {seed}"
        console.print(audit_table(found, title))
        if rungs:
            console.print(ladder_table(rungs))
    if not found.sound:
        raise refusal(f"{task.name}: its oracle is not always right", 1)


def _export(task: "Task", split: str, seed: int, given: dict[str, Any], as_json: bool) -> None:
    from lab.export import Recipe, export
    from lab.files import writing

    path, rows = given["export"], given["rows"]
    with answering(), usage(), writing(path):
        export(Recipe(task, split, seed, rows), path)
    said = {"path": str(path), "rows": rows, "bytes": path.stat().st_size}
    typer.echo(json.dumps(said) if as_json else f"{path}: {rows:,} rows, {said['bytes']:,} bytes")
