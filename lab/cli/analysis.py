"""`lab analyze` and `lab compare`: what runs learned."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lab.cli.command import list_keys
from lab.cli.messages import refuse, report_failures, report_usage_errors, say, say_if_changed
from lab.cli.output import AsJson, Force, check_output
from lab.cli.trust_option import Trust

if TYPE_CHECKING:
    from analysis.examination import Examination
    from lab.training.run import Run

GIBIBYTE = 2**30
MOST_MEMORY = 2**20
"""GiB that `--memory` may say: a pebibyte, more than any machine has."""


def analyze(
    path: Annotated[Path, typer.Argument(help="A run folder.")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run only this analysis; repeat for more. One of "
            f"{list_keys('analysis/__init__.py', 'ANALYSES')}.",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Rows of the test split to analyze.", show_default="by their length"),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            help="Analyze the weights of this step.", show_default="the newest checkpoint"
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Maximum memory to take.", show_default="what is free"),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also save every figure in this folder.")
    ] = None,
    kind: Annotated[
        Literal["png", "svg", "html"],
        typer.Option("--format", help="File format of the saved figures."),
    ] = "png",
    trust: Trust = False,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only analysis.json.")] = False,
) -> None:
    """Analyze what a run learned and how, and write analysis.json and report.html."""
    with report_failures(), ExitStack() as held:
        from analysis.base import NotApplicableError
        from analysis.examination import select_analyses
        from analysis.pages.export import BrowserError, save_all
        from analysis.pages.page import draw_figures
        from analysis.pages.report import write_both
        from analysis.pages.report_files import choose_work
        from lab.files import explain_write_errors
        from lab.training.run import Run

        run = Run.open(path, trust=trust)
        say_if_changed(run)
        held.enter_context(run.share_checkpoints())
        with report_usage_errors():
            select_analyses(only)
            _check_numbers(run, rows, step, memory)
        if figures is not None:
            if not str(figures).strip("."):
                raise refuse(f"figures={str(figures)!r}: must name a folder", 2)
            with explain_write_errors(figures):
                figures.mkdir(parents=True, exist_ok=True)
        chosen, rows = choose_work(run, only, rows, step)
        try:
            examination = _examine(run, chosen, rows, step, memory)
        except NotApplicableError as error:
            raise refuse(f"only={error}; it does not apply to this run", 2) from error
        files = write_both(run, examination, lambda note: say(note, err=True))
        saved = {}
        if figures is not None:
            saved = {figures / f"{n}.{kind}": f for n, f in draw_figures(examination).items()}
            with report_usage_errors():
                for file in saved:
                    check_output("figures", file, force)
            try:
                with explain_write_errors(figures):
                    save_all(saved)
            except BrowserError as error:
                raise refuse(error, 2) from error
        numbers = json.loads(files.numbers.read_bytes())
    if as_json:
        typer.echo(json.dumps(numbers, ensure_ascii=False))
        return
    for name, reason in examination.not_applicable.items():
        say(f"{name}: does not apply, {reason}", err=True)
    for file in saved:
        say(file)
    say(files.numbers)
    say(files.page)


def _check_numbers(run: "Run", rows: int | None, step: int | None, memory: float | None) -> None:
    """Validate the options.

    Raises:
        ValueError: naming option, value and bound.
    """
    if rows is not None and rows < 1:
        raise ValueError(f"rows={rows}: must be ≥ 1")
    if memory is not None and not 0 < memory <= MOST_MEMORY:
        raise ValueError(f"memory={memory}: must be > 0 and ≤ {MOST_MEMORY:,} GiB")
    if step is not None and step not in run.list_steps():
        known = ", ".join(map(str, run.list_steps()))
        raise ValueError(f"step={step}: must be one of {known}, whose weights are kept")


def _examine(
    run: "Run",
    only: Sequence[str] | None,
    rows: int | None,
    step: int | None,
    memory: float | None,
) -> "Examination":
    """Run the analyses with a progress bar."""
    from analysis.base import Subject
    from analysis.examination import examine, select_analyses
    from lab.cli.tables.progress import show_count

    with show_count(select_analyses(only), "analyzing") as on_begin:
        with report_usage_errors():
            limit = None if memory is None else int(memory * GIBIBYTE)
            subject = Subject.of(run, step=step, rows=rows, memory=limit, only=only)
        return examine(subject, only, on_begin)


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the page to this file, replacing an existing one.",
            show_default="compare.html, or compare-2.html where other runs are compared in it",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Rows of the test split to analyze.", show_default="by their length"),
    ] = None,
    trust: Trust = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs on one page: accuracy, mechanism, matrices, parameters, speed.

    Runs that differ in nothing but the seed are summarized, with intervals over seeds.
    """
    with report_failures(), report_usage_errors(), ExitStack() as held:
        from analysis.pages import comparison
        from lab.training.run import Run

        if rows is not None and rows < 1:
            raise ValueError(f"rows={rows}: must be ≥ 1")
        if out is not None:
            check_output("out", out, force)
        opened = [Run.open(path, trust=trust) for path in paths]
        for run in opened:
            say_if_changed(run)
            held.enter_context(run.share_checkpoints())
        out = out or comparison.choose_page(opened, rows)
        found = comparison.write_comparison(opened, out, rows)
    from analysis.plain import to_plain

    if as_json:
        typer.echo(json.dumps(to_plain(found), ensure_ascii=False))
        return
    from lab.cli.console import open_table_console
    from lab.cli.tables.runs import build_comparison_table

    open_table_console().print(build_comparison_table(to_plain(found)["runs"]))
    for seeds in found.seeds:
        say(f"{', '.join(seeds.names)}: {seeds.summary.describe()}")
    say(out)
