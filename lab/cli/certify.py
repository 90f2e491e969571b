"""`lab certify`: test any PyTorch module against the laws."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.certification import (
    GIBIBYTE,
    SIGNS,
    Certificate,
    certify_in_child,
    count_outcomes,
)
from lab.certify_settings import QUICK, THOROUGH, CertifySettings
from lab.cli.command import make_command
from lab.cli.messages import refuse, report_usage_errors, say
from lab.files import RunError, check_output, explain_write_errors, write
from lab.machine import measure_free_memory
from tasks.bounds import option

if TYPE_CHECKING:
    from rich.table import Table

MEMORY_SHARE = 0.75
"""Share of the machine's free memory that a target may take by default."""
LEAST_MEMORY = 1
"""GiB; Python and torch need a quarter of it."""
LIMITS = {"quick": 15.0, "thorough": 900.0, "usual": 60.0}
"""Seconds after which a law is stopped, by effort."""
TIME_SHARE = 8
"""A law should take at most 1/8 of that time under each condition."""


@dataclass(frozen=True, kw_only=True)
class CertifyOptions(CertifySettings):
    """The options of `lab certify`: the settings, the limits of its process, and what it writes.

    Raises:
        ValueError: as `CertifySettings`; for a limit below its bound, and two efforts at once.
    """

    target: str = option(
        MISSING,
        "package.module:factory; a factory is a class or a function that returns a module.",
        argument=True,
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N.")
    quick: bool = option(False, "Test less thoroughly; takes seconds.")
    thorough: bool = option(False, "Test longer inputs and more seeds; takes minutes.")
    memory: float | None = option(
        None,
        "Maximum memory that the module may take on a CPU.",
        "3/4 of what is free",
        metavar="GIB",
    )
    limit: float | None = option(
        None,
        "Stop a law after this many seconds, not counting waits for a processor.",
        "{usual:g}; {quick:g} with --quick, {thorough:g} with --thorough".format(**LIMITS),
        flag="--seconds",
    )
    snippets: Path | None = option(
        None,
        "For each law that fails, write a program that shows it: DIR/LAW.py.",
        metavar="DIR",
    )
    figure: Path | None = option(
        None, "Save each law's error relative to its bound as this .html, .png or .svg file."
    )
    force: bool = option(False, "Overwrite a file that the lab did not make.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quick and self.thorough:
            raise ValueError("--quick and --thorough exclude each other")
        if self.memory is not None and not LEAST_MEMORY <= self.memory < float("inf"):
            raise ValueError(f"memory={self.memory}: must be ≥ {LEAST_MEMORY} GiB")
        if self.limit is not None and not 0 < self.limit < float("inf"):
            raise ValueError(f"seconds={self.limit}: must be > 0")
        if self.figure is not None:
            from analysis.pages.export import check_figure

            check_figure(self.figure, self.force)
            if not self.figure.parent.is_dir():
                raise ValueError(f"figure={self.figure}: {self.figure.parent} is not a folder")

    @property
    def effort(self) -> str:
        """How thoroughly to test: "quick", "thorough" or "usual"."""
        return "quick" if self.quick else "thorough" if self.thorough else "usual"

    def choose_limits(self) -> tuple[float, float]:
        """Return the memory in GiB that the target may take, and the seconds that a law may."""
        free = max(float(LEAST_MEMORY), MEMORY_SHARE * measure_free_memory() / GIBIBYTE)
        return self.memory or free, self.limit or LIMITS[self.effort]

    def build_settings(self) -> CertifySettings:
        """Return the settings of the effort, with the options that were given."""
        base = {"quick": QUICK, "thorough": THOROUGH}.get(self.effort, CertifySettings())
        given = {
            f.name: getattr(self, f.name) for f in fields(base) if f.metadata.get("flag") != ""
        }
        given = {name: value for name, value in given.items() if value is not None}
        seconds = min(base.seconds, self.choose_limits()[1] / TIME_SHARE)
        compiler = self.compiler or ("none" if self.quick else "aot_eager")
        return replace(base, **{**given, "seconds": seconds, "compiler": compiler})


def run_certify(options: CertifyOptions, as_json: bool) -> None:
    """Test a module against every law: is it causal, are rows independent, does decoding agree, …

    The module runs in its own process, so a crash, a hang or too much memory leaves only that law
    undecided.

    Exit code 0: no law fails. 1: a law fails. 2: no law could be decided.
    """
    snippets = options.snippets
    with _report_refusals(vars(options), as_json):
        if snippets is not None:
            with explain_write_errors(snippets):
                snippets.mkdir(parents=True, exist_ok=True)
        found = _certify(options, quiet=as_json)
    failing = [law for law in found["laws"] if law["verdict"] == "fails"]
    programs = {_name_file(law): law["snippet"] for law in failing if law["snippet"]}
    if snippets is not None:
        _write_programs(snippets, programs, options.force)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, allow_nan=False))
    else:
        say(f"{count_outcomes(found)}; {found['seconds']:.1f} s")
        if programs and snippets is None:
            say("Add --snippets DIR to get a program that shows each failure.")
        if snippets is not None:
            for name in programs:
                say(f"PYTHONPATH=. python {snippets / name}")
    if options.figure is not None:
        _draw(found, options.figure)
        say(f"figure: {options.figure}", err=as_json)
    if not any(law["verdict"] in ("holds", "fails") for law in found["laws"]):
        law = found["laws"][0]
        raise refuse(f"no law could be decided; {law['law']}: {law['evidence']}", 2)
    if failing:
        raise typer.Exit(1)


@contextmanager
def _report_refusals(typed: Mapping[str, Any], as_json: bool) -> Iterator[None]:
    """Report a bad value in one line, and as JSON if that was asked for."""
    try:
        yield
    except (ValueError, RunError) as error:
        if as_json:
            typer.echo(json.dumps({"target": typed["target"], "refused": str(error)}))
        raise refuse(error, 2) from error


def _certify(options: CertifyOptions, quiet: bool) -> Certificate:
    """Return the certificate; unless quiet, print each verdict as it arrives."""
    from lab.console import open_table_console

    output, errors = open_table_console(quiet=quiet), open_table_console(stderr=True)
    laws: Sequence[str] = ()
    with errors.status("probing …") as status:

        def print_notes(found: dict[str, Any]) -> None:
            nonlocal laws
            laws = found["laws"]
            status.stop()
            for note in found["notes"]:
                output.print(note, style="dim")

        def show_law(law: str, number: int) -> None:
            status.update(f"{law} … {number + 1} of {len(laws)}")
            status.start()

        def print_verdict(law: dict[str, Any]) -> None:
            status.stop()
            output.print(build_law_table(law))

        try:
            return certify_in_child(
                options.target,
                options.build_settings(),
                *options.choose_limits(),
                print_notes,
                show_law,
                print_verdict,
            )
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error


STYLES = {
    "holds": "green",
    "fails": "bold red",
    "not applicable": "dim",
    "not decided": "yellow",
}
LAW_WIDTH = 15
"""Columns for a law's name; a longer one takes a second line."""


def build_law_table(law: Certificate) -> "Table":
    """Build a law's line: sign, name, evidence; below a failure, its counter-example."""
    from rich.table import Table
    from rich.text import Text

    outcome, evidence = law["verdict"], law["evidence"]
    style = STYLES[outcome]
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(width=LAW_WIDTH)
    table.add_column(overflow="fold")
    words = evidence if outcome in ("holds", "fails") else f"{outcome}: {evidence}"
    table.add_row(Text(SIGNS[outcome], style), Text(law["law"], style), words)
    if law["counterexample"] is not None:
        table.add_row("", "", Text(law["counterexample"], "bold"))
    return table


def _name_file(law: Certificate) -> str:
    return re.sub(r"\W+", "-", law["law"]) + ".py"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Report a file that cannot be written with one line and exit code 2."""
    try:
        with explain_write_errors(path):
            yield
    except RunError as error:
        raise refuse(error, 2) from error


def _write_programs(folder: Path, programs: dict[str, str], force: bool) -> None:
    with report_usage_errors():
        for name in programs:
            check_output("snippets", folder / name, force)
    with _writing(folder):
        for name, program in programs.items():
            write(folder / name, program)


def _draw(found: Certificate, path: Path) -> None:
    from analysis.pages.certificate import save
    from analysis.pages.export import BrowserError

    try:
        with _writing(path):
            save(found, path)
    except BrowserError as error:
        raise refuse(error, 2) from error


run_certify.__name__ = "certify"
certify = make_command(
    run_certify, CertifyOptions, json="Print one JSON object.", report=_report_refusals
)
