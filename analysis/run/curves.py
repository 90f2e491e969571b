"""How did it get there? Loss and accuracy by training step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Curves, Line, curves
from analysis.figures.theme import MUTED
from analysis.plain import figure_only
from analysis.run import baselines
from analysis.words import format_range, percent
from lab.config import AUDIT_ROWS
from lab.lengthening import list_stages
from lab.training.loop import count_validation_rows
from lab.training.run import Run

__all__ = ["TITLE", "Curve", "measure"]

TITLE = "Training"
SHOWN = 3
"""Maximum number of row lengths above a figure: more are wider than a phone."""
POINTS = 1000
"""Maximum number of points of a curve; a longer one is drawn as means over windows of steps."""
LEAST_LOSS = 1e-4
"""Lower end of the logarithmic loss axis, nats."""
LEVEL = 0.25
"""Maximum share of a curve's range that the parts before and after a jump may cover."""


@dataclass(frozen=True)
class Curve(Finding):
    """A quantity by training step.

    Attributes:
        quantity: "loss" in nats or squared error, or "accuracy", or explained variance, in [0, 1].
        steps: the last step of each window.
        train: mean over each window of training batches.
        held_out_steps: steps at which held-out rows were evaluated, of the length then trained at.
        held_out_rows: on how many rows each was evaluated.
        references: the quantity of rules that need no training, by name.
        since: the first step at the row length of a reference, by its name, for those that other
            lengths would change.
        stages: the first step at each row length, and that length.
        final: the step of the weights of the result, and the quantity on test rows there;
            None without a result.
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
    title: str = ""
    measure: str = figure_only(default="accuracy")

    reading = (
        "Faint: training batches; in a long run a point is the mean of several steps. Rows held "
        "out have the length that the model trained on at that step. Test rows have full length, "
        "and are answered by the weights of the result. Dotted: rules that need no training; where "
        "the row length changes a rule's accuracy, its line begins where rows have full length. "
        "Where most of the loss changes is read on its logarithmic axis."
    )

    @property
    def says(self) -> str:
        """Where the held-out quantity begins and ends."""
        if not len(self.held_out):
            last = self._format(self.train[-1])
            return f"No evaluation yet; the {self.name} of the last training batch is {last}."
        ends = [
            f"{self._format(self.held_out[i])} after step {self.held_out_steps[i]:,}"
            for i in sorted({0, len(self.held_out) - 1})
        ]
        return f"On rows held out, the {self.name} is {', and '.join(ends)}."

    def numbers(self) -> Table:
        """Return the result, where most of the change is, and what was measured on how much."""
        jump, rows = self._find_jump(), []
        if self.final is not None:
            length = "" if self.test_len is None else f" of {self.test_len:,} tokens"
            tested = f"{self._format(self.final[1])} after step {self.final[0]:,}"
            rows.append((f"on {self.test_rows:,} test rows{length}", tested))
        place = "at no one place" if jump is None else f"between steps {jump[0]:,} and {jump[1]:,}"
        rows.append(("most of the change", place))
        if self.stages:
            stages = [f"{length:,} from step {first:,}" for first, length in self.stages]
            rows.append(("tokens in a row", ", ".join(stages)))
        if len(self.held_out_rows):
            rows.append(("rows held out", format_range(self.held_out_rows)))
        rows.append(("steps in a point of training batches", f"{self.window:,}"))
        return Table(("what", "value"), tuple(rows))

    @property
    def name(self) -> str:
        """What the quantity is called, by what the task measures."""
        loss = "loss" if self.measure == "accuracy" else "squared error"
        return loss if self.quantity == "loss" else self.measure

    def _format(self, value: float) -> str:
        if self.quantity != "loss":
            return percent(float(value))
        return f"{value:.2f} nats" if self.measure == "accuracy" else f"{value:.3f}"

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

    def figure(self) -> go.Figure:
        """Draw the quantity on training and held-out rows, over its reference lines."""
        loss, last = self.quantity == "loss", int(self.steps[-1])
        lines = [
            Line("training batches", self.steps, self.train.astype(np.float32), look=-1),
            Line("rows held out", self.held_out_steps, self.held_out, look=0),
        ]
        if self.final is not None:
            step, value = np.array(self.final)[:, None]
            lines.append(Line("test rows", step, value, shape="points", look=1))
        shown = {name: self._name_level(name) for name in self.references}
        for name in self.since:
            level = np.full(2, self.references[name])
            lines.append(Line(shown[name], np.array([self.since[name], last]), level, look=2))
        levels = {shown[n]: y for n, y in self.references.items() if n not in self.since}
        of_loss = "cross-entropy, nats" if self.measure == "accuracy" else self.name
        y = Axis(of_loss, scale="log") if loss else Axis(self.name, "share")
        x = Axis("training step", "count", ends=(0, last))
        grown = [f"{length:,}" for _, length in self.stages[1:]]
        if len(grown) > SHOWN:
            grown = [*grown[: SHOWN - 1], "…", grown[-1]]
        title = f"upright lines: rows grow to {', '.join(grown)} tokens" if grown else ""
        fig = curves([Curves(lines, y, title, levels, height=250)], x)
        for first, _ in self.stages[1:]:
            fig.add_vline(first, line={"color": MUTED, "width": 1}, layer="below")
        return fig

    def _name_level(self, name: str) -> str:
        """Return the name of a reference with its value."""
        level = self.references[name]
        return f"{name} {f'{level:.2f}' if self.quantity == 'loss' else percent(level)}"


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
    references = {
        "loss": _list_losses(subject.run),
        "accuracy": baselines.choose_references(baselines.score_baselines(subject.run)),
    }
    result, tested = subject.run.read_result() or {}, baselines.find_tested_step(subject.run)
    reached, full = rows.stages[-1].seq_len, subject.run.task.seq_len
    since: dict[str, int] = {}
    if len(stages) > 1 or reached != full:
        since = _find_beginnings(subject.run, references["accuracy"], stages)
    if reached != full:  # no step was at the length of these
        known = references["accuracy"].items()
        references["accuracy"] = {name: level for name, level in known if name not in since}
        since = {}
    found = []
    for quantity in ("loss", "accuracy"):
        values = np.array([row[quantity] for row in rows], dtype=np.float64)
        of_result = None if tested is None else result[quantity]
        found.append(
            Curve(
                quantity,
                steps,
                train=np.add.reduceat(values, starts) / (ends - starts),
                window=window,
                held_out_steps=evaluated.steps,
                held_out=held_out[quantity],
                held_out_rows=evaluated.rows,
                references=references[quantity],
                stages=stages,
                final=None if tested is None or of_result is None else (tested, of_result),
                test_rows=subject.run.train.test_rows,
                test_len=None if reached == full else full,
                since=since if quantity == "accuracy" else {},
                measure=subject.task.measure,
            )
        )
    return [replace(curve, title=f"{curve.name.capitalize()} by training step") for curve in found]


def _list_losses(run: Run) -> dict[str, float]:
    """Return the loss of a blind guess and, where answers are numbers, the oracle's."""
    if not run.task.vectors:
        return {"uniform guess": run.task.blind_loss}
    batch = run.task.batch(split="test", size=AUDIT_ROWS, seed=run.train.seed)
    best = (run.task.oracle(batch) - batch.targets).square().nanmean().item()
    return {"answering zero": run.task.blind_loss, "oracle": best}


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


@dataclass(frozen=True)
class Evaluations:
    """Evaluations on held-out rows of the length that the run trained at then.

    Attributes:
        steps: training steps before each, ascending.
        rows: on how many rows each was made.
    """

    steps: Int[np.ndarray, " m"]
    rows: Int[np.ndarray, " m"]
    loss: Float[np.ndarray, " m"]
    accuracy: Float[np.ndarray, " m"]


def read_evaluations(run: Run) -> Evaluations:
    """Return the evaluations on a run's record.

    Raises:
        RunError: when the record cannot be read.
    """
    found = run.read_metrics().evaluations
    rows = {
        ("validation", stage.task.seq_len): count_validation_rows(stage, run.train)
        for stage in list_stages(run.task, run.train)
    }
    counts = [rows.get((one["split"], one["seq_len"]), run.train.test_rows) for one in found]
    return Evaluations(
        np.array([one["step"] for one in found], dtype=np.int64),
        np.array(counts, dtype=np.int64),
        np.array([one["loss"] for one in found], dtype=np.float64),
        np.array([one["accuracy"] for one in found], dtype=np.float64),
    )
