"""`lab certify`: test any PyTorch module against the laws."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lab.certification import RefusedError, Request, certify_in_child, count_outcomes
from lab.certify_settings import QUICK, THOROUGH, CertifySettings, read_value
from lab.cli.command import AsJson, Force
from lab.cli.messages import refuse, report_usage_errors, say
from lab.files import check_output
from lab.machine import measure_free_memory

GIBIBYTE = 2**30
MEMORY_SHARE = 0.75
"""Share of the machine's free memory that a target may take by default."""
LEAST_MEMORY = 1
"""GiB; Python and torch need a quarter of it."""
SECONDS, QUICK_SECONDS, THOROUGH_SECONDS = 60.0, 15.0, 900.0
"""Time after which a law is stopped."""
TIME_SHARE = 8
"""A law should take at most 1/8 of that time under each condition."""


def certify(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:factory; a factory is a class or a function that returns a module."
        ),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument of the factory; may be repeated."),
    ] = None,
    reads: Annotated[
        Literal["hidden", "tokens"] | None,
        typer.Option(
            "--input",
            help="What the module reads: vectors (hidden) or token ids.",
            show_default="found by trying",
        ),
    ] = None,
    d_model: Annotated[
        int | None,
        typer.Option(help="Width of the module's inputs.", show_default="found by trying"),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Size of the vocabulary, if the module reads tokens.",
            show_default="found by trying",
        ),
    ] = None,
    layout: Annotated[
        Literal["btd", "tbd", "bdt"] | None,
        typer.Option(
            help="Order of the axes of inputs and outputs.", show_default="found by trying"
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|INDEX", help="Which output holds the sequence.", show_default="the first"
        ),
    ] = None,
    relative: Annotated[
        bool | None,
        typer.Option(
            "--relative/--absolute",
            help="Whether outputs should depend only on differences of positions.",
            show_default="recognised by class",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="7,64,200",
            help="Sequence lengths to try.",
            show_default="1 to 130, and around the module's chunks",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(help="Number of rows of each input.")
    ] = CertifySettings.batch,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = CertifySettings.seed,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LAW", help="Try only this law; repeat for more."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Test less thoroughly; takes seconds.")
    ] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Test longer inputs and more seeds; takes minutes.")
    ] = False,
    compiler: Annotated[
        Literal["aot_eager", "inductor", "none"] | None,
        typer.Option(help="Backend of torch.compile.", show_default="aot_eager; none with --quick"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Maximum memory that the module may take on a CPU.",
            show_default="3/4 of what is free",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Stop a law after this many seconds, not counting waits for a processor.",
            show_default=(
                f"{SECONDS:g}; {QUICK_SECONDS:g} with --quick, {THOROUGH_SECONDS:g} with --thorough"
            ),
        ),
    ] = None,
    snippets: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For each law that fails, write a program that shows it: DIR/LAW.py.",
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Save each law's error relative to its bound as this .html, .png or .svg file."
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Test a module against every law: is it causal, are rows independent, does decoding agree, …

    The module runs in its own process, so a crash, a hang or too much memory leaves only that law
    undecided.

    Exit code 0: no law fails. 1: a law fails. 2: no law could be decided.
    """
    from lab.api.settings import parse_assignments
    from lab.files import explain_write_errors

    with _report_refusals(target, as_json):
        base, limit = _choose_base(quick, thorough)
        limit = limit if seconds is None else _check_seconds(seconds)
        settings = replace(
            base,
            d_model=d_model,
            lengths=base.lengths if lengths is None else _read_lengths(lengths),
            batch=batch,
            seed=seed,
            options={n: read_value(v) for n, v in parse_assignments(option or []).items()},
            calling={
                "input": reads,
                "vocab_size": vocab_size,
                "layout": layout,
                "output": int(output) if output and output.isdecimal() else output,
                "relative": relative,
            },
            seconds=min(base.seconds, limit / TIME_SHARE),
            compiler=_choose_compiler(compiler, quick),
            device=device,
        )
        request = Request(target, settings, only, choose_memory(memory), limit)
        _check_figure(figure, force)
        if snippets is not None:
            with explain_write_errors(snippets):
                snippets.mkdir(parents=True, exist_ok=True)
    found = _certify(request, as_json)
    failing = [law for law in found["laws"] if law["verdict"] == "fails"]
    programs = {_name_file(law): law["snippet"] for law in failing if law["snippet"]}
    if snippets is not None:
        _write_programs(snippets, programs, force)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, allow_nan=False))
    else:
        _print_summary(found, snippets, list(programs))
    if figure is not None:
        _draw(found, figure)
        say(f"figure: {figure}", err=as_json)
    if not any(law["verdict"] in ("holds", "fails") for law in found["laws"]):
        law = found["laws"][0]
        raise refuse(f"no law could be decided; {law['law']}: {law['evidence']}", 2)
    if failing:
        raise typer.Exit(1)


@contextmanager
def _report_refusals(target: str, as_json: bool) -> Iterator[None]:
    """Report a bad value in one line, and as JSON if that was asked for."""
    from lab.files import RunError

    try:
        yield
    except (ValueError, RunError) as error:
        raise _refuse(error, target, as_json) from error


def _refuse(reason: object, target: str, as_json: bool) -> typer.Exit:
    if as_json:
        typer.echo(json.dumps({"target": target, "refused": str(reason)}))
    return refuse(reason, 2)


def _certify(request: Request, as_json: bool) -> dict[str, Any]:
    """Return the certificate; without JSON, print each verdict as it arrives."""
    from lab.cli.tables.certify import build_law_table, show_progress
    from lab.console import open_table_console

    output = open_table_console(quiet=as_json)
    try:
        with show_progress() as (on_laws, on_begin, clear):

            def print_notes(found: dict[str, Any]) -> None:
                on_laws(found["laws"])
                for note in found["notes"]:
                    output.print(note, style="dim")

            def print_verdict(law: dict[str, Any]) -> None:
                clear()
                output.print(build_law_table(law))

            return certify_in_child(request, print_notes, on_begin, print_verdict)
    except RefusedError as error:
        raise _refuse(error, request.target, as_json) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def _print_summary(found: dict[str, Any], snippets: Path | None, programs: list[str]) -> None:
    say(f"{count_outcomes(found)}; {found['seconds']:.1f} s")
    if programs and snippets is None:
        say("Add --snippets DIR to get a program that shows each failure.")
    if snippets is not None:
        for name in programs:
            say(f"PYTHONPATH=. python {snippets / name}")


def _read_lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"lengths={text}: must be whole numbers, e.g. 7,64,200") from None


def _choose_compiler(compiler: str | None, quick: bool) -> str | None:
    if compiler is None:
        return None if quick else "aot_eager"
    return None if compiler == "none" else compiler


def choose_memory(memory: float | None) -> float:
    """Return the GiB that a target's process may take: those given, or a share of what is free.

    Raises:
        ValueError: for less than Python and torch need.
    """
    if memory is None:
        return max(float(LEAST_MEMORY), MEMORY_SHARE * measure_free_memory() / GIBIBYTE)
    if not LEAST_MEMORY <= memory < float("inf"):
        raise ValueError(f"memory={memory}: must be ≥ {LEAST_MEMORY} GiB")
    return memory


def _choose_base(quick: bool, thorough: bool) -> tuple[CertifySettings, float]:
    """Return the settings that options change, and the time after which a law is stopped."""
    if quick and thorough:
        raise ValueError("--quick and --thorough exclude each other")
    if thorough:
        return THOROUGH, THOROUGH_SECONDS
    return (QUICK, QUICK_SECONDS) if quick else (CertifySettings(), SECONDS)


def _check_seconds(seconds: float) -> float:
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds={seconds}: must be > 0")
    return seconds


def _check_figure(figure: Path | None, force: bool) -> None:
    if figure is None:
        return
    from analysis.pages.export import check_figure

    check_figure(figure, force)
    if not figure.parent.is_dir():
        raise ValueError(f"figure={figure}: {figure.parent} is not a folder")


def _name_file(law: dict[str, Any]) -> str:
    return re.sub(r"\W+", "-", law["law"]) + ".py"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Report a file that cannot be written with one line and exit code 2."""
    from lab.files import RunError, explain_write_errors

    try:
        with explain_write_errors(path):
            yield
    except RunError as error:
        raise refuse(error, 2) from error


def _write_programs(folder: Path, programs: dict[str, str], force: bool) -> None:
    from lab.files import write

    with report_usage_errors():
        for name in programs:
            check_output("snippets", folder / name, force)
    with _writing(folder):
        for name, program in programs.items():
            write(folder / name, program)


def _draw(found: dict[str, Any], path: Path) -> None:
    from analysis.pages.certificate import save
    from analysis.pages.export import BrowserError

    try:
        with _writing(path):
            save(found, path)
    except BrowserError as error:
        raise refuse(error, 2) from error
