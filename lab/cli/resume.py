"""`lab resume`: go on with a run, up to a later limit if one is given."""

import inspect
from dataclasses import fields
from functools import partial
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
    """Go on with an unfinished run, or extend a run to a later limit of steps.

    An extended run ends with the same bits as a run that had the later limit from the start. A
    cosine schedule, however, is stretched: from here on the run follows the curve of the later
    limit.
    """
    from lab.cli.outcome import show_finished, train_and_report
    from lab.machine.spinning import choose_wait
    from lab.training.run_folder import RunFolder

    with report_failures():
        folder = RunFolder.open(path, trust=trust)
        say_if_changed(folder)
    if max_steps is None and show_finished(folder, {}, as_json):
        return
    choose_wait(partial(typer.echo, err=True))
    from lab.machine.device import choose_device
    from lab.training.extension import check_limit, describe_effects, explain_ending, extend
    from lab.training.loggers import check_installed
    from lab.training.runs import Run

    with report_failures():
        run = Run.of(folder)
        with report_usage_errors():
            runtime = Runtime(**{name: v for name, v in machine.items() if v is not None})
            choose_device(runtime.device)
            check_installed(runtime.log)
            if max_steps is not None:
                check_limit(run, max_steps)
                final = explain_ending(run)
                if final:
                    typer.echo(f"{final}; a later limit changes nothing", err=True)
                else:
                    effects = list(describe_effects(run, max_steps))
                    run = extend(run, max_steps)
                    for effect in effects:
                        typer.echo(effect, err=True)
    train_and_report(run, runtime, {}, as_json)


set_parameters(resume, OPTIONS, {"path": inspect.Parameter.empty, "trust": False, "as_json": False})
