"""Rows of a task laid out as lines of cells: what stands in each cell, and what is right there."""

import html
import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, Words
from analysis.plain import figure_only
from analysis.plots import style
from analysis.words import percent
from lab.palette import color_roles
from tasks.base import IGNORE, Batch, Task

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
MARK = {"color": style.MUTED, "width": 2.5}
"""The line under a scored position."""
BESIDE = 12
"""Maximum number of letters of the right answers beside a row."""


@dataclass(frozen=True)
class RowLayout(Finding):
    """Rows of a task, laid out.

    Attributes:
        task: its name.
        seq_len: positions of a row.
        rows: how many rows are counted: all of the batch.
        role_names: the task's.
        a_row: mean number of positions of each role in a row.
        scored: mean number of scored positions in a row.
        scored_roles: mean number of scored positions of each role in a row.
        first: the first position that is shown; above 0 only where long rows are cut.
        width: cells of a line.
        roles: of the rows that are shown, indices into role_names.
        tokens: what stands there, as text.
        answers: what is right there, as text; empty where nothing is scored.
    """

    task: str
    seq_len: int
    rows: int
    role_names: tuple[str, ...]
    a_row: Float[np.ndarray, " roles"]
    scored: float
    scored_roles: Float[np.ndarray, " roles"]
    first: int
    width: int
    roles: Int[np.ndarray, "n t"] = figure_only()
    tokens: tuple[tuple[str, ...], ...] = figure_only()
    answers: tuple[tuple[str, ...], ...] = figure_only()

    def describe(self) -> Words:
        """Say how many positions a row has of each role, and which of them are scored."""
        shown, cells = self.roles.shape
        title = f"Rows of {self.task}: {self.seq_len:,} positions each, coloured by role"
        names, order = self.role_names, np.argsort(-self.a_row, kind="stable").tolist()
        present = [role for role in order if self.a_row[role] > 0]
        says = (
            f"{_format_mean(self.scored)} of the {self.seq_len:,} positions of a row "
            f"({percent(self.scored / self.seq_len)}) "
        )
        says += "is scored" if self.scored == 1 else "are scored"
        if len(present) == 1:
            says += f"; all positions have the same role, {names[present[0]]}."
        else:
            counts = (f"{names[role]} {_format_mean(float(self.a_row[role]))}" for role in present)
            says += f", {self._describe_scored(present)}; positions by role: {', '.join(counts)}."
        if shown < self.rows:
            which = f"The first {shown} of {self.rows} rows"
        else:
            which = "1 row" if shown == 1 else f"{shown} rows"
        reading = (
            f"{which}, first line to last. Scored positions are underlined; their right answers "
            "stand beside the row, in order. Point at a cell to see its position, token, role and "
            "right answer. Counts are means over the rows."
        )
        if cells < self.seq_len:
            last = self.first + cells - 1
            reading += f" Only positions {self.first:,} … {last:,} are shown."
        alt = f"Rows as lines of cells, one colour for each role. {says}"
        return Words(title, says, reading, alt)

    def _describe_scored(self, present: list[int]) -> str:
        """Say which roles the scored positions have."""
        names = self.role_names
        scored = [role for role in present if self.scored_roles[role] > 0]
        if not scored:
            return "of no role"
        if len(scored) == 1:
            return f"{'of role' if self.scored == 1 else 'all of role'} {names[scored[0]]}"
        counts = (
            f"{names[role]} {_format_mean(float(self.scored_roles[role]))}" for role in scored
        )
        return f"by role {', '.join(counts)}"

    def draw(self) -> go.Figure:
        """Draw each row as lines of cells, a colour for each role."""
        n, cells = self.roles.shape
        lines = math.ceil(cells / self.width)
        many = lines > 1
        # An empty line separates rows of several lines.
        pitch = lines + (1 if many else 0)
        high = n * pitch - (1 if many else 0)
        fig = style.new_figure(height=84 + LINE * high + 64)
        cell = FIELD / self.width
        z = np.full((high, self.width), np.nan, np.float32)
        notes = np.full((high, self.width), "", object)
        short = np.full((high, self.width), "", object)
        marks: tuple[list[float | None], list[float | None]] = ([], [])
        for row in range(n):
            for i in range(cells):
                line, column = row * pitch + i // self.width, i % self.width
                role, token = self.roles[row, i], self.tokens[row][i]
                escaped, answer = html.escape(token), html.escape(self.answers[row][i])
                z[line, column] = role
                # One character is no markup, and plotly would count an entity's letters.
                short[line, column] = token if len(token) == 1 else escaped
                notes[line, column] = (
                    f"row {row}, position {self.first + i}: {escaped}, "
                    f"{html.escape(self.role_names[role])}"
                    + (f"; right: {answer}" if answer else "")
                )
                if answer:
                    marks[0].extend((column - 0.4, column + 0.4, None))
                    marks[1].extend((line + 0.48, line + 0.48, None))
        # A longer token among short ones is drawn smaller.
        letters = np.median([len(token) for tokens in self.tokens for token in tokens])
        fits = letters * LETTER <= cell
        colors = color_roles(self.role_names)
        fig.add_heatmap(
            z=z,
            customdata=notes,
            text=short if fits else None,
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
            xgap=1 if cell >= 4 else 0,
            ygap=6,
            hovertemplate="%{customdata}<extra></extra>",
        )
        for role, name in enumerate(self.role_names):
            if self.a_row[role] > 0:
                fig.add_scatter(
                    x=[None],
                    y=[None],
                    mode="markers",
                    marker={"symbol": "square", "size": 10, "color": colors[role]},
                    name=html.escape(name),
                )
        fig.add_scatter(
            x=marks[0], y=marks[1], mode="lines", line=MARK, name="scored", hoverinfo="skip"
        )
        right = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 6}
        for row in range(n):
            fig.add_annotation(
                text=html.escape(_shorten_answers(self.answers[row])),
                y=row * pitch + (lines - 1) / 2,
                **right,
            )
        fig.add_annotation(text="right answers", y=1, yref="paper", yanchor="bottom", **right)
        fig.update_xaxes(
            range=[-0.5, self.width - 0.5],
            showgrid=False,
            showline=False,
            title_text=f"position{', of each line' if many else ''}",
        )
        fig.update_yaxes(
            range=[high - 0.4, -0.6],
            tickvals=[row * pitch for row in range(n)],
            ticktext=[f"row {row}" for row in range(n)],
            showgrid=False,
            showline=False,
            ticks="",
        )
        return fig.update_layout(margin={"l": 48, "r": 110, "t": 84, "b": 48})


def lay_out(task: Task, batch: Batch) -> RowLayout:
    """Lay out the first rows of a batch, and count the roles of all its rows."""
    targets, roles = batch.targets.cpu().numpy(), batch.roles.cpu().numpy()
    seq_len = targets.shape[1]
    width = min(seq_len, next(width for most, width in WIDTHS if seq_len <= most))
    lines = math.ceil(seq_len / width)
    shown = slice(0, min(MOST_ROWS, max(1, LINES // lines)))
    scored = targets != IGNORE
    end = seq_len
    if lines > LINES:
        # Cut rows so that no scored position behind the window is lost.
        end = max(LINES * width, int(scored[shown].any(0).nonzero()[0].max(initial=0)) + 1)
    window = slice(max(0, end - LINES * width), end)
    names = range(len(task.role_names))
    parts = task.list_tasks(batch[shown])

    def spell(tokens: Tensor) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple("" if token == IGNORE else part.format_token(token) for token in row)
            for part, row in zip(parts, tokens[shown, window].tolist(), strict=True)
        )

    return RowLayout(
        task=task.name,
        seq_len=seq_len,
        rows=len(targets),
        role_names=task.role_names,
        a_row=np.array([(roles == i).sum(1).mean() for i in names]),
        scored=float(scored.sum(1).mean()),
        scored_roles=np.array([((roles == i) & scored).sum(1).mean() for i in names]),
        first=window.start,
        width=width,
        roles=roles[shown, window],
        tokens=spell(batch.inputs),
        answers=spell(batch.targets),
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
