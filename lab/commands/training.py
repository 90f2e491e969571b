"""`lab TASK`: train a model on a task. Every field of the configurations is an option."""

import ast
import inspect
import json
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from lab.commands.answers import answering, assignments, usage
from lab.config import ModelConfig, Runtime, TrainConfig, protocol_defaults
from tasks import TASKS

Part = TypeVar("Part", ModelConfig, TrainConfig, Runtime)
TASK_PANEL = "Tasks: train a model on one"


class LazyTasks(TyperGroup):
    """A group that knows its tasks by name, and imports one (and torch) only to run it."""

    listing = False

    def list_commands(self, ctx):
        """Return the tasks' names, then the other commands'."""
        return [*TASKS, *super().list_commands(ctx)]

    def get_command(self, ctx, cmd_name):
        """Return a command; a task's is made now, without its options for a mere list."""
        if cmd_name not in TASKS:
            return super().get_command(ctx, cmd_name)
        return _task_command(cmd_name, options=not self.listing)

    def format_help(self, ctx, formatter):
        """Write the help, for which no task is imported."""
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


def _task_command(name: str, *, options: bool) -> Any:
    """Return the command of a task: every field of the configurations is an option of it."""
    summary = _summary(TASKS.module(name))
    alone = typer.Typer(rich_markup_mode=None if not options else "rich")
    function = _trainer(name) if options else lambda: None
    alone.command(name, help=summary, rich_help_panel=TASK_PANEL)(function)
    return typer.main.get_command(alone)


def _summary(module: str) -> str:
    """Return the first paragraph of a module's docstring, without importing the module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
    return text.partition("\n\n")[0]


def _trainer(name: str) -> Callable[..., None]:
    """Return a function whose signature has every field of the task and of the configurations."""
    task_class = TASKS[name]
    parts = {"Task": task_class, "Model": ModelConfig, "Training": TrainConfig, "Machine": Runtime}
    out_help = "The run folder; the same again resumes."
    out_option = typer.Option(help=out_help, show_default=f"runs/{name}-DIGEST")
    annotations: dict[str, Any] = {
        "out": Annotated[Path | None, out_option],
        "as_json": Annotated[bool, typer.Option("--json", help="Print result.json alone.")],
    }
    for panel, part in parts.items():
        hints = get_type_hints(part)
        annotations |= {f.name: _option(panel, hints[f.name], f) for f in fields(part)}

    def train(out: Path | None, as_json: bool, **given: Any) -> None:
        chosen = {key: value for key, value in given.items() if value not in (None, [])}
        _train(name, chosen, out, as_json)

    train.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if parameter == "as_json" else None,
                annotation=annotation,
            )
            for parameter, annotation in annotations.items()
        ]
    )
    train.__annotations__ = annotations
    return train


def _option(panel: str, hint: Any, field: Any) -> Any:
    """Return a Typer annotation for a dataclass field; None stands for "not given"."""
    shown = field.metadata.get("shown") or field.default
    flag = None
    kind: Any = hint
    if get_origin(hint) in (Union, UnionType):
        kind = str if _several(hint) else next(m for m in get_args(hint) if m is not NoneType)
    if get_origin(hint) is dict:
        kind, flag, shown = list[str], "--option", None
    settings = typer.Option(
        *([flag] if flag else []),
        help=field.metadata.get("help", ""),
        rich_help_panel=panel,
        show_default=False if shown is None else str(shown),
    )
    return Annotated[kind | None, settings]


def _several(hint: Any) -> bool:
    """Whether an annotation takes several numbers: "4,16,64" on the command line."""
    return any(get_origin(member) is tuple for member in get_args(hint))


def _train(name: str, given: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from lab.console import ending, result_table, watching
    from lab.experiment import carry_out

    with usage():
        run, runtime = _described(name, given, out)
    with answering(), watching(run) as (on_plan, on_row):
        result = carry_out(run, runtime, on_plan, on_row)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        from rich.console import Console

        Console(markup=False).print(result_table(result))
        typer.echo(ending(result))
    if result["signal"]:
        typer.echo(f"The same command resumes; `lab analyze {run.path}` reports.", err=True)
        raise typer.Exit(128 + signal.Signals[result["signal"]])
    from analysis.report import write_quick

    with answering():
        report = write_quick(run)
    typer.echo(f"report: {report}", err=as_json)
    typer.echo(f"`lab analyze {run.path}` looks deeper.", err=True)


def _described(name: str, given: dict[str, Any], out: Path | None) -> tuple[Any, Runtime]:
    """Return the run and the machine settings that the given options describe.

    An option given goes before the protocol's value, and that before the field's default.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    from lab.device import choose_device
    from lab.experiment import try_out
    from lab.runs import Run

    task_class = TASKS[name]
    known = {f.name for f in fields(task_class)}
    hints = get_type_hints(task_class)
    options: dict[str, Any] = {
        key: _numbers(key, value) if _several(hints[key]) else value
        for key, value in given.items()
        if key in known
    }
    task = task_class(**options)
    if given.get("model") and "stack" not in given:
        given = {**given, "stack": "UM*2"}
    if "options" in given:
        given = {**given, "options": assignments(given["options"])}
    d_model = given.get("d_model", ModelConfig.d_model)
    values = {
        **protocol_defaults(given.get("protocol", "lab"), task.seq_len, d_model),
        **given,
    }
    runtime = _part(Runtime, values)
    choose_device(runtime.device)
    run = Run(Path("runs"), task, _part(ModelConfig, values), _part(TrainConfig, values))
    try_out(run)
    return replace(run, path=out or Path("runs") / f"{name}-{run.digest()}"), runtime


def _part(part: type[Part], values: dict[str, Any]) -> Part:
    """Build one configuration from the values that are its fields."""
    return part(**{f.name: values[f.name] for f in fields(part) if f.name in values})


def _numbers(name: str, value: str) -> int | tuple[int, ...]:
    """Read "4,16,64" as a tuple and "16" as a number."""
    try:
        return tuple(map(int, value.split(","))) if "," in value else int(value)
    except ValueError:
        raise ValueError(f"{name}={value}: must be a whole number, or several: 4,16,64") from None
