"""Where in the row is it right? Accuracy by position, and by the role of what is asked."""

import html
import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.base import NotApplicableError, Subject, Words
from analysis.plots import style
from analysis.plots.binned import add_bins
from analysis.scoring import scored
from analysis.statistics.binned import Bins, bin_accuracy, describe_contrast, describe_extremes
from analysis.statistics.intervals import bound_share
from analysis.words import percent

TITLE = "Where in the row is it right?"
MOST_BINS = 16
TITLES = {
    (True, True): "Accuracy by position and by role",
    (True, False): "Accuracy by position",
    (False, True): "Accuracy by role",
}


@dataclass(frozen=True)
class Placed:
    """Accuracy by where the scored positions are, and by what they are.

    Attributes:
        rows: how many were looked at.
        scored: positions of them that are scored.
        accuracy: share of right answers, in [0, 1].
        interval: 95 %, low and high.
        chance: accuracy of a uniform guess.
        position: accuracy by position in the row, from 0; None where all are scored at one.
        roles: names of the roles that are scored.
        role: accuracy by role, in the order of `roles`; None where there is one.
    """

    rows: int
    scored: int
    accuracy: float
    interval: tuple[float, float]
    chance: float
    position: Bins | None
    roles: tuple[str, ...]
    role: Bins | None


def measure(subject: Subject) -> list[Placed]:
    """Return accuracy by position and by role.

    Raises:
        NotApplicableError: where every row is scored at the same single position.
    """
    batch, rng = subject.batch, np.random.default_rng(subject.seed)
    found = scored(subject.model, batch)
    if not len(found.rows):
        raise NotApplicableError("no position is scored")
    right, rows, positions, roles = (
        of.cpu().numpy()
        for of in (
            found.right,
            found.rows,
            found.positions,
            batch.roles[found.rows, found.positions],
        )
    )
    there = np.unique(roles)
    places = np.unique(positions)
    if len(places) == 1 and len(there) == 1:
        name = subject.task.role_names[there[0]]
        raise NotApplicableError(
            f"every row is scored at position {places[0]} alone, whose role is {name}"
        )
    by_position = by_role = None
    if len(places) > 1:
        width = math.ceil((places[-1] + 1 - places[0]) / MOST_BINS)
        edges = np.arange(places[0], places[-1] + width + 1, width)
        by_position = bin_accuracy(positions, edges, right, rows, rng)
    if len(there) > 1:
        # Roles are numbers of a bin each.
        by_role = bin_accuracy(roles, np.arange(there[-1] + 2), right, rows, rng)
    return [
        Placed(
            rows=len(batch.inputs),
            scored=len(right),
            accuracy=float(right.mean()),
            interval=bound_share(right, rows, rng),
            chance=subject.task.chance,
            position=by_position,
            roles=tuple(subject.task.role_names[role] for role in there),
            role=by_role,
        )
    ]


def describe(found: Placed) -> Words:
    """Say where accuracy is best and worst, where that can be told."""
    title = TITLES[found.position is not None, found.role is not None]
    low, high = found.interval
    says = f"{percent(found.accuracy)} of the answers are right ({percent(low)} to "
    says += f"{percent(high)}; chance {percent(found.chance)}): "
    parts = []
    if found.position is not None:
        parts.append(describe_contrast(found.position, "position", "positions"))
    if found.role is not None:
        names = [f"“{role}”" for role in found.roles]
        parts.append(describe_extremes(found.role, names) or f"{_listed(names)} are not told apart")
    says += "; ".join(parts) + "."
    reading = (
        f"{found.scored:,} answers of {found.rows} rows. Bands and whiskers are 95 %, the wider "
        "of Wilson's interval and of one that resamples whole rows; best and worst are named only "
        "where theirs do not meet."
    )
    if found.role is None:
        reading += f" All scored positions have the role {found.roles[0]}."
    return Words(title, says, reading, f"Accuracy at the scored positions. {says}")


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def draw(found: Placed) -> go.Figure:
    """Draw a line over positions, and below it a dot a role."""
    panels = [part for part in (found.position, found.role) if part is not None]
    heights = {"position": 200, "role": 28 * (len(found.roles) + 1)}
    kept = [
        heights[name]
        for name, part in (("position", found.position), ("role", found.role))
        if part is not None
    ]
    gap = 66
    inside = sum(kept) + gap * (len(panels) - 1)
    fig = make_subplots(
        rows=len(panels),
        cols=1,
        row_heights=kept,
        vertical_spacing=gap / inside if len(panels) > 1 else 0,
        figure=style.new_figure(height=84 + inside + 48),
    )
    if found.position is not None:
        middle = (found.position.first + found.position.last) / 2
        add_bins(fig, found.position, middle, found.chance, "by position", row=1)
        fig.update_yaxes(range=[-0.05, 1.05], tickformat=".0%", title_text="accuracy", row=1, col=1)
        fig.update_xaxes(title_text="position in the row", showgrid=False, row=1, col=1)
    if found.role is not None:
        _add_roles(fig, found, found.role, row=len(panels))
    return fig.update_layout(margin={"t": 84, "b": 48})


def _add_roles(fig: go.Figure, found: Placed, role: Bins, row: int) -> None:
    """Add a dot with a whisker for each role, the first on top."""
    lines = list(range(len(found.roles)))
    fig.add_scatter(
        x=[found.chance] * 2,
        y=[-0.5, lines[-1] + 0.5],
        mode="lines",
        line={"color": style.MUTED, "width": 1.2, "dash": "dot"},
        name="chance",
        showlegend=found.position is None,
        hovertemplate="chance: %{x:.2%}<extra></extra>",
        row=row,
        col=1,
    )
    fig.add_scatter(
        x=role.accuracy,
        y=lines,
        mode="markers",
        marker={"symbol": "square", "size": 9, "color": style.GREEN},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": role.interval[:, 1] - role.accuracy,
            "arrayminus": role.accuracy - role.interval[:, 0],
            "thickness": 1.5,
            "width": 5,
        },
        name="by role",
        cliponaxis=False,
        customdata=[
            f"{html.escape(name)}: {percent(float(share))} of {count:,} answers"
            for name, share, count in zip(found.roles, role.accuracy, role.count, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        row=row,
        col=1,
    )
    fig.update_xaxes(range=[-0.02, 1.02], tickformat=".0%", title_text="accuracy", row=row, col=1)
    fig.update_yaxes(
        range=[lines[-1] + 0.6, -0.6],
        tickvals=lines,
        ticktext=[html.escape(name) for name in found.roles],
        showgrid=False,
        automargin="left",
        row=row,
        col=1,
    )
