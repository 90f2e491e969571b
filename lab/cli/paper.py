"""`lab model` and `lab errata`: the paper's models, and the mistakes in its text."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from lab.cli.command import list_keys
from lab.cli.messages import parse_assignments, refuse, report_failures, report_usage_errors
from lab.cli.output import AsJson, AsJsonLines, Force, check_output


def model(
    name: Annotated[
        str,
        typer.Argument(
            help="A stack, e.g. 'SE*7 IE', or an architecture: "
            f"{list_keys('lab/models/architectures.py', 'ARCHITECTURES')}."
        ),
    ],
    size: Annotated[
        Literal["320M", "1.3B"] | None, typer.Option(help="A size that the paper gives.")
    ] = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    n_heads: Annotated[int | None, typer.Option(help="Number of heads of every mixer.")] = None,
    n_layers: Annotated[
        int | None, typer.Option(help="Number of blocks, for an architecture.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Rows of the embedding table.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of a layer, e.g. S.d_state=64."),
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the stack into this HTML file.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Show a model's blocks and its total and active parameters, next to the paper's numbers.

    No weights are allocated. An architecture is shown at the paper's 320M unless you give a size.
    """
    from lab.models.anatomy import dissect
    from lab.models.paper_sizes import build_on_meta, compare_with_paper

    given = {
        "d_model": d_model,
        "n_heads": n_heads,
        "n_layers": n_layers,
        "vocab_size": vocab_size,
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    with report_usage_errors():
        if figure is not None and figure.suffix.lower() != ".html":
            raise ValueError(f"figure={figure}: must end in .html")
        if figure is not None:
            check_output("figure", figure, force)
        built, paper_size = build_on_meta(name, size, chosen, parse_assignments(option or []))
    found = dissect(built)
    own = bool(option) or vocab_size is not None
    compared = compare_with_paper(name, paper_size, found.total, own) if paper_size else None
    if as_json:
        whole = {"name": name, "total": found.total, "active": found.active}
        typer.echo(json.dumps({**whole, "paper": compared and asdict(compared), **asdict(found)}))
    else:
        from lab.cli.console import open_table_console
        from lab.cli.tables.anatomy import build_anatomy_table, describe_totals

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


def errata(
    rows: Annotated[
        list[str] | None, typer.Argument(help="Errata to run, e.g. R1 D3.", show_default="all")
    ] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Run the paper's errata: show that each printed formula fails and the intended one holds."""
    from lab.errata import run

    with report_usage_errors():
        found = run([row.upper() for row in rows] if rows else None)
    unconfirmed = []
    for erratum in found:
        if as_json:
            typer.echo(json.dumps({**asdict(erratum), "confirmed": erratum.confirmed}))
        else:
            from lab.cli.console import open_table_console
            from lab.cli.tables.errata import build_erratum_table

            open_table_console().print(build_erratum_table(erratum))
        if not erratum.confirmed:
            unconfirmed.append(erratum.row)
    if unconfirmed:
        raise refuse(f"these errata did not come out as recorded: {', '.join(unconfirmed)}", 1)
