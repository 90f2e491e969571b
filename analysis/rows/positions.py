"""Where in the row is it right? Accuracy by position, and by the role of the scored token."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Curves, Line, curves
from analysis.scoring import Scored, scored
from analysis.statistics.comparisons import (
    Bins,
    bin_accuracy,
    describe_contrast,
    describe_extremes,
    format_span,
)
from analysis.words import percent, percents
from lab.intervals import Z95, bound_share
from lab.suite.audit import list_predictors
from tasks.base import Predictor

__all__ = ["TITLE", "AccuracyByPlace", "measure"]

TITLE = "Where in the row is it right?"
WORST = 1.5
"""Upper end of the axis of errors, as a multiple of the error of answering zero."""
MOST_BINS = 16
"""Maximum number of bins of positions."""


@dataclass(frozen=True)
class AccuracyByPlace(Finding):
    """Accuracy by position in the row and by role.

    Attributes:
        position: accuracy by position in the row, from 0; None where all are at one position.
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

    title = "Accuracy by position in the row and by role"
    reading = (
        "Bands and whiskers are 95 % intervals: the wider of Wilson's and of a bootstrap over "
        "whole rows. Best and worst are named only where they differ by more than the 95 % "
        "interval of a difference, widened for the number of pairs that could be compared."
    )

    @property
    def says(self) -> str:
        """Where accuracy is best and worst, if the intervals tell them apart."""
        parts = []
        if self.position is not None:
            parts.append(describe_contrast(self.position, "position", "positions"))
        if self.role is not None:
            apart = describe_extremes(self.role, [f"“{role}”" for role in self.roles])
            parts.append(apart or "no role stands out")
        right, chance = percent(self.accuracy), percent(self.chance)
        return f"{right} of the answers are right (chance: {chance}): {'; '.join(parts)}."

    def numbers(self) -> Table:
        """Return accuracy over all answers, and by role."""
        found = [("all", self.accuracy, self.interval, self.scored)]
        if (role := self.role) is not None:
            found += zip(self.roles, role.accuracy, role.interval, role.count, strict=True)
        rows = []
        for name, share, ends, count in found:
            right, low, high = percents(share, *ends)
            rows.append((name, right, f"{low} to {high}", f"{count:,}"))
        return Table(("role", "right", "95 %", "answers"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a line over the positions, and below it a dot for each role."""
        y, chance, panels = Axis("accuracy", "share"), {"chance": self.chance}, []
        if (found := self.position) is not None:
            middle = (found.first + found.last) / 2
            notes = [f"{format_span(found, i)}, {n:,} answers" for i, n in enumerate(found.count)]
            line = Line("by position", middle, found.accuracy, found.interval, "band", notes=notes)
            panels.append(
                Curves([line], y, levels=chance, x=Axis("position in the row"), height=200)
            )
        if (found := self.role) is not None:
            x = Axis("role", ticks=dict(enumerate(self.roles)), ends=(-0.5, len(self.roles) - 0.5))
            notes = [f"{n:,} answers" for n in found.count]
            places = np.arange(len(self.roles))
            dots = Line("by role", places, found.accuracy, found.interval, "points", notes=notes)
            panels.append(Curves([dots], y, levels=chance, x=x, height=140))
        return curves(panels, Axis())


@dataclass(frozen=True)
class ErrorByPosition(Finding):
    """Squared error by position in the row, of answers that are numbers.

    Attributes:
        positions: those that are scored, from 0.
        error: the mean over rows at each.
        interval: 95 %, normal, over rows.
        rules: the same of the oracle and of each shortcut, by name.
        blind: that of answering zero, over all positions.
    """

    rows: int
    positions: Int[np.ndarray, " n"]
    error: Float[np.ndarray, " n"]
    interval: Float[np.ndarray, "n 2"]
    rules: dict[str, Float[np.ndarray, " n"]]
    blind: float

    title = "Squared error by position in the row"
    reading = (
        "Means over test rows; the band is the 95 % interval of the model's. The oracle's error is "
        "the least that is possible; the dotted line is that of answering zero. What lies above "
        "the figure is worse than that."
    )

    @property
    def says(self) -> str:
        """The model's error beside the oracle's, at the first and the last position."""
        oracle = self.rules["oracle"]
        ends = [
            f"{self.error[i]:.3f} at position {self.positions[i]:,} (oracle {oracle[i]:.3f})"
            for i in sorted({0, len(self.positions) - 1})
        ]
        return f"The squared error is {' and '.join(ends)}; answering zero has {self.blind:.3f}."

    def numbers(self) -> Table:
        """Return the errors over all positions."""
        means = {"model": self.error, **self.rules}
        rows = [(name, f"{found.mean():.3f}") for name, found in means.items()]
        return Table(("rule", "squared error"), (*rows, ("zero", f"{self.blind:.3f}")))

    def figure(self) -> go.Figure:
        """Draw the errors of the model and of each rule over the positions."""
        y = Axis("squared error", ends=(-0.03 * self.blind, WORST * self.blind))
        lines = [Line("model", self.positions, self.error, self.interval, "band")]
        lines += [Line(name, self.positions, error) for name, error in self.rules.items()]
        panel = Curves(lines, y, levels={"zero": self.blind}, height=300)
        return curves([panel], Axis("position in the row"))


def measure(subject: Subject) -> "list[AccuracyByPlace] | list[ErrorByPosition]":
    """Measure accuracy by position and by role; by position the error of answers that are numbers.

    Raises:
        NotApplicableError: where no position is scored, or only one in all rows.
    """
    batch, rng = subject.batch, np.random.default_rng(subject.seed)
    found = scored(subject.model, batch)
    if not len(found.rows):
        raise NotApplicableError("no position is scored")
    if subject.task.vectors:
        return [_measure_errors(subject, found)]
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


def _measure_errors(subject: Subject, found: Scored) -> ErrorByPosition:
    """Measure the squared error at each scored position, of the model and of the task's rules."""
    batch, places = subject.batch, (found.rows, found.positions)
    positions, column = found.positions.unique(return_inverse=True)
    column, count = column.cpu().numpy(), np.bincount(column.cpu().numpy())

    def average(values: np.ndarray) -> np.ndarray:
        return np.bincount(column, values) / count

    def square(answers: Tensor) -> np.ndarray:
        return (answers - found.targets).double().square().mean(-1).cpu().numpy()

    own = square(found.answers)
    error = average(own)
    spread = np.sqrt(average((own - error[column]) ** 2) / np.maximum(1, count - 1))
    rules = {
        name: average(square(predict(batch)[places]))
        for name, predict in sorted(list_predictors(subject.task).items(), key=_put_oracle_first)
    }
    return ErrorByPosition(
        rows=len(batch.inputs),
        positions=positions.cpu().numpy(),
        error=error,
        interval=error[:, None] + Z95 * spread[:, None] * np.array([-1, 1]),
        rules=rules,
        blind=float(square(torch.zeros_like(found.targets)).mean()),
    )


def _put_oracle_first(rule: tuple[str, Predictor]) -> bool:
    return rule[0] != "oracle"
