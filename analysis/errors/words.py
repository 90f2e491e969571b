"""Which mistakes does it make? Every wrong answer, attributed."""

import math

import numpy as np
import plotly.graph_objects as go

from analysis.base import Subject, Words
from analysis.errors.causes import MASKED
from analysis.errors.ledger import TOP, Examples, Ledger, measure_errors
from analysis.plots.style import MUTED, VERMILLION, figure, percent

TITLE = "Errors"
FEW = 20
"""Fewer errors are counted, no shares of them given in words."""


def measure(subject: Subject) -> list[Ledger | Examples]:
    """Return the ledger of a subject's errors, and examples of them if there are any.

    Raises:
        NotApplicableError: when no position is scored.
    """
    ledger, examples = measure_errors(subject)
    return [ledger, examples] if ledger.wrong else [ledger]


def describe(result: Ledger | Examples) -> Words:
    """Put the ledger, or its examples, in words."""
    return _of_examples(result) if isinstance(result, Examples) else _of_ledger(result)


def draw(result: Ledger | Examples) -> go.Figure | None:
    """Draw the causes, or the examples; nothing where there is no error."""
    return _table(result) if isinstance(result, Examples) else _bars(result)


def _of_ledger(ledger: Ledger) -> Words:
    title = "Errors by cause"
    share = ledger.wrong / ledger.scored
    if not ledger.wrong:
        says = f"There is no error among {ledger.scored:,} scored positions of {ledger.rows} rows: "
        says += f"the share of errors is at most {percent(ledger.interval[1])} (95 %)."
        return Words(title, says, "", says)
    says = f"{ledger.wrong:,} of {ledger.scored:,} answers ({percent(share)}) are wrong: "
    top = sorted((c for c in ledger.causes if c.count), key=lambda cause: -cause.count)[:3]
    if ledger.wrong < FEW:
        says += ", ".join(f"{cause.count} {cause.name}" for cause in top)
        says += "; too few to say more."
    else:
        parts = [
            f"{percent(cause.share)} {cause.name}"
            + ("" if math.isnan(cause.chance) else f" (random answers: {percent(cause.chance)})")
            for cause in top
        ]
        says += f"{', '.join(parts)}."
        low, high = ledger.neighbours_interval
        if low > ledger.by_chance or high < ledger.by_chance:
            says += f" Of other pairs' values {percent(ledger.neighbours)} come from the pair "
            says += f"stored next to the right one (chance {percent(ledger.by_chance)})."
    order = ", ".join(cause.name for cause in ledger.causes)
    reading = (
        f"Each error goes to the first cause that holds of: {order}. Whiskers are 95 % Wilson "
        "intervals, as if errors were independent. Diamonds: the same rules on random answers, "
        f"other targets of these rows. Outranked: the right value is among the {TOP} best, "
        "whatever was answered, so that random answers set no level for it or for unknown. "
        f"Where the answer is wrong the right one's median rank is {ledger.rank:,.0f}."
    )
    reading += _evidence(ledger)
    shown = ", ".join(f"{c.name} {percent(c.share)}" for c in ledger.causes)
    return Words(title, says, reading, f"Bars of the share of errors: {shown}.")


def _bars(ledger: Ledger) -> go.Figure | None:
    """Draw a bar a cause, the first in precedence on top; nothing where there is no error."""
    if not ledger.wrong:
        return None
    names = [cause.name for cause in ledger.causes]
    share = np.array([cause.share for cause in ledger.causes])
    ends = np.array([cause.interval for cause in ledger.causes])
    drawn = figure(height=84 + 34 * len(names) + 48)
    drawn.add_bar(
        x=share.tolist(),
        y=names,
        orientation="h",
        name="errors",
        error_x={
            "type": "data",
            "symmetric": False,
            "array": ends[:, 1] - share,
            "arrayminus": share - ends[:, 0],
            "thickness": 1.5,
            "width": 5,
        },
        hovertemplate="%{y}: %{x:.1%}<extra></extra>",
    )
    drawn.add_scatter(
        x=[cause.chance for cause in ledger.causes],
        y=names,
        mode="markers",
        name="random answers",
        marker={"symbol": "diamond", "size": 8, "color": VERMILLION},
        hovertemplate="%{y}, random answers: %{x:.1%}<extra></extra>",
    )
    for cause in ledger.causes:
        furthest = np.nanmax([cause.interval[1], cause.chance])
        drawn.add_annotation(
            text=f"<b>{percent(cause.share)}</b> ({cause.count:,})",
            x=furthest,
            y=cause.name,
            xanchor="left",
            xshift=8,
        )
    drawn.update_xaxes(range=[0, 1.55], tickvals=[0, 0.25, 0.5, 0.75, 1], tickformat=".0%")
    drawn.update_xaxes(title_text="share of errors", showline=False, ticks="")
    drawn.update_yaxes(
        categoryorder="array",
        categoryarray=names[::-1],
        showgrid=False,
        ticks="",
        automargin="left",
    )
    return drawn.update_layout(bargap=0.45, margin={"t": 84})


def _evidence(ledger: Ledger) -> str:
    """Say what masks and decay were judged by."""
    parts = []
    names = [cause.name for cause in ledger.causes]
    if MASKED in names:
        parts.append(
            f"A mask hides the key or value of {ledger.masked:,} errors; those are masked away "
            "that come right when it is lifted there; their diamond is how often that brings the "
            "value of a pair drawn at random."
        )
    if ledger.reader is not None:
        reader = ledger.reader
        parts.append(
            f"Decay is judged in layer {reader.layer}, head {reader.head}, whose weight on the "
            f"right value is {reader.contrast:.1f} times that on others."
        )
    return "".join(f" {part}" for part in parts)


def _of_examples(result: Examples) -> Words:
    """Put one example of each cause in words."""
    of_cause = {example.cause: example for example in reversed(result.errors)}
    told = "; ".join(
        f"{e.cause}: row {e.row}, position {e.position}, token {e.token}, "
        f"{e.answered} for {e.right}"
        for e in reversed(of_cause.values())
    )
    title = "Errors, one by one"
    reading = (
        "The first errors of each cause, in turn. Rank: of the right answer among all tokens; "
        "p: the probability that the model gives it, to three decimals."
    )
    return Words(title, f"{told[0].upper()}{told[1:]}.", reading, f"Table of errors. {told}.")


def _table(result: Examples) -> go.Figure:
    """Draw a table, an error a line."""
    columns = {
        "row": [e.row for e in result.errors],
        "pos.": [e.position for e in result.errors],
        "token": [e.token for e in result.errors],
        "right": [e.right for e in result.errors],
        "given": [e.answered for e in result.errors],
        "rank": [f"{e.rank:,}" for e in result.errors],
        "p": [f"{e.probability:.3f}" if e.probability >= 5e-4 else "0" for e in result.errors],
        "cause": [e.cause for e in result.errors],
    }
    wide = [9, 9, 9, 10, 11, 10, 12, 30]
    # Transparent, so that the page shows through, light or dark.
    look = {"fill_color": "rgba(0,0,0,0)", "line_color": MUTED, "align": "left"}
    drawn = figure(height=58 + 30 + 25 * len(result.errors) + 16)
    drawn.add_table(
        columnwidth=wide,
        header={"values": [f"<b>{name}</b>" for name in columns], "height": 28, **look},
        cells={"values": list(columns.values()), "height": 25, **look},
    )
    return drawn.update_layout(margin={"l": 2, "r": 2, "t": 58, "b": 8})
