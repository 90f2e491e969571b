"""The `lab` command. Heavy imports live inside commands, so that `lab --help` is quick."""

import ast
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from lab.config import ModelConfig, Runtime, TrainConfig, protocol_defaults
from tasks import TASKS

Part = TypeVar("Part", ModelConfig, TrainConfig, Runtime)
TASK_PANEL = "Tasks: train a model on one"


class _LazyTasks(TyperGroup):
    """A group that knows its tasks by name, and imports one (and torch) only to run it."""

    listing = False

    def list_commands(self, ctx):
        return [*TASKS, *super().list_commands(ctx)]

    def get_command(self, ctx, cmd_name):
        if cmd_name not in TASKS:
            return super().get_command(ctx, cmd_name)
        return _task_command(cmd_name, options=not self.listing)

    def format_help(self, ctx, formatter):
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


app = typer.Typer(
    cls=_LazyTasks,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train small sequence models on synthetic tasks and see what they learned.",
)


@contextmanager
def _answering() -> Iterator[None]:
    """Answer an expected failure with one line: exit code 2 for usage, 1 otherwise."""
    from lab.runs import OutError, RunError
    from lab.train import DivergedError

    try:
        yield
    except (RunError, DivergedError) as error:
        raise _refusal(error, 2 if isinstance(error, OutError) else 1) from error


@contextmanager
def _usage() -> Iterator[None]:
    """Answer a bad value with one line and exit code 2."""
    try:
        yield
    except ValueError as error:
        raise _refusal(error, 2) from error


def _refusal(reason: object, code: int) -> typer.Exit:
    """Say why in one line, and return the exit with this code."""
    typer.echo(f"Error: {reason}", err=True)
    return typer.Exit(code)


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

    with _usage():
        run, runtime = _described(name, given, out)
    with _answering(), watching(run) as (on_plan, on_row):
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
    from analysis.report import write_report

    with _answering():
        report = write_report(run)
    typer.echo(f"report: {report}", err=as_json)


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
        given = {**given, "options": _assignments(given["options"])}
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


def _assignments(texts: list[str]) -> dict[str, str]:
    """Read ["S.d_state=64", …] as options by name."""
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"option={text}: must look like S.d_state=64")
        if name in options:
            raise ValueError(f"option={text}: {name}={options[name]} is given too; choose one")
        options[name] = value
    return options


@app.command()
def analyze(path: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write report.html: what a run learned, seen through its layers."""
    with _answering():
        from analysis.report import write_report
        from lab.runs import Run

        typer.echo(write_report(Run.open(path)))


@app.command()
def model(
    name: Annotated[str, typer.Argument(help="An architecture, or a stack: cheems, 'SE*7 IE'.")],
    size: Annotated[str | None, typer.Option(help="The paper's size: 320M or 1.3B.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    n_heads: Annotated[int | None, typer.Option(help="Heads of every mixer.")] = None,
    n_layers: Annotated[int | None, typer.Option(help="Blocks of an architecture.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Rows of the embedding table.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A layer's option: S.d_state=64.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the stack into this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what a model is made of: its blocks, total and active parameters, the paper's size.

    Nothing is allocated. Without a size of its own an architecture is shown at the paper's 320M.
    """
    from lab.anatomy import anatomy
    from lab.paper import against_paper, described

    given = {
        "d_model": d_model,
        "n_heads": n_heads,
        "n_layers": n_layers,
        "vocab_size": vocab_size,
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    with _usage():
        built, paper_size = described(name, size, chosen, _assignments(option or []))
    found = anatomy(built)
    own = bool(option) or vocab_size is not None
    compared = against_paper(name, paper_size, found.total, own) if paper_size else None
    if as_json:
        whole = {"name": name, "total": found.total, "active": found.active}
        typer.echo(json.dumps({**whole, "paper": compared and asdict(compared), **asdict(found)}))
    else:
        from rich.console import Console

        from lab.console import anatomy_table, count_line

        Console(markup=False, highlight=False).print(anatomy_table(found))
        typer.echo(count_line(found, compared))
    if figure is not None:
        from analysis.anatomy import page
        from lab.files import write, writing

        drawn = page(found, " ".join(filter(None, (name, paper_size))))
        with _answering(), writing(figure):
            write(figure, drawn)
        typer.echo(f"figure: {figure}", err=as_json)


@app.command()
def errata(
    rows: Annotated[list[str] | None, typer.Argument(help="Rows, e.g. R1 D3; all of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Run the paper's errata live: each printed reading fails as said, the meant one holds."""
    from lab.errata import run

    with _usage():
        found = run([row.upper() for row in rows] if rows else None)
    unconfirmed = []
    for erratum in found:
        if as_json:
            typer.echo(json.dumps({**asdict(erratum), "confirmed": erratum.confirmed}))
        else:
            from rich.console import Console

            from lab.console import erratum_table

            Console(markup=False, highlight=False).print(erratum_table(erratum))
        if not erratum.confirmed:
            unconfirmed.append(erratum.row)
    if unconfirmed:
        raise _refusal(f"not as the record says: {', '.join(unconfirmed)}", 1)


@app.command()
def runs(
    root: Annotated[Path, typer.Argument(help="Where to look, folders below included.")] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the runs below a folder: what was trained and how it ended."""
    from rich.console import Console

    from lab.runs import find, table

    with _answering():
        found = table(find(root))
    if as_json:
        typer.echo(found.write_ndjson(), nl=False)
    elif found.is_empty():
        typer.echo(f"no runs below {root}")
    else:
        from lab.console import runs_table

        Console(markup=False).print(runs_table(found))


@app.command()
def bench(
    only: Annotated[str | None, typer.Option(help="Run the one benchmark of this name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Measure every speed claim as a ratio, both sides in one run."""
    from lab.bench import BENCHMARKS
    from lab.peers import MissingPeerError

    if only is not None and only not in BENCHMARKS:
        raise _refusal(f"only={only}: must be one of {', '.join(BENCHMARKS)}", 2)
    missed = False
    for home in [BENCHMARKS[only]] if only else BENCHMARKS.values():
        module, _, function = home.partition(":")
        try:
            ratios = getattr(import_module(module), function)()
        except MissingPeerError as error:
            raise _refusal(error, 2) from error
        for ratio in ratios:
            missed |= not ratio.reached
            typer.echo(json.dumps(asdict(ratio)) if as_json else str(ratio))
    if missed:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    # Threads of OpenMP that wait long in a loop take the time of those they wait for, where a
    # machine is shared; asleep at once they wake late, where it is not (LOG.md has the numbers).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # --model MODULE:CLASS is looked for in the user's folder, as `python -m` would.
    sys.path.insert(0, os.getcwd())
    app()


if __name__ == "__main__":
    sys.exit(main())
