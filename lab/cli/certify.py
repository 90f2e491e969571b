"""`lab certify`: what holds of a module, ours or foreign."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lab.cli.answers import parse_assignments, refuse, report_usage_errors

GIBIBYTE = 2**30
SHARE = 0.75
"""Of the machine's free memory, the most that a target may take unless it is told."""
LEAST_MEMORY = 1
"""GiB: what Python and torch want is a quarter of it."""
SECONDS, QUICK_SECONDS = 60.0, 15.0
"""After which a law is stopped."""


def certify(
    target: Annotated[str, typer.Argument(help="package.module:factory, or a class, a function.")],
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An argument of the factory.")
    ] = None,
    reads: Annotated[
        Literal["hidden", "tokens"] | None,
        typer.Option("--input", help="Vectors or token ids.", show_default="found by trying"),
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(help="Width of what it reads.", show_default="found by trying")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Of one that reads tokens.", show_default="looked for")
    ] = None,
    layout: Annotated[
        Literal["btd", "tbd", "bdt"] | None,
        typer.Option(help="Order of its axes.", show_default="found by trying"),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|INDEX", help="Which output is the sequence.", show_default="the first"
        ),
    ] = None,
    relative: Annotated[
        bool | None,
        typer.Option(
            "--relative/--absolute",
            help="Whether it claims that only differences of positions count.",
            show_default="as recognised",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="7,64,200", help="Of the probes.", show_default="such as break things"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows of a probe.")] = 3,
    seed: Annotated[int, typer.Option(help="Of weights and probes.")] = 0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="LAW", help="A law; again for more than one.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Try less, in seconds.")] = False,
    compiler: Annotated[
        Literal["aot_eager", "inductor", "none"] | None,
        typer.Option(help="Of torch.compile.", show_default="aot_eager; none with --quick"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", help="Most that it may take.", show_default="3/4 of what is free"
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="After which a law is stopped.",
            show_default=f"{SECONDS:g}; {QUICK_SECONDS:g} with --quick",
        ),
    ] = None,
    snippets: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write each failing law's program as DIR/LAW.py."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw errors over bounds: .html, .png or .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Try every law on a module: is it causal, are rows apart, does decoding agree, and so on.

    The module is tried in a process of its own, stopped where it takes too long or too much.

    Exit code 0: no law fails; 1: one does; 2: none could be decided.
    """
    from lab.certification.process import Request

    with report_usage_errors():
        request = Request(
            target,
            parse_assignments(option or []),
            {
                "input": reads,
                "vocab_size": vocab_size,
                "layout": layout,
                "output": int(output) if output and output.isdecimal() else output,
                "relative": relative,
            },
            d_model,
            _whole_numbers(lengths),
            batch,
            seed,
            only,
            quick,
            _backend(compiler, quick),
            device,
            _memory(memory),
            _seconds(seconds, quick),
        )
        _check_figure(figure)
    if snippets is not None:
        with _writing(snippets):
            snippets.mkdir(parents=True, exist_ok=True)
    found = _examined(request, as_json)
    failing = [law for law in found["laws"] if law["verdict"] == "fails"]
    programs = {_file(law): law["snippet"] for law in failing if law["snippet"]}
    if snippets is not None:
        _write(snippets, programs)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, allow_nan=False))
    else:
        _conclude(found, snippets, list(programs))
    if figure is not None:
        _draw(found, figure)
        typer.echo(f"figure: {figure}", err=as_json)
    if not any(law["verdict"] in ("holds", "fails") for law in found["laws"]):
        law = found["laws"][0]
        raise refuse(f"no law could be decided; {law['law']}: {law['evidence']}", 2)
    if failing:
        raise typer.Exit(1)


def _examined(request: Any, as_json: bool) -> dict[str, Any]:
    """Return the certificate; without JSON, say it as it grows."""
    from rich.console import Console

    from lab.certification.process import RefusedError, examined
    from lab.cli.tables.certify import deciding, law_table

    said = Console(markup=False, highlight=False, quiet=as_json)
    try:
        with deciding() as (on_laws, on_begin, leave_room):

            def on_recognised(found: dict[str, Any]) -> None:
                on_laws(found["laws"])
                for note in found["notes"]:
                    said.print(note, style="dim")

            def on_verdict(law: dict[str, Any]) -> None:
                leave_room()
                said.print(law_table(law))

            return examined(request, on_recognised, on_begin, on_verdict)
    except RefusedError as error:
        raise refuse(error, 2) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def _conclude(found: dict[str, Any], snippets: Path | None, programs: list[str]) -> None:
    from lab.certification.process import counted

    typer.echo(f"{counted(found)}; {found['seconds']:.1f} s")
    if programs and snippets is None:
        typer.echo("--snippets DIR writes the program that shows it")
    if snippets is not None:
        for name in programs:
            typer.echo(f"PYTHONPATH=. python {snippets / name}")


def _whole_numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"lengths={text}: must be whole numbers, 7,64,200") from None


def _backend(compiler: str | None, quick: bool) -> str | None:
    if compiler is None:
        return None if quick else "aot_eager"
    return None if compiler == "none" else compiler


def _memory(memory: float | None) -> float:
    if memory is None:
        return max(float(LEAST_MEMORY), SHARE * _free() / GIBIBYTE)
    if not LEAST_MEMORY <= memory < float("inf"):
        raise ValueError(f"memory={memory}: must be ≥ {LEAST_MEMORY} GiB")
    return memory


def _free() -> int:
    """Return how many bytes the machine can give away, what it keeps of files among them."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if found:
        return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _seconds(seconds: float | None, quick: bool) -> float:
    if seconds is None:
        return QUICK_SECONDS if quick else SECONDS
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds={seconds}: must be > 0")
    return seconds


def _check_figure(figure: Path | None) -> None:
    if figure is None:
        return
    from analysis.pages.export import SUFFIXES

    if figure.suffix.lower() not in SUFFIXES:
        raise ValueError(f"figure={figure}: must end in {', '.join(SUFFIXES)}")
    if not figure.parent.is_dir():
        raise ValueError(f"figure={figure}: {figure.parent} is no folder")


def _file(law: dict[str, Any]) -> str:
    return re.sub(r"\W+", "-", law["law"]) + ".py"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Answer a file that cannot be written, or drawn, with one line and exit code 2."""
    from lab.files import RunError, explain_write_errors

    try:
        with explain_write_errors(path):
            yield
    except RunError as error:
        raise refuse(error, 2) from error


def _write(folder: Path, programs: dict[str, str]) -> None:
    from lab.files import write

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
