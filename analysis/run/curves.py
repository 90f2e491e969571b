"""How did it get there? Loss and accuracy by training step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, NotApplicableError, Subject, Words, describe, draw
from analysis.plots.lines import REFERENCE, draw_references
from analysis.plots.style import LABEL, MUTED, new_figure
from analysis.run import baselines
from analysis.run.evaluations import read_evaluations
from analysis.words import format_counts, join_names, percent
from lab.lengthening import list_stages
from lab.training.run import Run

__all__ = ["TITLE", "Curve", "describe", "draw", "measure"]

TITLE = "Training"
POINTS = 1000
"""Maximum number of points of a curve; a longer one is drawn as means over windows of steps."""

LEAST_LOSS = 1e-4
"""Lower end of the logarithmic loss axis, nats."""
FEW_DECADES = 0.6
"""Decades of the loss axis below which 1, 2 and 5 are too few ticks."""
FEW_STEPS = 10
"""Up to this many steps, the axis has a tick at every step and none between."""
LEVEL = 0.25
"""Maximum share of a curve's range that the parts before and after a jump may cover."""


@dataclass(frozen=True)
class Curve(Finding):
    """A quantity by training step.

    Attributes:
        quantity: "loss" in nats, or "accuracy" in [0, 1].
        steps: the last step of each window.
        train: mean over each window of training batches.
        window: steps per window.
        held_out_steps: steps at which held-out rows were evaluated, of the length then trained at.
        held_out: the quantity there.
        held_out_rows: on how many rows each was evaluated.
        references: the quantity of rules that need no training, by name.
        since: the first step at the row length of a reference, by its name, for those that other
            lengths would change.
        stages: the first step at each row length, and that length.
        final: the step of the weights of the result, and the quantity on test rows there;
            None without a result.
        test_rows: how many test rows there are.
        test_len: tokens of the test rows; None if training rows have as many.
    """

    quantity: Literal["loss", "accuracy"]
    steps: Int[np.ndarray, " n"]
    train: Float[np.ndarray, " n"]
    window: int
    held_out_steps: Int[np.ndarray, " m"]
    held_out: Float[np.ndarray, " m"]
    held_out_rows: Int[np.ndarray, " m"]
    references: dict[str, float]
    stages: tuple[tuple[int, int], ...] = ()
    final: tuple[int, float] | None = None
    test_rows: int = 0
    test_len: int | None = None
    since: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> Words:
        """Say where the held-out quantity begins and ends, and where most of the change is."""
        title = f"{self.quantity.capitalize()} by training step"
        says = self._summarize()
        if self.final is not None:
            step, value = self.final
            longer = "" if self.test_len is None else f" of {self.test_len:,} tokens"
            says += f" On {self.test_rows:,} test rows{longer}, it is {self._format(value)} after "
            says += f"step {step:,}."
        means = f", means of {self.window} steps" if self.window > 1 else ""
        reading = f"Thin line: training batches{means}. Thick line: held-out rows"
        if len(self.held_out_rows):
            reading += f", {format_counts(self.held_out_rows)} at each evaluation"
        reading += "."
        if self.final is not None:
            reading += " Star: test rows of full length, with the weights of the result."
        if len(self.stages) > 1:
            reading += " A dotted line marks where rows of the length beside it begin."
        if self.quantity == "accuracy" and self.since:
            reading += f" The accuracy of {join_names([*self.since])} is drawn where rows have the "
            reading += "length that it is of."
        return Words(title, says, reading, f"Line of {self.quantity} by training step. {says}")

    def _summarize(self) -> str:
        steps, values = self.held_out_steps, self.held_out
        if len(values) == 0:
            last = self._format(self.train[-1])
            return f"No evaluation yet; the {self.quantity} of the last training batch is {last}."
        if len(values) == 1:
            return (
                f"The held-out {self.quantity} is {self._format(values[-1])} after step "
                f"{steps[-1]:,}; it was evaluated once."
            )
        if len(self.stages) > 1:
            return self._describe_stages()
        short = [seq_len for _, seq_len in self.stages if self.test_len is not None]
        rows = f" on rows of {short[-1]:,} tokens" if short else ""
        says = (
            f"The held-out {self.quantity}{rows} goes from {self._format(values[0])} "
            f"(step {steps[0]:,}) to {self._format(values[-1])} (step {steps[-1]:,})"
        )
        if (jump := self._find_jump()) is None:
            return f"{says}."
        scale = " on the logarithmic axis" if self.quantity == "loss" else ""
        return f"{says}; most of the change{scale} is between steps {jump[0]:,} and {jump[1]:,}."

    def _describe_stages(self) -> str:
        """Say how rows grew, and what the quantity is at the last length."""
        (_, shortest), (since, longest) = self.stages[0], self.stages[-1]
        says = f"Rows grow from {shortest:,} to {longest:,} tokens; those of {longest:,} begin at "
        says += f"step {since:,}"
        if not (self.held_out_steps >= since).any():
            return f"{says} and are not evaluated yet."
        return (
            f"{says}, and end at a held-out {self.quantity} of {self._format(self.held_out[-1])}."
        )

    def _format(self, value: float) -> str:
        return f"{value:.2f} nats" if self.quantity == "loss" else percent(float(value))

    def _find_jump(self) -> tuple[int, int] | None:
        """Return the evaluations between which most of the change lies, as it is drawn.

        The curve must be level before and after: both parts change by at most `LEVEL` of the whole.
        Noise of five or more evaluations looks like that in less than 2 % of cases.
        """
        drawn = self.held_out
        if self.quantity == "loss":
            drawn = np.log10(np.maximum(drawn, LEAST_LOSS))
        if len(drawn) < 5:
            return None
        i, most = int(np.abs(np.diff(drawn)).argmax()) + 1, np.ptp(drawn)
        parts = drawn[:i], drawn[i:]
        if min(map(len, parts)) < 2 or not most or max(map(np.ptp, parts)) > LEVEL * most:
            return None
        return int(self.held_out_steps[i - 1]), int(self.held_out_steps[i])

    def draw(self) -> go.Figure:
        """Draw the quantity on training and held-out rows, over its reference lines."""
        fig = new_figure(height=380)
        ends = [0, int(self.steps[-1])]
        value = ".3f" if self.quantity == "loss" else ".2%"
        fig.add_scatter(
            x=self.steps,
            y=self.train.astype(np.float32),
            mode="lines",
            name="training batches",
            line={"width": 1},
            opacity=0.7,
            hovertemplate=f"step %{{x:,}}: %{{y:{value}}} (training)<extra></extra>",
        )
        fig.add_scatter(
            x=self.held_out_steps,
            y=self.held_out,
            mode="lines+markers" if len(self.held_out) <= 60 else "lines",
            name="held-out rows",
            line={"width": 2},
            marker={"size": 6},
            cliponaxis=False,
            customdata=self.held_out_rows,
            hovertemplate=f"step %{{x:,}}: %{{y:{value}}} (%{{customdata:,}} held-out rows)"
            "<extra></extra>",
        )
        if self.final is not None:
            fig.add_scatter(
                x=[self.final[0]],
                y=[self.final[1]],
                mode="markers",
                name="test rows",
                marker={"symbol": "star", "size": 12},
                cliponaxis=False,
                hovertemplate=f"step %{{x:,}}: %{{y:{value}}} ({self.test_rows:,} test rows)"
                "<extra></extra>",
            )
        stages = self.stages if len(self.stages) > 1 else ()
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
        fig.update_xaxes(range=ends, title_text="training step", tickformat=",", showgrid=False)
        if ends[1] <= FEW_STEPS:
            fig.update_xaxes(dtick=1)
        if self.quantity == "loss":
            for name, level in self.references.items():
                fig.add_hline(level, line=REFERENCE, layer="below")
                fig.add_annotation(
                    text=f"{name}, {level:.2f}",
                    x=1,
                    xref="x domain",
                    xanchor="right",
                    y=math.log10(level),
                    yanchor="bottom",
                    yshift=2,
                    **LABEL,
                )
            # Logarithmic: a tied table of std 1 begins ten times above a uniform guess.
            final = () if self.final is None else self.final[1:]
            seen = np.array([*self.train, *self.held_out, *self.references.values(), *final])
            low, high = np.log10(np.maximum([seen.min(), seen.max()], LEAST_LOSS))
            dtick = "D1" if high - low < FEW_DECADES else "D2"  # every digit, or 1, 2 and 5
            fig.update_yaxes(
                type="log", range=[low - 0.1, high + 0.1], dtick=dtick, tickformat="~g"
            )
            fig.update_yaxes(title_text="cross-entropy, nats")
        else:
            spans = {name: (first, ends[1]) for name, first in self.since.items()}
            draw_references(fig, self.references, spans)
            fig.update_yaxes(title_text="accuracy")
        if stages:  # leave room for the row lengths between the figure and its legend
            return fig.update_layout(height=400, margin_t=104, legend_y=1.13)
        return fig.update_layout(margin_t=84)


def measure(subject: Subject) -> list[Curve]:
    """Read the curves of loss and accuracy from the run's records.

    Raises:
        NotApplicableError: before the first step, or for a model that no run trained.
    """
    rows = None if subject.run is None else subject.run.read_metrics()
    if subject.run is None or not rows:
        raise NotApplicableError("no training step on record")
    window = math.ceil(len(rows) / POINTS)
    starts = np.arange(0, len(rows), window)
    ends = np.minimum(starts + window, len(rows))
    steps = np.array([row["step"] for row in rows])[ends - 1]
    evaluated = read_evaluations(subject.run)
    held_out = {"loss": evaluated.loss, "accuracy": evaluated.accuracy}
    stages = tuple((stage.began + 1, stage.seq_len) for stage in rows.stages)
    scores = baselines.score_baselines(subject.run)
    references = {
        "loss": {"uniform guess": math.log(subject.task.vocab_size)},
        "accuracy": baselines.choose_references(scores),
    }
    result, tested = subject.run.read_result() or {}, baselines.find_tested_step(subject.run)
    reached, full = rows.stages[-1].seq_len, subject.run.task.seq_len
    since: dict[str, int] = {}
    if len(stages) > 1 or reached != full:
        since = _find_beginnings(subject.run, references["accuracy"], stages)
    if reached != full:  # no step was at the length of these
        references["accuracy"] = {
            name: level for name, level in references["accuracy"].items() if name not in since
        }
        since = {}
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
                evaluated.steps,
                held_out[quantity],
                evaluated.rows,
                references[quantity],
                stages,
                None if tested is None or result[quantity] is None else (tested, result[quantity]),
                subject.run.train.test_rows,
                None if reached == full else full,
                since if quantity == "accuracy" else {},
            )
        )
    return curves


def _find_beginnings(
    run: Run, references: Mapping[str, float], stages: Sequence[tuple[int, int]]
) -> dict[str, int]:
    """Return the first step at the full row length for references that the length changes.

    A shortcut's accuracy does. The oracle's does not where answers are certain, nor chance's where
    it is the same at each length.
    """
    lengthened = list_stages(run.task, run.train)
    same = {"oracle"} if not run.task.stochastic else set()
    if len({stage.task.chance for stage in lengthened}) == 1:
        same.add("chance")
    return {name: stages[-1][0] for name in references if name not in same}
