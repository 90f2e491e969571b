"""`lab resume`: go on with a run, up to a later limit if one is given."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from lab.cli.command import set_parameters
from lab.cli.messages import report_failures, report_usage_errors, say_if_changed
from lab.cli.training import annotate_option
from lab.cli.trust_option import Trust
from lab.config import Runtime

OPTIONS: dict[str, Any] = {
    "path": Annotated[Path, typer.Argument(help="A run folder.")],
    "max_steps": Annotated[
        int | None,
        typer.Option(
            help="New limit of steps, counting those already taken.",
            show_default="the run's own",
        ),
    ],
    **{
        f.name: annotate_option("Machine", get_type_hints(Runtime)[f.name], f, False)
        for f in fields(Runtime)
    },
    "trust": Trust,
    "as_json": Annotated[bool, typer.Option("--json", help="Print the result as JSON.")],
}


def resume(path: Path, max_steps: int | None, trust: bool, as_json: bool, **machine: Any) -> None:
    """Go on with an unfinished run, or with one that reached its limit of steps, up to a later one.

    A schedule that ends at the limit, such as cosine, follows the curve of the later limit from
    here on.
    """
    from lab.cli.outcome import show_finished, train_and_report
    from lab.training.run import Run

    with report_failures(), report_usage_errors():
        run = Run.open(path, trust=trust)
        say_if_changed(run)
        runtime = Runtime(**{name: v for name, v in machine.items() if v is not None})
        if max_steps is not None:
            run = run.set_limit(max_steps)
        if show_finished(run, {}, as_json):
            return
        from lab.training.loggers import check_installed

        check_installed(runtime.log)
    train_and_report(run, runtime, {}, as_json)


set_parameters(resume, OPTIONS, {"path": inspect.Parameter.empty, "trust": False, "as_json": False})
