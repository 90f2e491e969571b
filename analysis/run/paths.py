"""The quantities of a run by training step, and when each of them changes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Int, Real
from plotly.subplots import make_subplots

from analysis.base import Finding, NotApplicableError, Subject, Words
from analysis.plots import style
from analysis.run.curves import LEAST_LOSS
from analysis.run.quantities import LOSS
from analysis.run.trajectories import Series, choose_steps, follow, take_few_rows
from analysis.statistics.change_points import (
    FALSE_ALARMS,
    FEWEST,
    Change,
    estimate_noise_bound,
    find_change_point,
    moves,
)
from analysis.words import capitalize, join_names, name_head, percent

FIRST = 0.5
"""Where step 0 stands on a logarithmic axis."""
PANEL, GAP, TOP, BOTTOM = 76, 30, style.HEAD + 24, 50
"""Heights of a panel, between panels, above the first and below the last, px."""
CRITERION = (
    "A quantity moves if it changes by a tenth or more, in shares of 1 or in nats. The move has a "
    "time if its two levels are further apart than in all but "
    f"{100 * FALSE_ALARMS:.0f} % of random walks, and of white noise."
)
"""What counts as a change, for the reader."""


@dataclass(frozen=True)
class QuantityPath:
    """A quantity by training step, layer by layer.

    Attributes:
        series: one for each layer; a single one for the model's loss and accuracy.
        changes: when each changes; None where it does not, or at no definite time.
        leading: index of the series that changes most; if none does, of the one that moves most.
    """

    series: tuple[Series, ...]
    changes: tuple[Change | None, ...]
    leading: int

    @property
    def lead(self) -> Series:
        """The series that changes most."""
        return self.series[self.leading]

    @property
    def change(self) -> Change | None:
        """When that one changes."""
        return self.changes[self.leading]

    @property
    def moved(self) -> bool:
        """Whether that one moves, if only gradually."""
        return moves(self.lead.levels)

    @property
    def dated(self) -> str:
        """Name of what is searched for a change."""
        return self.lead.dated or self.lead.quantity

    def describe(self) -> str:
        """Say from where to where the quantity goes, and what it would be without learning."""
        one = self.lead
        name = one.quantity if one.layer is None else f"{one.quantity} of layer {one.layer}"
        ends = [_format(one, one.values[i]) for i in (0, -1)]
        says = f"{name} goes from {ends[0]} to {ends[1]}"
        return says if one.null is None else f"{says} ({one.null_name} {_format(one, one.null)})"


@dataclass(frozen=True)
class Paths(Finding):
    """All quantities that apply to a run, by training step.

    Attributes:
        steps: whose weights were measured, ascending from 0.
        rows: of the test split, the same at every step.
        paths: one for each quantity.
    """

    steps: Int[np.ndarray, " n"]
    rows: int
    paths: tuple[QuantityPath, ...]

    def describe(self) -> Words:
        """Say which quantities change, and from where to where."""
        dated = [path.describe() for path in self.paths if path.change is not None]
        vague = [path for path in self.paths if path.change is None and path.moved]
        last, every = f"step {self.steps[-1]:,}", join_names([path.dated for path in self.paths])
        gist = ""
        if dated:
            said = [f"up to {last}, {dated[0]}", *dated[1:]]
            changing = [path.dated for path in self.paths if path.change is not None]
            verb = "makes" if len(changing) == 1 else "each make"
            gist = f"{capitalize(join_names(changing))} {verb} one clear change by {last}."
        elif vague:
            said = [f"none of {every} makes one clear change by {last}"]
        else:
            said = [f"none of {every} moves by a tenth up to {last}"]
        for path in vague:
            what = f"{path.lead.dated} moves " if path.lead.dated else ""
            said.append(f"{path.describe()}, but {what}at no definite time")
        says = ". ".join(map(capitalize, said))
        rows = "1 test row" if self.rows == 1 else f"{self.rows} test rows"
        reading = (
            f"The weights of {len(self.steps)} steps, all on the same {rows}. Thick: the layer "
            "that changes most; thin: the others. Diamond and band: when it changes, and between "
            "which steps that is. The change is the split into two levels of least squared "
            "distance over log(1 + step). Dotted: chance, or a uniform guess or row. The change of "
            "the loss is that of e^−loss, the geometric mean of the right answers' probabilities. "
            f"{CRITERION}"
        )
        names = ", ".join(path.lead.quantity for path in self.paths)
        title, alt = "Quantities by training step", f"Lines of {names} by step. {says}."
        return Words(title, f"{says}.", reading, alt, gist=gist)

    def draw(self) -> go.Figure:
        """Draw a panel for each quantity over one axis of steps."""
        count = len(self.paths)
        inside = count * PANEL + (count - 1) * GAP
        fig = make_subplots(
            rows=count,
            cols=1,
            shared_xaxes=True,
            vertical_spacing=GAP / inside,
            figure=style.new_figure(height=TOP + inside + BOTTOM),
        )
        x = place_steps(self.steps)
        for row, path in enumerate(self.paths, 1):
            for i, series in enumerate(path.series):
                leads = i == path.leading
                where = "" if series.layer is None else f"layer {series.layer}, "
                value = {"share": ".1%", "nats": ".3~g", "number": ".1f"}[series.unit]
                color = style.BLUE if leads else style.MUTED
                fig.add_scatter(
                    x=x,
                    y=series.values.astype(np.float32),
                    customdata=self.steps,
                    mode="lines",
                    line={"color": color, "width": 2.2 if leads else 1.2},
                    hovertemplate=f"{where}step %{{customdata:,}}: %{{y:{value}}}<extra></extra>",
                    row=row,
                    col=1,
                )
            _add_marks(fig, path, self.steps, row)
            _scale_panel(fig, path, row)
        fig.update_xaxes(**format_log_axis(int(self.steps[-1])))
        fig.update_xaxes(title_text="training step", row=count, col=1)
        return fig.update_layout(showlegend=False, margin={"l": 50, "t": TOP, "b": BOTTOM})


def trace(subject: Subject) -> Paths:
    """Follow the quantities of a run by step, and date their changes.

    Raises:
        NotApplicableError: without a run, or with too few kept steps.
        RunError: when kept weights cannot be read.
    """
    if subject.run is None:
        raise NotApplicableError("no run, so no weights of earlier steps")
    steps = choose_steps(subject.run)
    if len(steps) < FEWEST:
        count = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
        raise NotApplicableError(f"weights of {count} are kept, fewer than {FEWEST}")
    batch = take_few_rows(subject)
    bound = estimate_noise_bound(steps, np.random.default_rng(subject.seed))
    return date_changes(follow(subject, batch, steps), steps, len(batch.inputs), bound)


def date_changes(
    followed: Sequence[Series], steps: Int[np.ndarray, " n"], rows: int, bound: float
) -> Paths:
    """Group series by quantity and date their changes; see `find_change_point` for the bound."""
    paths = []
    for quantity in dict.fromkeys(series.quantity for series in followed):
        series = tuple(one for one in followed if one.quantity == quantity)
        changes = tuple(
            find_change_point(steps, one.levels, bound, one.resampled) for one in series
        )
        paths.append(QuantityPath(series, changes, _find_leading(series, changes)))
    return Paths(steps, rows, tuple(paths))


def _find_leading(series: Sequence[Series], changes: Sequence[Change | None]) -> int:
    """Return which series has the largest change; without changes, which has the widest range."""
    if any(changes):
        return int(np.argmax([0.0 if change is None else change.size for change in changes]))
    return int(np.argmax([np.ptp(one.levels) for one in series]))


def format_bracket(change: Change) -> str:
    """Return between which steps a change lies, as text."""
    return f"steps {change.low:,} to {change.high:,}"


def place_steps(steps: Real[np.ndarray, " n"]) -> list[float]:
    """Return where steps stand on a logarithmic axis; step 0 stands at `FIRST`."""
    return np.maximum(steps, FIRST).tolist()


def format_log_axis(last: int, first: float = 0.0) -> dict[str, Any]:
    """Return the settings of a logarithmic axis of training steps.

    `analysis.plots.steps` spaces steps by log₂(step + 1) from step 0. This axis has decades as
    ticks and may begin later, so that changes near the end of training stay apart.

    Args:
        last: the last step.
        first: where the axis begins.
    """
    low, high = math.log10(max(first, FIRST)), math.log10(max(last, 1))
    # Decades only, if there are several; otherwise also their doubles and fives.
    parts = (1,) if high - low > 2 else (1, 2, 5)
    ticks = [part * 10**k for k in range(math.floor(high) + 1) for part in parts]
    return {
        "type": "log",
        "range": [low - 0.02 * (high - low) - 0.02, high + 0.02 * (high - low) + 0.02],
        "tickvals": [FIRST, *ticks],
        "ticktext": ["0", *(f"{tick:,}" for tick in ticks)],
    }


def _add_marks(fig: go.Figure, path: QuantityPath, steps: Int[np.ndarray, " n"], row: int) -> None:
    """Name a panel, and mark the change of its leading layer by a band and a diamond."""
    series, change = path.lead, path.change
    k = "" if row == 1 else str(row)
    text = f"<b>{series.quantity}</b>, {series.axis}"
    if series.layer is not None:
        layer, head = series.layer, series.head
        text += f" · {f'layer {layer}' if head is None else name_head(layer, head)}"
    still = "moves, at no definite time" if path.moved else "changes by less than a tenth"
    dated = f"{series.dated}: " if series.dated else ""
    text += f" · {dated}{format_bracket(change) if change else still}"
    fig.add_annotation(
        text=text,
        x=0,
        xref=f"x{k} domain",
        xanchor="left",
        y=1,
        yref=f"y{k} domain",
        yanchor="bottom",
    )
    if series.null is not None:
        fig.add_shape(
            type="line",
            x0=0,
            x1=1,
            xref=f"x{k} domain",
            y0=series.null,
            y1=series.null,
            yref=f"y{k}",
            line={"color": style.MUTED, "width": 1.2, "dash": "dot"},
            layer="below",
        )
    if change is None:
        return
    low, high = place_steps(np.array([change.low, change.high]))
    fig.add_shape(
        type="rect",
        x0=low,
        x1=high,
        xref=f"x{k}",
        y0=0,
        y1=1,
        yref=f"y{k} domain",
        fillcolor=style.VERMILLION,
        opacity=0.25,
        line_width=0,
        layer="below",
    )
    height = np.interp(np.log2(1 + change.step), np.log2(1.0 + steps), series.values)
    fig.add_scatter(
        x=place_steps(np.array([change.step])),
        y=[height],
        mode="markers",
        marker={"symbol": "diamond", "size": 9, "color": style.VERMILLION},
        hovertemplate=f"changes in {format_bracket(change)}<extra></extra>",
        row=row,
        col=1,
    )


def _scale_panel(fig: go.Figure, path: QuantityPath, row: int) -> None:
    """Scale the axis of a panel: shares from 0 to 1, the loss by decades, the rest from 0."""
    values = np.concatenate([series.values for series in path.series])
    unit, name = path.lead.unit, path.lead.quantity
    if unit == "share":
        settings = {"range": [-0.05, 1.05], "tickvals": [0, 0.5, 1], "tickformat": ".0%"}
    elif name == LOSS.name:
        low, high = np.log10(np.maximum([values.min(), values.max()], LEAST_LOSS))
        settings = {"type": "log", "range": [low - 0.2, high + 0.2], "tickformat": "~g"}
        settings["dtick"] = max(1, math.ceil((high - low) / 3))
    else:
        settings = {"range": [-0.05 * values.max(), 1.1 * values.max() or 1.0], "nticks": 4}
    fig.update_yaxes(**settings, row=row, col=1)


def _format(series: Series, value: float) -> str:
    if series.unit == "share":
        return percent(float(value))
    return f"{value:.3g} nats" if series.unit == "nats" else f"{value:.1f}"
