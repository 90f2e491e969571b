"""The table of baselines, for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from lab.constructions import Rung
from lab.suite.audit import Audit


def build_audit_table(found: Audit, title: str) -> Table:
    """Build a table of the predictors of a task, best first, with 95 % intervals but for chance."""
    caption = f"{found.rows:,} rows, {found.scored:,} scored positions"
    table = Table(title=title, title_justify="left", caption=caption)
    for name in ("", "accuracy", "95 %"):
        table.add_column(name, justify="right" if name else "left")
    for score in found.best_first:
        interval = "{:.4f} … {:.4f}".format(*score.interval) if score.interval else ""
        table.add_row(score.name, f"{score.accuracy:.4f}", interval)
    return table


def build_ladder_table(rungs: Sequence[Rung]) -> Table:
    """Build a table of what each mixer reaches with weights set by hand, equal ones together."""
    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify = "weights set by hand", "left"
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    alike: dict[tuple[str, float | None, str], list[str]] = {}
    for rung in rungs:
        alike.setdefault((rung.outcome, rung.accuracy, rung.because), []).append(rung.mixer)
    for (outcome, accuracy, because), mixers in alike.items():
        reached = "" if accuracy is None else f"accuracy {accuracy:.4f}: "
        table.add_row(outcome, "; ".join(mixers))
        table.add_row("", f"→ {reached}{because}")
    return table
