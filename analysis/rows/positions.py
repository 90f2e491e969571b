"""Where in the row is it right? Accuracy by position, and by the role of the scored token."""

import html
import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.base import Finding, NotApplicableError, Subject, Words, describe, draw
from analysis.plots import style
from analysis.plots.binned import add_bins
from analysis.plots.lines import name_lines
from analysis.scoring import scored
from analysis.statistics.binned import Bins, bin_accuracy, describe_contrast, describe_extremes
from analysis.statistics.intervals import bound_share
from analysis.words import join_names, percent, percents

__all__ = ["TITLE", "AccuracyByPlace", "describe", "draw", "measure"]

TITLE = "Where in the row is it right?"
MOST_BINS = 16
"""Maximum number of bins of positions."""
PANEL, LINE, GAP = 200, 28, 66
"""Heights of the panel of positions, of a role's line, and of the space between the panels, px."""


@dataclass(frozen=True)
class AccuracyByPlace(Finding):
    """Accuracy by position in the row and by role.

    Attributes:
        rows: how many rows were measured.
        scored: how many positions in them are scored.
        accuracy: share of right answers, in [0, 1].
        interval: its 95 % interval, low and high.
        chance: accuracy of a uniform guess.
        position: accuracy by position in the row, from 0; None where all are at one position.
        roles: names of the roles that are scored.
        role: accuracy by role, in the order of `roles`; None where there is only one.
    """

    rows: int
    scored: int
    accuracy: float
    interval: tuple[float, float]
    chance: float
    position: Bins | None
    roles: tuple[str, ...]
    role: Bins | None

    def describe(self) -> Words:
        """Say where accuracy is best and worst, if the intervals tell them apart."""
        kinds = [
            kind
            for kind, part in (("position", self.position), ("role", self.role))
            if part is not None
        ]
        accuracy, low, high = percents(self.accuracy, *self.interval)
        parts = []
        if self.position is not None:
            parts.append(describe_contrast(self.position, "position", "positions"))
        if self.role is not None:
            names = [f"“{role}”" for role in self.roles]
            undecided = f"{join_names(names)} cannot be told apart"
            parts.append(describe_extremes(self.role, names) or undecided)
        says = (
            f"{accuracy} of {self.scored:,} answers in {self.rows:,} rows are right ({low} to "
            f"{high}; chance {percent(self.chance)}): {'; '.join(parts)}."
        )
        reading = (
            "Bands and whiskers are 95 % intervals: the wider of Wilson's and of a bootstrap over "
            "whole rows. Best and worst are named only where they differ by more than the 95 % "
            "interval of a difference, widened for the number of pairs that could be compared."
        )
        if self.role is None:
            reading += f" All scored positions have the role {self.roles[0]}."
        title = f"Accuracy by {' and by '.join(kinds)}"
        return Words(title, says, reading, f"Accuracy at the scored positions. {says}")

    def draw(self) -> go.Figure:
        """Draw a line over the positions, and below it a dot for each role."""
        heights = [PANEL] * (self.position is not None)
        heights += [LINE * (len(self.roles) + 1)] * (self.role is not None)
        inside = sum(heights) + GAP * (len(heights) - 1)
        fig = make_subplots(
            rows=len(heights),
            cols=1,
            row_heights=heights,
            vertical_spacing=GAP / inside if len(heights) > 1 else 0,
            figure=style.new_figure(height=84 + inside + 48),
        )
        if self.position is not None:
            middle = (self.position.first + self.position.last) / 2
            add_bins(fig, self.position, middle, self.chance, "by position", row=1)
            fig.update_yaxes(
                range=[-0.05, 1.05], tickformat=".0%", title_text="accuracy", row=1, col=1
            )
            fig.update_xaxes(title_text="position in the row", showgrid=False, row=1, col=1)
        if self.role is not None:
            self._add_roles(fig, self.role, row=len(heights))
        return fig.update_layout(margin={"t": 84, "b": 48})

    def _add_roles(self, fig: go.Figure, role: Bins, row: int) -> None:
        """Add a dot with a whisker for each role, the first on top."""
        lines = list(range(len(self.roles)))
        fig.add_scatter(
            x=[self.chance] * 2,
            y=[-0.5, lines[-1] + 0.5],
            mode="lines",
            line={"color": style.MUTED, "width": 1.2, "dash": "dot"},
            name="chance",
            showlegend=self.position is None,
            hovertemplate="chance: %{x:.2%}<extra></extra>",
            row=row,
            col=1,
        )
        fig.add_scatter(
            x=role.accuracy,
            y=lines,
            mode="markers",
            marker={"symbol": "square", "size": 9, "color": style.GREEN},
            error_x=style.make_whiskers(role.accuracy, role.interval),
            name="by role",
            cliponaxis=False,
            customdata=[
                f"{html.escape(name)}: {percent(float(share))} of {count:,} answers"
                for name, share, count in zip(self.roles, role.accuracy, role.count, strict=True)
            ],
            hovertemplate="%{customdata}<extra></extra>",
            row=row,
            col=1,
        )
        fig.update_xaxes(
            range=[-0.02, 1.02], tickformat=".0%", title_text="accuracy", row=row, col=1
        )
        name_lines(fig, [html.escape(name) for name in self.roles], row=row, col=1)


def measure(subject: Subject) -> list[AccuracyByPlace]:
    """Measure accuracy by position and by role.

    Raises:
        NotApplicableError: where no position is scored, or only one in all rows.
    """
    batch, rng = subject.batch, np.random.default_rng(subject.seed)
    found = scored(subject.model, batch)
    if not len(found.rows):
        raise NotApplicableError("no position is scored")
    right, rows, positions, roles = (
        part.cpu().numpy()
        for part in (
            found.right,
            found.rows,
            found.positions,
            batch.roles[found.rows, found.positions],
        )
    )
    kinds, places = np.unique(roles), np.unique(positions)
    if len(places) == 1 and len(kinds) == 1:
        name = subject.task.role_names[kinds[0]]
        raise NotApplicableError(
            f"every row is scored at position {places[0]} alone, whose role is {name}"
        )
    by_position = by_role = None
    if len(places) > 1:
        width = math.ceil((places[-1] + 1 - places[0]) / MOST_BINS)
        edges = np.arange(places[0], places[-1] + width + 1, width)
        by_position = bin_accuracy(positions, edges, right, rows, rng)
    if len(kinds) > 1:
        # Every role is a bin of its own.
        by_role = bin_accuracy(roles, np.arange(kinds[-1] + 2), right, rows, rng)
    return [
        AccuracyByPlace(
            rows=len(batch.inputs),
            scored=len(right),
            accuracy=float(right.mean()),
            interval=bound_share(right, rows, rng),
            chance=subject.task.chance,
            position=by_position,
            roles=tuple(subject.task.role_names[role] for role in kinds),
            role=by_role,
        )
    ]
