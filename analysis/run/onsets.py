"""In which order quantities change, in one run or in several."""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.plots import style
from analysis.run.paths import (
    BOTTOM,
    CRITERION,
    Paths,
    format_bracket,
    format_log_axis,
    place_steps,
)
from analysis.statistics.change_points import Change
from analysis.words import capitalize, join_names

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")
"""Markers of the runs, in turn."""


@dataclass(frozen=True)
class Onset:
    """When a quantity changes in a run.

    Attributes:
        quantity: name of what is dated.
        layer: the block where it changes most; None for the model as a whole.
        change: None where it changes by less than a tenth, or at no definite time.
        moved: whether its values move by a tenth, which tells these two cases apart.
    """

    quantity: str
    layer: int | None
    change: Change | None
    moved: bool


@dataclass(frozen=True)
class Onsets(Finding):
    """When the quantities change.

    Attributes:
        runs: the name of each run; a single one needs none.
        onsets: for each run, one onset for each quantity that applies to it.
        last_step: the last step that was measured in any run.
    """

    runs: tuple[str, ...]
    onsets: tuple[tuple[Onset, ...], ...]
    last_step: int

    @property
    def changes(self) -> list[dict[str, Change]]:
        """Each run's changes by quantity."""
        return [{o.quantity: o.change for o in run if o.change} for run in self.onsets]

    @property
    def order(self) -> list[str]:
        """The quantities that change in any run, by the median of their steps."""
        steps: dict[str, list[float]] = {}
        for run in self.changes:
            for name, change in run.items():
                steps.setdefault(name, []).append(change.step)
        return sorted(steps, key=lambda name: float(np.median(steps[name])))

    def describe(self) -> Words:
        """Say in which order the quantities change, or in how many runs the order agrees."""
        runs = len(self.runs)
        says = _describe_order(self.onsets[0]) if runs == 1 else self._describe_agreement()
        reading = (
            "The dot is half-way from one level to the other. The thick line spans the kept steps "
            "between which that point lies, also on resampled rows (95 %). The thin line goes "
            "from a tenth of the change to nine tenths. Where "
            "thick lines overlap, the order is not decided. The order belongs to what is named: "
            "e^−loss is the geometric mean of the right answers' probabilities, and the loss in "
            f"nats is half-way at another step. {CRITERION}"
        )
        if runs > 1:
            all_runs = "both runs" if runs == 2 else f"all {runs} runs"
            reading += (
                f" By chance, two changes come in the same order in {all_runs} once in "
                f"{2 ** (runs - 1)} times."
            )
        title = "In which order things change" + (f", {runs} runs" if runs > 1 else "")
        return Words(title, says, reading, f"Dots on an axis of steps, a row a quantity. {says}")

    def _describe_agreement(self) -> str:
        """Say what comes before what in how many runs, in the order of the medians."""
        changes = self.changes
        groups: dict[tuple[str, str], list[str]] = {}
        undecided = 0
        for first, second in itertools.combinations(self.order, 2):
            both = [run for run in changes if first in run and second in run]
            before = sum(run[first].precedes(run[second]) for run in both)
            after = sum(run[second].precedes(run[first]) for run in both)
            undecided += before + after < max(1, len(both))
            if before or after:
                often = f"in {before} of {len(both)} runs"
                if before == len(both) == 1:
                    often = "in the one run in which both change"
                often += f", after in {after}" if after else ""
                groups.setdefault((first, often), []).append(second)
        if not groups:
            return "In no run is the order of two changes decided."
        parts = [
            f"{first} before {join_names(names)} {often}"
            for (first, often), names in groups.items()
        ]
        rest = " All other orders are not decided." if undecided else ""
        return f"{capitalize('; '.join(parts))}.{rest}"

    def draw(self) -> go.Figure | None:
        """Draw a row for each quantity, the earliest on top; None where nothing changes."""
        names, runs = self.order, len(self.runs)
        if not names:
            return None
        pitch = max(34, 13 * runs + 12)
        top = style.HEAD + 20 * (1 + math.ceil(runs / 3))
        fig = style.new_figure(height=top + pitch * len(names) + BOTTOM)
        for i, (run, row, when) in enumerate(
            zip(self.runs, self.onsets, self.changes, strict=True)
        ):
            lower = (i - (runs - 1) / 2) * 13 / pitch
            heights = {name: k + lower for k, name in enumerate(names) if name in when}
            color = style.COLORS[i % len(style.COLORS)]
            bars: dict[str, list[float | None]] = {"rise": [], "bracket": []}
            for name in heights:
                change = when[name]
                ends = self.last_step if change.ends is None else change.ends
                bars["rise"] += [*place_steps(np.array([change.begins, ends])), None]
                bars["bracket"] += [*place_steps(np.array([change.low, change.high])), None]
            for name, width, opacity in (("rise", 1.4, 0.8), ("bracket", 13, 0.4)):
                fig.add_scatter(
                    x=bars[name],
                    y=[y for height in heights.values() for y in (height, height, None)],
                    mode="lines",
                    line={"width": width, "color": color},
                    opacity=opacity,
                    showlegend=False,
                    hoverinfo="skip",
                )
            notes = {onset.quantity: _format_note(run, onset) for onset in row if onset.change}
            fig.add_scatter(
                x=place_steps(np.array([when[name].step for name in heights], dtype=np.float64)),
                y=list(heights.values()),
                mode="markers",
                name=html.escape(run),
                marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 6, "color": color},
                customdata=[notes[name] for name in heights],
                hovertemplate="%{customdata}<extra></extra>",
            )
        begin = min(change.begins for run in self.changes for change in run.values())
        axis = format_log_axis(self.last_step, begin / 1.2)
        fig.update_xaxes(**axis, title_text="training step")
        fig.update_yaxes(
            tickvals=list(range(len(names))),
            ticktext=[self._label(name) for name in names],
            range=[len(names) - 0.4, -0.6],
            ticks="",
            showline=False,
            automargin="left",
        )
        return fig.update_layout(showlegend=runs > 1, margin={"t": top, "b": BOTTOM})

    def _label(self, name: str) -> str:
        """Return the name of a quantity, with its layer if all runs agree on it."""
        layers = {o.layer for run in self.onsets for o in run if o.quantity == name and o.change}
        [layer] = layers if len(layers) == 1 else [None]
        return name if layer is None else f"{name}, layer {layer}"


def find_onsets(paths: Paths) -> tuple[Onset, ...]:
    """Return when each quantity changes, in the layer where it changes most."""
    return tuple(
        Onset(path.dated, path.lead.layer, path.change, path.moved) for path in paths.paths
    )


def _describe_order(onsets: Sequence[Onset]) -> str:
    """Say in which order the quantities of a run change; undecided ones stand together."""
    dated = sorted(
        ((o.quantity, o.change) for o in onsets if o.change),
        key=lambda pair: (pair[1].step, pair[1].high),
    )
    still = [o.quantity for o in onsets if not o.moved]
    vague = [o.quantity for o in onsets if o.moved and not o.change]
    parts = []
    if vague:
        move = "moves" if len(vague) == 1 else "move"
        parts.append(f"{join_names(vague)} {move}, but at no definite time")
    if still and (dated or vague):
        change = "changes" if len(still) == 1 else "change"
        parts.append(f"{join_names(still)} {change} by less than a tenth")
    if not dated:
        nothing = f"Nothing moves by a tenth: neither {' nor '.join(still)}"
        return f"{'; '.join(parts) if vague else nothing}."
    tail = "".join(f"; {part}" for part in parts)
    groups: list[list[tuple[str, Change]]] = []
    for name, change in dated:
        if groups and not all(earlier.precedes(change) for _, earlier in groups[-1]):
            groups[-1].append((name, change))
        else:
            groups.append([(name, change)])
    spans = [_format_group(group) for group in groups]
    if len(spans) > 1:
        return f"First {', then '.join(spans)}{tail}."
    if len(dated) > 1:
        return f"The order is not decided between {spans[0]}{tail}."
    return f"Only {spans[0]} changes{' at a definite time' if vague else ''}{tail}."


def _format_group(group: Sequence[tuple[str, Change]]) -> str:
    """Return the names of quantities, and the steps that hold all their changes."""
    low = min(change.low for _, change in group)
    high = max(change.high for _, change in group)
    return f"{join_names([name for name, _ in group])} (steps {low:,} to {high:,})"


def _format_note(run: str, onset: Onset) -> str:
    assert onset.change is not None
    where = "" if onset.layer is None else f", layer {onset.layer}"
    text = f"{onset.quantity}{where}: {format_bracket(onset.change)}"
    return f"{html.escape(run)}<br>{text}" if run else text
