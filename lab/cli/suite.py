"""Commands without a run: tasks, mixers, model, errata, verify, bench."""

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import MISSING, asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import typer

from lab.api.options import make_force
from lab.bench import BENCHMARKS, ON_GPU
from lab.cli.command import takes
from lab.cli.messages import refuse, report_failures, report_usage_errors
from lab.files import check_output
from tasks.bounds import MAX_SEQ_LEN, check_choice, check_range, option

TESTS = Path(__file__).parents[2] / "tests" / "property"
FAILED = 1
"""pytest's exit code when a test has failed."""
LINES = "Print one JSON object per line."


@dataclass(frozen=True)
class TasksOptions:
    """`lab tasks` lists all tasks, so there is nothing to choose."""


@takes(TasksOptions, json=LINES)
def tasks(options: TasksOptions, as_json: bool) -> None:
    """List the tasks: what each tests, its sizes, chance, and how long a row takes to make here."""
    from lab.suite.survey import survey_tasks

    if as_json:
        for entry in survey_tasks():
            typer.echo(json.dumps(asdict(entry), ensure_ascii=False))
        return
    from lab.cli.tables.suite import build_suite_table
    from lab.console import open_table_console

    console = open_table_console()
    console.print(build_suite_table(list(survey_tasks()), console.width))


@dataclass(frozen=True, kw_only=True)
class MixersOptions:
    """Which mixers to list, and the sizes at which their states are measured."""

    name: str | None = option(None, "Show this one and its options.", argument=True)
    d_model: int = option(64, "Width at which states are measured.")
    n_heads: int = option(1, "Heads at which states are measured.")


@takes(MixersOptions, json=LINES)
def mixers(options: MixersOptions, as_json: bool) -> None:
    """List the mixers: what each is, the bytes of its state for one row, and its options."""
    from lab.cli.tables.suite import build_mixers_table
    from lab.console import open_table_console
    from lab.models.mixers import MIXERS, summarize_mixers

    name, d_model, n_heads = options.name, options.d_model, options.n_heads
    with report_usage_errors():
        if name is not None:
            check_choice("name", name, MIXERS)
        found = list(summarize_mixers(d_model, n_heads, MIXERS if name is None else (name,)))
    if as_json:
        for summary in found:
            typer.echo(json.dumps(asdict(summary), ensure_ascii=False))
        return
    open_table_console().print(build_mixers_table(found))
    for summary in found:
        if name is None:
            typer.echo(f"\n{summary.name}: {', '.join(summary.options)}")
        else:
            for key, known in summary.options.items():
                typer.echo(_describe_option(key, known))
    word = found[0].name if name is not None else "gdn"
    typer.echo(
        f"\nState: bytes in fp32 for one row at d_model={d_model}, n_heads={n_heads}. "
        f"In a stack: --stack '{word}+M*2'; an option: --option {word}.NAME=VALUE."
    )


def _describe_option(name: str, about: dict[str, Any]) -> str:
    values = "".join(
        f" | {value}" for value in about.get("values", ()) if value != about["default"]
    )
    default = about["default"]
    return f"{name} = {str(default).lower() if default in (None, True, False) else default}{values}"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model to show."""

    name: str = option(
        MISSING,
        "A stack, e.g. 'SE*7 IE', or an architecture, e.g. cheems; an unknown name lists them.",
        argument=True,
    )
    size: Literal["320M", "1.3B"] | None = option(None, "A size that the paper gives.")
    d_model: int | None = option(None, "Width of the residual stream.")
    n_heads: int | None = option(None, "Number of heads of every mixer.")
    n_layers: int | None = option(None, "Number of blocks, for an architecture.")
    vocab_size: int | None = option(None, "Rows of the embedding table.")
    seq_len: int = option(2048, "Tokens of the row whose state in decoding is measured.")
    model: str | None = option(
        None, "MODULE:CLASS of your own mixer; the letter U of the stack stands for it."
    )
    options: tuple[str, ...] = option(
        (), "An option of a layer, e.g. S.d_state=64.", flag="--option", metavar="NAME=VALUE"
    )
    figure: Path | None = option(None, "Draw the stack into this HTML file.")
    force: bool = make_force()


@takes(ModelOptions, json="Print one JSON object.")
def model(options: ModelOptions, as_json: bool) -> None:
    """Show a model's blocks, parameters and state in decoding, next to the paper's numbers.

    No weights are allocated. An architecture is shown at the paper's 320M unless you give a size.
    """
    from lab.api.settings import parse_assignments
    from lab.models.anatomy import dissect
    from lab.models.paper_sizes import build_on_meta, compare_with_paper

    name, figure = options.name, options.figure
    sizes = ("d_model", "n_heads", "n_layers", "vocab_size")
    chosen = {size: value for size in sizes if (value := getattr(options, size)) is not None}
    with report_usage_errors():
        check_range("seq_len", options.seq_len, 1, MAX_SEQ_LEN)
        if figure is not None and figure.suffix.lower() != ".html":
            raise ValueError(f"figure={figure}: must end in .html")
        if figure is not None:
            check_output("figure", figure, options.force)
        built, paper_size = build_on_meta(
            name, options.size, chosen, parse_assignments(options.options), options.model
        )
    found = dissect(built, options.seq_len)
    own = bool(options.options) or options.vocab_size is not None
    compared = compare_with_paper(name, paper_size, found.total, own) if paper_size else None
    if as_json:
        whole = {"name": name, "total": found.total, "active": found.active}
        typer.echo(json.dumps({**whole, "paper": compared and asdict(compared), **asdict(found)}))
    else:
        from lab.cli.tables.suite import build_anatomy_table, describe_totals
        from lab.console import open_table_console

        open_table_console().print(build_anatomy_table(found))
        typer.echo(describe_totals(found, compared))
    if figure is not None:
        from analysis.figures.theme import add_title
        from analysis.pages.page import render_figure
        from analysis.run.anatomy import StackAnatomy
        from lab.files import explain_write_errors, write

        drawn = StackAnatomy.of(found)
        title = " ".join(filter(None, (name, paper_size)))
        page = render_figure(add_title(drawn.figure(), title, drawn.says))
        with report_failures(), explain_write_errors(figure):
            write(figure, page)
        typer.echo(f"figure: {figure}", err=as_json)


@dataclass(frozen=True, kw_only=True)
class ErrataOptions:
    """Which errata to run."""

    rows: tuple[str, ...] = option((), "Errata to run, e.g. R1 D3.", "all", argument=True)


@takes(ErrataOptions, json=LINES)
def errata(options: ErrataOptions, as_json: bool) -> None:
    """Run the paper's errata: show that each printed formula fails and the intended one holds."""
    from lab.errata import run

    with report_usage_errors():
        found = run([row.upper() for row in options.rows] if options.rows else None)
    unconfirmed = []
    for erratum in found:
        if as_json:
            typer.echo(json.dumps({**asdict(erratum), "confirmed": erratum.confirmed}))
        else:
            from lab.cli.tables.suite import build_erratum_table
            from lab.console import open_table_console

            open_table_console().print(build_erratum_table(erratum))
        if not erratum.confirmed:
            unconfirmed.append(erratum.row)
    if unconfirmed:
        raise refuse(f"these errata did not come out as recorded: {', '.join(unconfirmed)}", 1)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """How long to try."""

    minutes: float = option(10.0, "Stop after this many minutes.")


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Test the package's properties on ever new random examples, for a limited time.

    Each round tries 50 examples of every property. A property that fails is shown with the smallest
    example, and ends the command with code 1. This needs a checkout of the project, because its
    tests are not part of an installed package.
    """
    minutes = options.minutes
    if not 0 < minutes < float("inf"):
        raise refuse(f"minutes={minutes}: must be > 0", 2)
    if not TESTS.is_dir():
        raise refuse(f"{TESTS} does not exist: lab verify needs a checkout with its tests", 2)
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise refuse(f"{' and '.join(missing)} must be installed, as the extra dev does", 2)
    words = ("-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=random")
    # -P: files in the working directory must not take the place of packages.
    command = [sys.executable, "-P", "-m", "pytest", str(TESTS), *words]
    end, rounds = time.monotonic() + 60 * minutes, 0
    while (left := end - time.monotonic()) > 0:
        process = subprocess.Popen(command)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()  # pytest would answer an interrupt with a traceback
            if process.wait() != FAILED:
                typer.echo()  # pytest's dots have no end of line
                break
            code = FAILED
        if code:
            raise typer.Exit(1)
        rounds += 1
    tried = f"; rounds completed: {rounds}" if rounds else ", but not every property was tried"
    typer.echo(f"no property failed in {minutes:g} minute{'s' * (minutes != 1)}{tried}")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure, and how to print it."""

    only: tuple[str, ...] = option(
        (),
        f"Run only this benchmark; repeat for more: {', '.join(BENCHMARKS)}. {', '.join(ON_GPU)} "
        "needs a GPU.",
        metavar="NAME",
    )
    markdown: bool = option(False, "Print a table in Markdown.")


@takes(BenchOptions, json=LINES)
def bench(options: BenchOptions, as_json: bool) -> None:
    """Measure every speed claim as a ratio of two times, both taken in the same run.

    Some are compared with a bound.
    """
    from torch.cuda import is_available

    from lab.machine import choose_device, describe_device
    from lab.peers import MissingPeerError

    only = options.only
    here = [name for name in BENCHMARKS if is_available() or name not in ON_GPU]
    with report_usage_errors():
        if as_json and options.markdown:
            raise ValueError("--json and --markdown: choose one")
        for name in only:
            check_choice("only", name, BENCHMARKS)
            if name not in here:
                raise ValueError(f"only={name}: needs a GPU, and this machine has none")
    if not only and len(here) < len(BENCHMARKS):
        typer.echo(f"No GPU, so these are left out: {', '.join(ON_GPU)}", err=True)
    if options.markdown:
        typer.echo(
            f"{describe_device(choose_device('auto'))}\n\n"
            "| measured | the lab's | the other's, or a bound | unit | ratio | promised | note |\n"
            "|---|---|---|---|---|---|---|"
        )
    missed = False
    for name in dict.fromkeys(only or here):
        try:
            for ratio in import_module(f"lab.bench.{name}").measure():
                missed |= not ratio.reached
                if options.markdown:
                    typer.echo(ratio.to_markdown())
                else:
                    typer.echo(json.dumps(asdict(ratio)) if as_json else str(ratio))
        except MissingPeerError as error:
            raise refuse(error, 2) from error
    if missed:
        raise typer.Exit(1)
