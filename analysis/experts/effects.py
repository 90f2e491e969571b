"""What deleting experts changes in a model's answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Bool
from torch import Tensor

from analysis.experts.sites import Site
from analysis.plots import style
from analysis.statistics.intervals import bootstrap_ratio
from analysis.words import format_ends

SLIGHT = 0.01
"""Change of loss that is negligible, nats: the right answers' probability changes by 1 %."""


@dataclass(frozen=True)
class AnswerChange:
    """What a deletion changes, means over the scored positions with 95 % intervals over rows.

    Attributes:
        loss: change of the loss, nats; above 0 if the experts were needed.
        loss_interval: its ends; NaN for a single row.
        accuracy: change of the accuracy, a share; below 0 if the experts were needed.
        accuracy_interval: likewise.
    """

    loss: float
    loss_interval: tuple[float, float]
    accuracy: float
    accuracy_interval: tuple[float, float]

    @property
    def harmful(self) -> bool:
        """Whether the deletion certainly raises the loss, and by more than a negligible amount."""
        return self.loss_interval[0] > 0 and self.loss >= SLIGHT

    @property
    def negligible(self) -> bool:
        """Whether the deletion certainly changes the loss by no more than a negligible amount."""
        low, high = self.loss_interval
        return low >= -SLIGHT and high <= SLIGHT

    def describe(self) -> str:
        """Say how loss and accuracy change."""
        ends = format_ends(*self.accuracy_interval, lambda end: f"{100 * end:+.1f}")
        points = f"{100 * self.accuracy:+.1f} {ends} points"
        return f"{self.describe_loss()} and the accuracy by {points}"

    def describe_loss(self) -> str:
        """Say how the loss changes."""
        ends = format_ends(*self.loss_interval, format_change)
        return f"changes the loss by {format_change(self.loss)} {ends} nats"


def measure_changes(
    site: Site,
    deleted: Bool[Tensor, "b t h k"],
    rng: np.random.Generator,
    role_names: Sequence[str] = (),
) -> dict[str, AnswerChange]:
    """Measure what a deletion changes: over all scored positions, "", and over each role's."""
    outcome = site.delete(deleted)
    loss = (outcome.losses - site.whole.losses).double().cpu().numpy()
    right = (outcome.right.int() - site.whole.right.int()).double().cpu().numpy()
    rows = site.clean.rows.cpu().numpy()
    roles = site.batch.roles[site.clean.rows, site.clean.positions].cpu().numpy()
    parts = {"": np.ones(len(rows), dtype=bool)}
    parts |= {role: roles == i for i, role in enumerate(role_names) if (roles == i).any()}

    def mean(values: np.ndarray, part: np.ndarray) -> tuple[float, tuple[float, float]]:
        # Rows are resampled whole: each by the sum and the number of its positions.
        sums = np.bincount(rows[part], values[part])
        sizes = np.bincount(rows[part])
        by_row = np.stack([sums, sizes], axis=1)[sizes > 0]
        return float(values[part].mean()), bootstrap_ratio(by_row, rng)

    return {
        name: AnswerChange(*mean(loss, part), *mean(right, part)) for name, part in parts.items()
    }


def format_change(value: float) -> str:
    """Return a change of loss as text, with two decimals or two digits."""
    return f"{value:+.2f}" if abs(value) >= 0.1 else f"{value:+.2g}"


def add_changes(
    fig: go.Figure,
    y: Sequence[str | float],
    changes: Sequence[AnswerChange],
    look: dict[str, Any],
) -> None:
    """Add a dot with a whisker for each change of loss."""
    loss = np.array([change.loss for change in changes])
    ends = np.array([change.loss_interval for change in changes]).reshape(-1, 2)
    fig.add_scatter(
        x=loss,
        y=y,
        mode="markers",
        error_x=style.make_whiskers(loss, ends, thickness=1.3, width=3),
        hovertemplate="%{customdata}: %{x:+.3g} nats<extra></extra>",
        **look,
    )
