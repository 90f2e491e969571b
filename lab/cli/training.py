"""`lab TASK`: train a model on a task. Every field of the configurations is an option."""

import ast
import inspect
import json
import signal
import tokenize
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from lab.cli import rows
from lab.cli.answers import parse_assignments, report_failures, report_usage_errors
from lab.cli.older_runs import read_older_defaults
from lab.cli.options import find_kind, keep_ends, read, read_settings, resolve_spans, varies
from lab.config import ModelConfig, Runtime, TrainConfig, get_protocol_defaults
from tasks import TASKS

Part = TypeVar("Part", ModelConfig, TrainConfig, Runtime)
TASK_PANEL = "Tasks: train a model on one of them"
ROWS_DEPEND_ON = frozenset(
    ("seed", "protocol", "batch_size", "max_steps", "train_rows", "d_model", "n_heads")
)
"""Training options that also determine the rows, or the size of a construction's model."""


class LazyTasks(TyperGroup):
    """A command group that imports a task, and torch, only to run it."""

    listing = False

    def list_commands(self, ctx):
        """Return the tasks' names, then the other commands'."""
        return [*TASKS, *super().list_commands(ctx)]

    def get_command(self, ctx, cmd_name):
        """Return a command; that of a task is built now, without options if it is only listed."""
        if cmd_name not in TASKS:
            return super().get_command(ctx, cmd_name)
        return _build_task_command(cmd_name, options=not self.listing)

    def format_help(self, ctx, formatter):
        """Write the help, which imports no task."""
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


def _build_task_command(name: str, *, options: bool) -> Any:
    """Return the command of a task, with every field of the configurations as an option."""
    summary = _read_summary(TASKS.module(name))
    alone = typer.Typer(rich_markup_mode="rich" if options else None, add_completion=False)
    function = _build_trainer(name) if options else lambda: None
    alone.command(name, help=summary, rich_help_panel=TASK_PANEL)(function)
    return typer.main.get_command(alone)


def _read_summary(module: str) -> str:
    """Return the first paragraph of a module's docstring, without importing the module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with tokenize.open(spec.origin) as source:
        tokens = tokenize.generate_tokens(source.readline)
        docstring = next(token.string for token in tokens if token.type == tokenize.STRING)
    return ast.literal_eval(docstring).partition("\n\n")[0]


def _build_trainer(name: str) -> Callable[..., None]:
    """Return a function with every field of the task and the configurations in its signature."""
    task_class = TASKS[name]
    parts = {"Task": task_class, "Model": ModelConfig, "Training": TrainConfig, "Machine": Runtime}
    known = ", ".join(
        f"{option}={','.join(map(str, values))}"
        for option, values in task_class.evaluations.items()
    )
    annotations: dict[str, Any] = {
        "out": Annotated[
            Path | None,
            typer.Option(
                help="The run folder. A folder that holds an unfinished run resumes it.",
                show_default=f"runs/{name}-DIGEST",
            ),
        ],
        "as_json": Annotated[bool, typer.Option("--json", help="Print the result as JSON.")],
        "preset": Annotated[
            Literal["small", "published"] | None,
            typer.Option(
                help="Sizes by name: small is learned in minutes, published is the literature's. "
                "Options that you give take precedence.",
                rich_help_panel="Task",
            ),
        ],
        "evaluations": Annotated[
            list[str] | None,
            typer.Option(
                "--eval",
                metavar="OPTION=VALUE,…",
                help="Also evaluate at these values of one of the task's options.",
                show_default=known or False,
            ),
        ],
    }
    for panel, part in parts.items():
        hints = get_type_hints(part)
        for f in fields(part):
            if f.init:
                annotations[f.name] = _annotate_option(panel, hints[f.name], f, panel == "Task")
        if panel == "Task":
            annotations.update(rows.OPTIONS)

    def train(out: Path | None, as_json: bool, evaluations: list[str] | None, **given: Any) -> None:
        looking = {option: given.pop(option) for option in rows.OPTIONS}
        chosen = {key: value for key, value in given.items() if value not in (None, [])}
        with report_usage_errors():
            training = {
                f.name.replace("_", "-"): chosen.get(f.name)
                for part in (ModelConfig, TrainConfig, Runtime)
                for f in fields(part)
                if f.name not in ROWS_DEPEND_ON
            }
            action = rows.choose_action(looking, {"out": out, "eval": evaluations, **training})
        if action is None:
            _train(name, chosen, out, as_json, evaluations)
            return
        with report_usage_errors():
            task, config, _ = _configure(name, chosen)
        sizes = {size: chosen[size] for size in ("d_model", "n_heads") if size in chosen}
        rows.act(action, task, config.seed, looking, sizes=sizes, as_json=as_json)

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


def _annotate_option(panel: str, hint: Any, field: Any, of_task: bool) -> Any:
    """Return a Typer annotation for a dataclass field; None stands for "not given"."""
    default = None if field.default is MISSING else field.default
    shown = field.metadata.get("shown") or default
    kind, flag, metavar = find_kind(hint), None, None
    if of_task and varies(hint):
        # Several values, or a schedule, are read as text first.
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        metavar = "|".join(choices) if choices else f"<{kind.__name__}>,…"
        kind = str
    elif get_origin(kind) is dict:
        kind, flag, shown = list[str], "--option", None
    settings = typer.Option(
        *([flag] if flag else []),
        help=field.metadata.get("help", ""),
        rich_help_panel=panel,
        metavar=metavar,
        show_default=False if shown is None else str(shown),
    )
    return Annotated[kind | None, settings]


def _train(
    name: str,
    given: dict[str, Any],
    out: Path | None,
    as_json: bool,
    evaluations: list[str] | None,
) -> None:
    from lab.cli.tables.progress import show_progress
    from lab.cli.tables.results import build_evaluations_table, build_result_table, describe_ending
    from lab.training.experiment import carry_out
    from lab.training.generalisation import evaluate_settings, list_default_settings, vary_settings

    with report_usage_errors():
        run, runtime = describe_run(name, given, out)
        if evaluations is None:
            wanted = list_default_settings(run)
        else:
            wanted = read_settings(evaluations, TASKS[name])
            vary_settings(run, wanted)
    with report_failures(), show_progress(run) as (on_plan, on_row):
        before = run.read_result()
        result = carry_out(run, runtime, on_plan, on_row)
    found = []
    if wanted and not result["signal"]:
        with report_failures():
            found = evaluate_settings(
                run, wanted, runtime.device, lambda text: typer.echo(f"evaluating {text}", err=True)
            )
            result = run.read_result() or result
    if as_json:
        typer.echo(json.dumps(result))
    else:
        from rich.console import Console

        Console(markup=False).print(build_result_table(result))
        if found:
            Console(markup=False).print(build_evaluations_table(found))
        typer.echo(describe_ending(result))
    if result["signal"]:
        typer.echo(
            f"Run the same command again to resume, or `lab analyze {run.path}` for a report.",
            err=True,
        )
        raise typer.Exit(128 + signal.Signals[result["signal"]])
    from analysis.pages.kept import find_page
    from analysis.pages.report import write_quick

    with report_failures():
        report = (result == before and find_page(run)) or write_quick(run).page
    typer.echo(f"report: {report}", err=as_json)
    typer.echo(f"For every analysis: `lab analyze {run.path}`", err=True)


def describe_run(name: str, given: dict[str, Any], out: Path | None) -> tuple[Any, Runtime]:
    """Return the run and the machine settings that the given options describe.

    A given option takes precedence over the protocol's value, and that over the field's default.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    from lab.device import choose_device
    from lab.training.experiment import try_out
    from lab.training.runs import Run

    if given.get("model") and "stack" not in given:
        given = {**given, "stack": "UM*2"}
    if "options" in given:
        given = {**given, "options": parse_assignments(given["options"])}
    task, train, values = _configure(name, given, out)
    runtime = _build_config(Runtime, values)
    choose_device(runtime.device)
    run = Run(Path("runs"), task, _build_config(ModelConfig, values), train)
    try_out(run)
    return replace(run, path=out or Path("runs") / f"{name}-{run.digest}"), runtime


def _configure(
    name: str, given: dict[str, Any], out: Path | None = None
) -> tuple[Any, TrainConfig, dict[str, Any]]:
    """Return the task, its training configuration, and all values, the protocol's included.

    Where `out` holds a run of an older version of the protocol, its values are the defaults.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    task_class = TASKS[name]
    hints = get_type_hints(task_class)
    preset = task_class.presets[given["preset"]] if "preset" in given else None
    typed = {f.name: given[f.name] for f in fields(task_class) if f.init and f.name in given}
    options = {
        **(preset.options if preset else {}),
        **{
            name: read(name, value, hints[name]) if isinstance(value, str) else value
            for name, value in typed.items()
        },
    }
    d_model = given.get("d_model", ModelConfig.d_model)
    # The row length decides how many rows make a step, and so over how many rows a schedule goes.
    sizes = task_class(**keep_ends(options))
    protocol = given.get("protocol", "lab")
    defaults = get_protocol_defaults(protocol, sizes.seq_len, sizes.vocab_size, d_model)
    if protocol == "lab":
        defaults |= read_older_defaults(out, defaults)
    stack = {"stack": preset.stack} if preset and preset.stack else {}
    values = {**stack, **defaults, **given}
    train = _build_config(TrainConfig, values)
    task = task_class(**resolve_spans(options, train.max_steps, train.batch_size))
    return task, train, values


def _build_config(part: type[Part], values: dict[str, Any]) -> Part:
    """Build one configuration from the values that are its fields."""
    return part(**{f.name: values[f.name] for f in fields(part) if f.name in values})
