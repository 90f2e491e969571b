"""What is asked? The first rows of the task, position by position, with the right answers."""

import html
import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, Subject, Table
from analysis.figures.theme import MUTED, new_figure
from analysis.plain import figure_only
from analysis.words import percent
from lab.palette import color_roles
from tasks.base import Batch, Task

__all__ = ["TITLE", "RowLayout", "lay_out", "measure"]

TITLE = "What is asked?"
MOST_ROWS = 8
"""Maximum number of rows that are shown."""
LINES = 32
"""Maximum number of lines of cells. A row that needs more is cut; one row is always shown."""
WIDTHS = ((256, 64), (1024, 128), (math.inf, 256))
"""Cells of a line, by the longest row that has them."""
LINE = 19
"""Height of a line, px."""
FIELD = 430
"""Width of all cells of a line, px."""
LETTER = 6.6
"""Approximate width of a letter in a cell, px."""
BESIDE = 12
"""Maximum number of letters of the right answers beside a row."""


@dataclass(frozen=True)
class RowLayout(Finding):
    """Rows of a task, laid out as lines of cells.

    Attributes:
        a_row: mean number of positions of each role in a row.
        scored: mean number of scored positions in a row.
        scored_roles: mean number of scored positions of each role in a row.
        first: the first position that is shown; above 0 only where long rows are cut.
        width: cells of a line.
        roles: of the rows that are shown, indices into role_names.
        tokens: what stands there, as text.
        answers: what is right there, as text; empty where nothing is scored.
    """

    seq_len: int
    role_names: tuple[str, ...]
    a_row: Float[np.ndarray, " roles"]
    scored: float
    scored_roles: Float[np.ndarray, " roles"]
    first: int
    width: int
    roles: Int[np.ndarray, "n t"] = figure_only()
    tokens: tuple[tuple[str, ...], ...] = figure_only()
    answers: tuple[tuple[str, ...], ...] = figure_only()
    title: str = figure_only()

    reading = (
        "Rows from the first line to the last, coloured by role. Scored positions are underlined; "
        "their right answers stand beside the row, in order. Point at a cell to see its position, "
        "token, role and right answer. Counts are means over the rows measured."
    )

    @property
    def says(self) -> str:
        """How many positions of a row are scored."""
        return (
            f"Scored positions of a row: {_format_mean(self.scored)} of {self.seq_len:,} "
            f"({percent(self.scored / self.seq_len)})."
        )

    def numbers(self) -> Table:
        """Return how many positions have each role, and how many of these are scored."""
        found = zip(self.a_row.tolist(), self.scored_roles.tolist(), self.role_names, strict=True)
        rows = (
            (name, _format_mean(count), _format_mean(scored))
            for count, scored, name in sorted(found, key=lambda role: -role[0])
            if count
        )
        return Table(("role", "positions a row", "scored"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw each row as lines of cells, a colour for each role."""
        n, cells = self.roles.shape
        lines = math.ceil(cells / self.width)
        # An empty line separates rows of several lines.
        pitch = lines + (lines > 1)
        high = n * pitch - (lines > 1)

        def fold(rows: object, blank: object) -> np.ndarray:
            """Break rows of cells into lines, [high width]."""
            whole = np.full((n, pitch * self.width), blank, object)
            whole[:, :cells] = rows
            return whole.reshape(-1, self.width)[:high]

        names = [html.escape(name) for name in self.role_names]
        colors = color_roles(names)
        # A longer token among short ones is drawn smaller.
        letters = np.median([len(token) for tokens in self.tokens for token in tokens])
        fits = letters * LETTER <= FIELD / self.width
        fig = new_figure(height=148 + LINE * high)
        fig.add_heatmap(
            z=fold(self.roles, math.nan).astype(np.float32),
            customdata=fold(self._write_notes(names), ""),
            # One character is no markup, and plotly would count an entity's letters.
            text=fold([[t if len(t) == 1 else html.escape(t) for t in r] for r in self.tokens], "")
            if fits
            else None,
            texttemplate="%{text}" if fits else None,
            zmin=-0.5,
            zmax=len(colors) - 0.5,
            # One plateau for each role.
            colorscale=[
                [(role + side) / len(colors), color]
                for role, color in enumerate(colors)
                for side in (0, 1)
            ],
            showscale=False,
            hoverongaps=False,
            xgap=1 if FIELD / self.width >= 4 else 0,
            ygap=6,
            hovertemplate="%{customdata}<extra></extra>",
        )
        for role in np.flatnonzero(self.a_row):
            square = {"symbol": "square", "size": 10, "color": colors[role]}
            fig.add_scatter(x=[None], y=[None], mode="markers", marker=square, name=names[role])
        line, column = fold(self.answers, "").nonzero()
        gap = np.full(len(line), np.nan)
        fig.add_scatter(
            x=np.stack([column - 0.4, column + 0.4, gap], 1).ravel(),
            y=np.stack([line + 0.48, line + 0.48, gap], 1).ravel(),
            mode="lines",
            line={"color": MUTED, "width": 2.5},
            name="scored",
            hoverinfo="skip",
        )
        right = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 6}
        for row, answers in enumerate(self.answers):
            text, middle = html.escape(_shorten_answers(answers)), row * pitch + (lines - 1) / 2
            fig.add_annotation(text=text, y=middle, **right)
        fig.add_annotation(text="right answers", y=1, yref="paper", yanchor="bottom", **right)
        plain = {"showgrid": False, "showline": False}
        title = "position" + ", of each line" * (lines > 1)
        fig.update_xaxes(range=[-0.5, self.width - 0.5], title_text=title, **plain)
        fig.update_yaxes(
            range=[high - 0.4, -0.6],
            tickvals=[row * pitch for row in range(n)],
            ticktext=[f"row {row}" for row in range(n)],
            ticks="",
            **plain,
        )
        return fig.update_layout(margin={"l": 48, "r": 110, "t": 84, "b": 48})

    def _write_notes(self, names: list[str]) -> list[list[str]]:
        """Return what is said of each cell."""
        return [
            [
                f"row {row}, position {self.first + i}: {html.escape(token)}, {names[role]}"
                + f"; right: {html.escape(answer)}" * bool(answer)
                for i, (token, role, answer) in enumerate(zip(*cells, strict=True))
            ]
            for row, cells in enumerate(zip(self.tokens, self.roles, self.answers, strict=True))
        ]


def measure(subject: Subject) -> list[RowLayout]:
    """Lay out the subject's first rows."""
    return [lay_out(subject.task, subject.batch)]


def lay_out(task: Task, batch: Batch) -> RowLayout:
    """Lay out the first rows of a batch, and count the roles of all its rows."""
    scored: np.ndarray = batch.scored.cpu().numpy()
    roles = batch.roles.cpu().numpy()
    seq_len = roles.shape[1]
    width = min(seq_len, next(width for most, width in WIDTHS if seq_len <= most))
    lines = math.ceil(seq_len / width)
    shown = slice(0, min(len(roles), MOST_ROWS, max(1, LINES // lines)))
    end = seq_len
    if lines > LINES:
        # Cut rows so that no scored position behind the window is lost.
        end = max(LINES * width, int(scored[shown].nonzero()[1].max(initial=0)) + 1)
    window = slice(max(0, end - LINES * width), end)
    names = range(len(task.role_names))
    parts = task.list_tasks(batch[shown])

    def spell(tokens: Tensor, given: np.ndarray) -> tuple[tuple[str, ...], ...]:
        rows = zip(parts, tokens[shown, window].tolist(), given[shown, window], strict=True)
        return tuple(
            tuple(
                part.format_token(token) if is_given else ""
                for token, is_given in zip(row, of_row, strict=True)
            )
            for part, row, of_row in rows
        )

    cut = f", positions {window.start:,} to {end - 1:,}" * (end - window.start < seq_len)
    return RowLayout(
        seq_len=seq_len,
        role_names=task.role_names,
        a_row=np.array([(roles == i).sum(1).mean() for i in names]),
        scored=float(scored.sum(1).mean()),
        scored_roles=np.array([((roles == i) & scored).sum(1).mean() for i in names]),
        first=window.start,
        width=width,
        roles=roles[shown, window],
        tokens=spell(batch.inputs, np.ones_like(scored)),
        answers=spell(batch.targets, scored),
        title=f"Rows of {task.name}: the first {shown.stop} of {len(roles):,}{cut}",
    )


def _format_mean(mean: float) -> str:
    """Return a mean count as text: without decimals where it is whole, else with one."""
    return f"{mean:,.0f}" if mean == round(mean) else f"{mean:,.1f}"


def _shorten_answers(answers: tuple[str, ...]) -> str:
    """Return the right answers of a row as far as there is room."""
    text = ""
    for answer in filter(None, answers):
        if text and len(text) + 1 + len(answer) > BESIDE:
            return f"{text} …"
        text = f"{text} {answer}".strip()
    return text
