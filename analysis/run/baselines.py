"""How good is it? Test accuracy next to chance, the shortcuts and the oracle."""

import html
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, NotApplicableError, Subject, Words, describe, draw
from analysis.plots.lines import order_lines
from analysis.plots.style import MUTED, make_whiskers, new_figure
from analysis.words import capitalize, count_decimals, join_names, percent, percents
from lab.config import AUDIT_ROWS
from lab.intervals import wilson
from lab.suite.audit import count_audited
from lab.training import experiment
from lab.training.records import find_ending, name_ending
from lab.training.run import Run
from tasks.meanings import MEANINGS

__all__ = ["TITLE", "Standing", "describe", "draw", "measure"]

TITLE = "How good is it?"
LITTLE = 0.1
"""Part of the way from chance to the oracle below which a model has learned next to nothing."""


@dataclass(frozen=True)
class Standing(Finding):
    """How a run ended, and how its accuracy compares with rules that need no training.

    Attributes:
        stopped: how the run ended, a key of `find_ending`.
        steps: training steps taken.
        solved_at: accuracy that counts as solved.
        accuracy: share of the test split's scored positions answered right; None if unknown.
        interval: 95 % interval of the accuracy over other rows (`read_interval`).
        rows: how many rows of the test split were evaluated.
        rule_rows: on how many of these rows shortcuts and the oracle were scored.
        names: chance, each shortcut, oracle.
        scores: their test accuracies, in [0, 1], in the order of `names`.
        by_hand: a sentence on whether weights set by hand solve the task in this model; empty where
            nobody tried.
        failure: a sentence on why the run failed; empty where it did not, or nobody looked.
    """

    stopped: str
    steps: int
    solved_at: float
    accuracy: float | None
    interval: tuple[float, float] | None
    rows: int
    rule_rows: int
    names: tuple[str, ...]
    scores: tuple[float, ...]
    by_hand: str = ""
    failure: str = ""

    @property
    def ending(self) -> str:
        """How the run ended, in words."""
        return name_ending(self.stopped)

    @property
    def headline(self) -> str:
        """The verdict as one plain sentence."""
        steps = f"{self.steps:,} steps" if self.steps != 1 else "1 step"
        if self.stopped == "diverged":
            return f"Training diverged after {steps}; there is no accuracy to report."
        if self.accuracy is None or self.interval is None:
            return f"This run has not ended: {steps} on record, no result yet."
        if self.stopped == "solved":
            opening = f"Solved after {steps}"
        elif self.stopped == "interrupted":
            opening = f"Interrupted after {steps}"
        elif self.stopped == "out of time":
            opening = f"Stopped at the time limit after {steps}"
        elif self.accuracy >= self.solved_at:
            opening = f"Solved, after all of its {steps}"
        else:
            opening = f"Not solved within {steps}"
        return f"{opening}: {percent(self.accuracy)} of the answers are right."

    @property
    def learned(self) -> bool:
        """Whether accuracy is surely more than `LITTLE` of the way from chance to the oracle."""
        score = dict(zip(self.names, self.scores, strict=True))
        chance, oracle = score["chance"], score["oracle"]
        return self.interval is not None and (
            self.interval[0] > chance + LITTLE * (oracle - chance)
        )

    @property
    def rules(self) -> str:
        """What the best shortcut does and reaches, and what chance and the oracle reach."""
        score = dict(zip(self.names, self.scores, strict=True))
        chance, oracle = score.pop("chance"), score.pop("oracle")
        text = f"A blind guess is right in {percent(chance)} of cases."
        if score:
            best = max(score, key=score.__getitem__)
            meaning = f" which {MEANINGS[best]}," if best in MEANINGS else ""
            text += f" The best shortcut, “{best}”,{meaning} is right in {percent(score[best])}."
        return (
            f"{text} The oracle, plain code that works out the answer, is right in "
            f"{percent(oracle)}."
        )

    def describe(self) -> Words:
        """Say which rules the model beats, equals or falls short of."""
        rules = list(zip(self.names, self.scores, strict=True))
        alt = "Bars of test accuracy: "
        if self.accuracy is None or self.interval is None:
            opening, reason = f"There is no accuracy yet. {self.rules}", self.failure
            reading = (
                f"Each rule is scored on the first {self.rule_rows:,} test rows; the run itself is "
                f"{self.ending}."
            )
        else:
            low, high = self.interval
            rivals = [rule for rule in rules if rule[0] != "oracle"]
            groups = {
                "above": [name for name, score in rivals if score < low],
                "level with": [name for name, score in rivals if low <= score <= high],
                "below": [name for name, score in rivals if score > high],
            }
            places = [f"{where} {_quote(names)}" for where, names in groups.items() if names]
            opening = f"The model's accuracy is {', '.join(places)}."
            reason = f"{self.by_hand} {self.failure}".strip()
            reading = (
                f"The whisker is the 95 % interval over {self.rows:,} test rows, "
                f"{' to '.join(percents(low, high))}; answers of a row may be right or wrong "
                "together. The other bars need no training: rules that see the row, and the "
                f"oracle, which solves the task, on the first {self.rule_rows:,} of these rows."
            )
            alt += f"model {percent(self.accuracy)}, "
        says = f"{opening} {reason}".rstrip()
        alt += ", ".join(f"{name} {percent(score)}" for name, score in rules) + "."
        return Words("Test accuracy against rules that need no training", says, reading, alt)

    def draw(self) -> go.Figure:
        """Draw bars of accuracy: the model on top, then oracle, shortcuts and chance."""
        order = sorted(zip(self.scores, self.names, strict=True))
        decimals = count_decimals([*self.scores, self.accuracy or 0.0])
        names = [html.escape(name) for _, name in order]
        fig = new_figure(height=140 + 30 * (len(names) + 1))
        if self.accuracy is not None and self.interval is not None:
            fig.add_bar(
                x=[self.accuracy],
                y=["model"],
                orientation="h",
                error_x=make_whiskers(np.array([self.accuracy]), np.array([self.interval])),
                hovertemplate="model: %{x:.2%}<extra></extra>",
            )
            label = f"<b>{percent(self.accuracy, decimals)}</b>"
            fig.add_annotation(text=label, x=self.interval[1], y="model", xanchor="left", xshift=6)
            names.append("model")
        fig.add_bar(
            x=[score for score, _ in order],
            y=names[: len(order)],
            orientation="h",
            marker={"color": MUTED, "opacity": 0.6},
            text=[percent(score, decimals) for score, _ in order],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.2%}<extra></extra>",
        )
        fig.update_xaxes(range=[0, 1.24], tickformat=".0%", tickvals=[0, 0.25, 0.5, 0.75, 1])
        fig.update_xaxes(title_text="accuracy at scored positions", showline=False)
        order_lines(fig, names[::-1])
        return fig.update_layout(showlegend=False, bargap=0.4, margin_t=58)


def measure(subject: Subject) -> list[Standing]:
    """Read how the subject's run ended, and score the rules that need no training.

    Raises:
        NotApplicableError: for a model that no run trained.
    """
    run = subject.run
    if run is None:
        raise NotApplicableError("no run to read the result of")
    result, rows = run.read_result() or {}, run.read_metrics()
    scores = score_baselines(run)
    return [
        Standing(
            stopped=find_ending(result),
            steps=result.get("steps", rows[-1]["step"] if rows else 0),
            solved_at=run.train.solved_at,
            accuracy=result.get("accuracy"),
            interval=read_interval(run),
            rows=run.train.test_rows,
            rule_rows=count_audited(run.task, AUDIT_ROWS),
            names=tuple(scores),
            scores=tuple(scores.values()),
            by_hand=_describe_construction(result),
            failure=_describe_failure(result),
        )
    ]


def score_baselines(run: Run) -> dict[str, float]:
    """Return the test accuracy in [0, 1] of chance, of each shortcut and of the oracle, by name."""
    known = (run.read_result() or {}).get("baselines")
    return known or experiment.score_baselines(run.task, run.train.seed)


def choose_references(scores: dict[str, float]) -> dict[str, float]:
    """Return the accuracies to draw beside a model's: the oracle, the best shortcut and chance."""
    shortcuts = [name for name in scores if name not in ("chance", "oracle")]
    best = sorted(shortcuts, key=scores.__getitem__)[-1:]
    return {name: scores[name] for name in ("oracle", *best, "chance")}


def find_rival(run: Run) -> tuple[str, float]:
    """Return what a model has to beat, and its accuracy: chance, or the best shortcut."""
    scores = {name: score for name, score in score_baselines(run).items() if name != "oracle"}
    best = max(scores, key=scores.__getitem__)
    return ("a guess" if best == "chance" else f"the shortcut “{best}”"), scores[best]


def find_tested_step(run: Run) -> int | None:
    """Return the step of the weights that a result's accuracy is of; None without an accuracy.

    A run that a signal ended was not tested again.
    """
    result = run.read_result() or {}
    if result.get("accuracy") is None:
        return None
    return run.read_metrics().last_test.get("step") if result.get("signal") else result["steps"]


def read_interval(run: Run) -> tuple[float, float] | None:
    """Return the 95 % interval of the accuracy of a run's result; None without an accuracy.

    Results of older versions have none. Theirs takes each row for one answer, which is as wide as
    the interval can be, however much the answers of a row agree.
    """
    result = run.read_result() or {}
    if result.get("accuracy") is None:
        return None
    low, high = result.get("interval") or wilson(result["accuracy"], run.train.test_rows)
    return low, high


def _describe_construction(result: dict[str, Any]) -> str:
    """Say whether the model can represent a solution, so that failing means not learning."""
    found, solved = result.get("set_by_hand"), result.get("stopped") == "solved"
    if found is None or (solved and found["verdict"] != "solves"):
        return ""
    if found["verdict"] == "solves":
        learned = solved or (result["accuracy"] or 0.0) >= found["accuracy"]
        missing = "" if learned else ", so training failed to find what the model can represent"
        return f"This model can solve the task: weights set by hand do{missing}."
    if found["verdict"] == "cannot":
        return f"No weights solve the task in this model: {found['because']}."
    return f"Whether any weights solve the task in this model is open: {found['because']}."


def _describe_failure(result: dict[str, Any]) -> str:
    """Say why the run failed, unless `_describe_construction` says that no weights succeed."""
    found = result.get("diagnosis")
    if found is None or found["kind"] == "cannot":
        return ""
    stage = f"at rows of {found['seq_len']:,} tokens"
    return f"Why it is not solved, {stage}: {found['kind']}. {capitalize(found['because'])}."


def _quote(names: list[str]) -> str:
    """Return "a", "a and b", "a, b and c", each in quotation marks except chance."""
    return join_names([name if name == "chance" else f"“{name}”" for name in names])
