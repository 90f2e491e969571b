"""How did it get there? Loss and accuracy by training step."""

import html
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import NotApplicableError, Subject, Words
from analysis.plots.style import MUTED, new_figure
from analysis.run import baselines
from analysis.words import percent

TITLE = "Training"
POINTS = 1000
"""Most points of a training curve; a longer one is drawn as means of equal runs of steps."""

LEAST_LOSS = 1e-4
"""Nats at which the loss axis, logarithmic, ends."""


@dataclass(frozen=True)
class Curve:
    """A quantity by training step.

    Attributes:
        quantity: "loss" in nats, or "accuracy" in [0, 1].
        steps: the last step of each mean.
        train: mean over `window` steps, each its own training batch.
        window: steps a mean.
        held_out_steps: steps at which held-out rows, of the length then trained at, were evaluated.
        held_out: the quantity there.
        references: what the quantity is of rules that need no training, by name.
        stages: the first step at each row length, and that length.
    """

    quantity: Literal["loss", "accuracy"]
    steps: Int[np.ndarray, " n"]
    train: Float[np.ndarray, " n"]
    window: int
    held_out_steps: Int[np.ndarray, " m"]
    held_out: Float[np.ndarray, " m"]
    references: dict[str, float]
    stages: tuple[tuple[int, int], ...] = ()


def measure(subject: Subject) -> list[Curve]:
    """Return the curve of the loss and that of the accuracy.

    Raises:
        NotApplicableError: before the first step, or for a model that no run trained.
    """
    rows = [] if subject.run is None else subject.run.metrics()
    if subject.run is None or not rows:
        raise NotApplicableError("no training step on record")
    window = math.ceil(len(rows) / POINTS)
    starts = np.arange(0, len(rows), window)
    ends = np.minimum(starts + window, len(rows))
    steps = np.array([row["step"] for row in rows])[ends - 1]
    evaluated, stages, first = subject.run.evaluations(), [], rows[0]["step"]
    held_out_steps = np.array([row["step"] for row in evaluated], dtype=np.int64)
    for stage in subject.run.stages():
        stages.append((first, stage["seq_len"]))
        first += stage["steps"]
    scores = baselines.scores(subject.run)
    shortcuts = [name for name in scores if name not in ("chance", "oracle")]
    best = max(shortcuts, key=scores.__getitem__, default=None)
    references = {
        "loss": {"uniform guess": math.log(subject.task.vocab_size)},
        "accuracy": {
            "oracle": scores["oracle"],
            **({} if best is None else {best: scores[best]}),
            "chance": scores["chance"],
        },
    }
    curves = []
    for quantity in ("loss", "accuracy"):
        values = np.array([row[quantity] for row in rows], dtype=np.float64)
        means = np.add.reduceat(values, starts) / (ends - starts)
        curves.append(
            Curve(
                quantity,
                steps,
                means,
                window,
                held_out_steps,
                np.array([row[quantity] for row in evaluated], dtype=np.float64),
                references[quantity],
                tuple(stages),
            )
        )
    return curves


def describe(curve: Curve) -> Words:
    """Put a curve in words."""
    loss = curve.quantity == "loss"
    title = "Loss by training step" if loss else "Accuracy by training step"
    means = f", means of {curve.window} steps" if curve.window > 1 else ""
    reading = f"Thin line: training batches{means}. Thick line: held-out rows."
    if len(curve.stages) > 1:
        reading += " Dotted verticals: from there on, rows of the length written beside."
    if len(curve.held_out) == 0:
        value = _value(curve, curve.train[-1])
        says = f"No evaluation yet; the last training batch stands at {value}."
        return Words(title, says, reading, f"Line of {curve.quantity} by step. {says}")
    last = curve.held_out[-1]
    if len(curve.held_out) == 1:
        says = f"The held-out {curve.quantity} stands at {_value(curve, last)} after step "
        says += f"{curve.held_out_steps[-1]:,}; it was evaluated once."
        return Words(title, says, reading, f"Line of {curve.quantity} by step. {says}")
    if len(curve.stages) > 1:
        says = _growth(curve)
        return Words(title, says, reading, f"Line of {curve.quantity} by training step. {says}")
    says = f"The held-out {curve.quantity} goes from {_value(curve, curve.held_out[0])} "
    says += f"(step {curve.held_out_steps[0]:,}) to {_value(curve, last)} "
    says += f"(step {curve.held_out_steps[-1]:,})"
    jump = _steepest(curve)
    says += f"; its steepest stretch is steps {jump[0]:,} to {jump[1]:,}." if jump else "."
    return Words(title, says, reading, f"Line of {curve.quantity} by training step. {says}")


def draw(curve: Curve) -> go.Figure:
    """Draw a curve over its reference lines."""
    fig = new_figure(height=380)
    ends = [0, int(curve.steps[-1])]
    value = ".3f" if curve.quantity == "loss" else ".2%"
    fig.add_scatter(
        x=curve.steps,
        y=curve.train.astype(np.float32),
        mode="lines",
        name="training batches",
        line={"width": 1},
        opacity=0.7,
        hovertemplate=f"step %{{x:,}}: %{{y:{value}}} (training)<extra></extra>",
    )
    fig.add_scatter(
        x=curve.held_out_steps,
        y=curve.held_out,
        mode="lines+markers" if len(curve.held_out) <= 60 else "lines",
        name="held-out rows",
        line={"width": 2},
        marker={"size": 6},
        cliponaxis=False,
        hovertemplate=f"step %{{x:,}}: %{{y:{value}}} (held out)<extra></extra>",
    )
    for level in curve.references.values():
        fig.add_hline(level, line={"color": MUTED, "width": 1.2, "dash": "dot"}, layer="below")
    stages = curve.stages if len(curve.stages) > 1 else ()
    for first, length in stages:
        fig.add_vline(first, line={"color": MUTED, "width": 1, "dash": "dot"}, layer="below")
        fig.add_annotation(
            text=f"{length:,}",
            x=first,
            y=1,
            yref="y domain",
            xanchor="left",
            yanchor="bottom",
            textangle=-60,
        )
    for level, side, text in _labels(curve):
        fig.add_annotation(
            text=html.escape(text),
            x=1 if curve.quantity == "loss" else 0,
            xref="x domain",
            xanchor="right" if curve.quantity == "loss" else "left",
            y=math.log10(level) if curve.quantity == "loss" else level,
            yanchor=side,
        )
    fig.update_xaxes(range=ends, title_text="training step", tickformat=",", showgrid=False)
    if curve.quantity == "loss":
        # Logarithmic: a tied table of std 1 begins ten times above a uniform guess.
        seen = np.array([*curve.train, *curve.held_out, *curve.references.values()])
        low, high = np.log10(np.maximum([seen.min(), seen.max()], LEAST_LOSS))
        fig.update_yaxes(type="log", range=[low - 0.1, high + 0.1], dtick="D2", tickformat="~g")
        fig.update_yaxes(title_text="cross-entropy, nats")
    else:
        fig.update_yaxes(title_text="accuracy", tickformat=".0%", range=[-0.13, 1.13])
        fig.update_yaxes(tickvals=[0, 0.25, 0.5, 0.75, 1])
    if stages:  # room for the row lengths between the figure and its legend
        return fig.update_layout(height=400, margin_t=104, legend_y=1.13)
    return fig.update_layout(margin_t=84)


def _labels(curve: Curve) -> list[tuple[float, Literal["top", "bottom"], str]]:
    """Return (height, side of it on which the label hangs, label) of the reference lines.

    Accuracies next to 0 or 1 share a label beyond it, where no curve comes.
    """
    if curve.quantity == "loss":
        return [(v, "bottom", f"{name}, {v:.2f}") for name, v in curve.references.items()]
    groups: dict[float, list[str]] = {}
    for name, level in curve.references.items():
        height = 1.0 if level > 0.9 else 0.0 if level < 0.1 else level
        groups.setdefault(height, []).append(f"{name} {percent(level)}")
    return [(at, "bottom" if at else "top", ", ".join(names)) for at, names in groups.items()]


def _growth(curve: Curve) -> str:
    """Say how rows grew, and where the quantity stands at the last length."""
    (_, shortest), (since, longest) = curve.stages[0], curve.stages[-1]
    says = f"Rows grow from {shortest:,} to {longest:,} tokens; those of {longest:,} begin at step "
    says += f"{since:,}"
    there = curve.held_out_steps >= since
    if not there.any():
        return f"{says} and are not evaluated yet."
    return f"{says}, and end at a held-out {curve.quantity} of {_value(curve, curve.held_out[-1])}."


def _value(curve: Curve, value: float) -> str:
    return f"{value:.2f} nats" if curve.quantity == "loss" else percent(float(value))


def _steepest(curve: Curve) -> tuple[int, int] | None:
    """Return the two neighbouring evaluations between which most happened, if any did."""
    change = np.abs(np.diff(curve.held_out))
    if (
        len(change) < 3
        or change.max() < 0.3 * np.ptp(curve.held_out)
        or np.ptp(curve.held_out) == 0
    ):
        return None
    i = int(change.argmax())
    return int(curve.held_out_steps[i]), int(curve.held_out_steps[i + 1])
