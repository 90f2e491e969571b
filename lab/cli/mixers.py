"""`lab mixers`: what each mixer is, its state and its options."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from lab.cli.messages import report_usage_errors
from lab.cli.output import AsJsonLines


def mixers(
    name: Annotated[str | None, typer.Argument(help="Show this one and its options.")] = None,
    d_model: Annotated[int, typer.Option(help="Width at which states are measured.")] = 64,
    n_heads: Annotated[int, typer.Option(help="Heads at which states are measured.")] = 1,
    as_json: AsJsonLines = False,
) -> None:
    """List the mixers: what each is, the bytes of its state for one row, and its options."""
    from lab.models.mixers import MIXERS, summarize_mixers
    from tasks.bounds import check_choice

    with report_usage_errors():
        if name is not None:
            check_choice("name", name, MIXERS)
        found = list(summarize_mixers(d_model, n_heads, MIXERS if name is None else (name,)))
    if as_json:
        for summary in found:
            typer.echo(json.dumps(asdict(summary), ensure_ascii=False))
        return
    from rich.table import Table

    from lab.cli.console import open_table_console

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("mixer", "letter", "what it is", "state", "source"):
        table.add_column(column, overflow="fold")
    for summary in found:
        state = _describe_state(summary.fixed_bytes, summary.token_bytes)
        table.add_row(summary.name, summary.letter, summary.says, state, summary.source)
    console = open_table_console()
    console.print(table)
    for summary in found:
        if name is None:
            typer.echo(f"\n{summary.name}: {', '.join(summary.options)}")
        else:
            for option, known in summary.options.items():
                typer.echo(_describe_option(option, known))
    typer.echo(
        f"\nState: bytes in fp32 for one row at d_model={d_model}, n_heads={n_heads}. "
        "In a stack: 'ssd+M*2'; an option: --option ssd.d_state=64."
    )


def _describe_state(fixed: int, token: int) -> str:
    grows = f"{token:,} a token" if token else ""
    return " + ".join(filter(None, (f"{fixed:,}" if fixed or not token else "", grows)))


def _describe_option(name: str, option: dict[str, Any]) -> str:
    values = "".join(
        f" | {value}" for value in option.get("values", ()) if value != option["default"]
    )
    default = option["default"]
    return f"{name} = {str(default).lower() if default in (None, True, False) else default}{values}"
