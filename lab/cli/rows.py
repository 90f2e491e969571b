"""`lab TASK --show | --audit | --export`: look at the rows of a task without training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lab.cli.figures import make_figure_option
from lab.cli.messages import report_failures, report_usage_errors
from lab.cli.output import check_output
from lab.cli.row_actions import audit_rows, export_rows, show_rows

if TYPE_CHECKING:
    from tasks.base import Task

Action = Literal["show", "audit", "export"]
PANEL = "Rows, shown without training"
MOST_SHOWN = 64

OPTIONS: dict[str, Any] = {
    "show": Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Print N rows (1 to {MOST_SHOWN}), coloured by role.",
            rich_help_panel=PANEL,
        ),
    ],
    "whole": Annotated[
        bool | None,
        typer.Option("--whole", help="Show long rows without folding them.", rich_help_panel=PANEL),
    ],
    "figure": Annotated[
        Path | None,
        make_figure_option("a drawing of the rows that --show prints", PANEL),
    ],
    "force": Annotated[
        bool | None,
        typer.Option(
            "--force", help="Overwrite a file that the lab did not make.", rich_help_panel=PANEL
        ),
    ],
    "audit": Annotated[
        bool | None,
        typer.Option(
            "--audit",
            help="Print the scores of chance, of shortcuts, of the oracle, and of models with "
            "weights set by hand.",
            rich_help_panel=PANEL,
        ),
    ],
    "export": Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.parquet",
            help="Write rows to a file, together with the settings that made them.",
            rich_help_panel=PANEL,
        ),
    ],
    "rows": Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of rows to export.", rich_help_panel=PANEL),
    ],
    "split": Annotated[
        str | None,
        typer.Option(
            help="Split of the rows: train, validation, test, …",
            show_default="train; test with --audit",
            rich_help_panel=PANEL,
        ),
    ],
}
"""Options of every task's command besides those for training; None stands for "not given"."""


def choose_action(given: dict[str, Any], training: dict[str, Any]) -> Action | None:
    """Return what to do with rows, or None if a model is to be trained.

    Args:
        given: values of `OPTIONS`.
        training: values of options that only apply to training, by flag.

    Raises:
        ValueError: for options that contradict each other, or numbers out of bounds.
    """
    actions: list[Action] = [a for a in ("show", "audit", "export") if given[a] is not None]
    if len(actions) > 1:
        raise ValueError(f"{' and '.join(f'--{a}' for a in actions)}: choose one")
    action = actions[0] if actions else None
    needs = {"whole": "show", "figure": "show", "force": "show", "rows": "export"}
    for option, needed in needs.items():
        if given[option] is not None and action != needed:
            raise ValueError(f"--{option}: works only with --{needed}")
    if action is None:
        if given["split"] is not None:
            raise ValueError("--split: works only with --show, --audit or --export")
        return None
    for flag, value in training.items():
        if value is not None:
            raise ValueError(f"--{flag}: has no effect with --{action}, which trains nothing")
    if action == "show" and not 1 <= given["show"] <= MOST_SHOWN:
        raise ValueError(f"show={given['show']}: must be in 1 … {MOST_SHOWN}")
    if given["figure"] is not None:
        check_output("figure", given["figure"], bool(given["force"]))
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
    """Show, audit or export a task's rows.

    Args:
        action: which of the three.
        task: the task that generates the rows.
        seed: the seed of the rows.
        given: values of `OPTIONS`.
        sizes: d_model and n_heads of the models set by hand, if given.
        as_json: print only JSON.
    """
    split = given["split"] or ("test" if action == "audit" else "train")
    with report_failures():
        with report_usage_errors():
            task.batch(split=split, size=1, seed=seed)
        if action == "show":
            whole, figure = bool(given["whole"]), given["figure"]
            count = given["show"]
            show_rows(task, split, seed, count, whole=whole, figure=figure, as_json=as_json)
        elif action == "audit":
            audit_rows(task, split, seed, sizes=sizes, as_json=as_json)
        else:
            export_rows(task, split, seed, given["rows"], given["export"], as_json=as_json)
