"""Errors one by one: the first few of each cause."""

from dataclasses import dataclass

import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.plots.style import MUTED, new_figure
from analysis.words import capitalize

COLUMN_WIDTHS = [9, 9, 9, 10, 11, 10, 12, 30]


@dataclass(frozen=True)
class Example:
    """An error.

    Attributes:
        row: number of the row in the test split.
        position: of the query.
        token: the query's.
        right: the right answer.
        answered: the model's answer.
        cause: its name, one of `analysis.errors.causes.CAUSES`.
        rank: of the right answer among all tokens, from 1; above 1, since the answer is wrong.
        probability: that the model gives the right answer.
    """

    row: int
    position: int
    token: int
    right: int
    answered: int
    cause: str
    rank: int
    probability: float


@dataclass(frozen=True)
class Examples(Finding):
    """A few errors of every cause.

    Attributes:
        errors: the first of each cause, then the second of each, and so on.
    """

    errors: tuple[Example, ...]

    def describe(self) -> Words:
        """Describe one example of each cause."""
        of_cause = {example.cause: example for example in reversed(self.errors)}
        examples = "; ".join(
            f"{e.cause}: row {e.row}, position {e.position}, token {e.token}, "
            f"{e.answered} instead of {e.right}"
            for e in reversed(of_cause.values())
        )
        return Words(
            title="Errors, one by one",
            says=f"{capitalize(examples)}.",
            reading="The first errors of each cause. Rank is the rank of the right answer among "
            "all tokens; p is the probability that the model gives it, to three decimals.",
            alt=f"Table of errors. {examples}.",
        )

    def draw(self) -> go.Figure:
        """Draw a table, an error a line."""
        errors = self.errors
        columns = {
            "row": [e.row for e in errors],
            "pos.": [e.position for e in errors],
            "token": [e.token for e in errors],
            "right": [e.right for e in errors],
            "given": [e.answered for e in errors],
            "rank": [f"{e.rank:,}" for e in errors],
            "p": [f"{e.probability:.3f}" if e.probability >= 5e-4 else "0" for e in errors],
            "cause": [e.cause for e in errors],
        }
        # Transparent, so that the page shows through, light or dark.
        look = {"fill_color": "rgba(0,0,0,0)", "line_color": MUTED, "align": "left"}
        fig = new_figure(height=58 + 30 + 25 * len(errors) + 16)
        fig.add_table(
            columnwidth=COLUMN_WIDTHS,
            header={"values": [f"<b>{name}</b>" for name in columns], "height": 28, **look},
            cells={"values": list(columns.values()), "height": 25, **look},
        )
        return fig.update_layout(margin={"l": 2, "r": 2, "t": 58, "b": 8})
