"""What is asked? A few rows by position: what stands there, and what is right."""

import numpy as np
import plotly.graph_objects as go

from analysis.base import Subject, Words
from analysis.rows import figures as figures
from analysis.rows.results import Rows, laid_out
from analysis.words import percent

TITLE = "What is asked?"


def measure(subject: Subject) -> list[Rows]:
    """Return the first rows, laid out."""
    return [laid_out(subject.task, subject.batch)]


def describe(found: Rows) -> Words:
    """Say how many positions of each role a row has, and which are scored."""
    n, seen = found.roles.shape
    title = f"Rows of {found.task}: {found.seq_len:,} positions each, coloured by role"
    there = [int(i) for i in np.argsort(-found.a_row, kind="stable") if found.a_row[i] > 0]
    counted = ", ".join(f"{found.role_names[i]} {_number(float(found.a_row[i]))}" for i in there)
    says = f"Of the {found.seq_len:,} positions of a row {_number(found.scored)} "
    says += f"({percent(found.scored / found.seq_len)}) "
    says += "is scored" if found.scored == 1 else "are scored"
    asked = [i for i in there if found.scored_roles[i] > 0]
    if len(there) == 1:
        says += f"; all are of one role, {found.role_names[there[0]]}."
    else:
        says += f", {_of_roles(found, asked)}; positions by role: {counted}."
    reading = (
        f"The first {n} of {found.rows} rows, first line to last; an underlined position is "
        "scored, and the right answers stand beside the row, in order. A cell under the pointer "
        "says position, token, role and right answer. Counts are means over the rows."
    )
    if n == found.rows:
        reading = reading.replace(f"The first {n} of {found.rows} rows", f"{n} rows")
        reading = reading.replace("1 rows", "1 row") if n == 1 else reading
    if seen < found.seq_len:
        reading += f" Only positions {found.first:,} … {found.first + seen - 1:,} are shown."
    alt = f"Rows as lines of cells, a colour a role. {says}"
    return Words(title, says, reading, alt)


def _of_roles(found: Rows, asked: list[int]) -> str:
    """Say of what roles the scored positions are."""
    if not asked:
        return "of no role"
    if len(asked) == 1:
        which = "of role" if found.scored == 1 else "all of role"
        return f"{which} {found.role_names[asked[0]]}"
    parts = [f"{found.role_names[i]} {_number(float(found.scored_roles[i]))}" for i in asked]
    return "by role " + ", ".join(parts)


def _number(mean: float) -> str:
    """Return a mean count: whole where it is."""
    return f"{mean:,.0f}" if mean == round(mean) else f"{mean:,.1f}"


def draw(found: Rows) -> go.Figure:
    """Draw a line of cells for so many positions, a row below the other."""
    return figures.draw(found)


__all__ = ["TITLE", "Rows", "describe", "draw", "laid_out", "measure"]
