"""How good is it? Test accuracy next to chance, the shortcuts and the oracle."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Bars, bars
from analysis.plain import figure_only
from analysis.words import RIGHT, capitalize, count_decimals, join_names, percent, percents
from lab.config import AUDIT_ROWS
from lab.intervals import wilson
from lab.suite.audit import count_audited
from lab.training import experiment
from lab.training.records import find_ending, name_ending
from lab.training.run import Run
from tasks.meanings import MEANINGS

__all__ = ["TITLE", "Standing", "measure"]

TITLE = "How good is it?"
LITTLE = 0.1
"""Part of the way from chance to the oracle below which a model has learned next to nothing."""
TICKS = {0: "0 %", 0.25: "25 %", 0.5: "50 %", 0.75: "75 %", 1: "100 %"}


@dataclass(frozen=True)
class Standing(Finding):
    """How a run ended, and how its accuracy compares with rules that need no training.

    Where answers are numbers, explained variance stands in place of accuracy.

    Attributes:
        stopped: how the run ended, a key of `find_ending`.
        accuracy: share of the test split's scored positions answered right; None if unknown.
        interval: 95 % interval of the accuracy over other rows (`read_interval`).
        rule_rows: on how many of these rows shortcuts and the oracle were scored.
        scores: test accuracies, in [0, 1], of the rules in `names`.
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
    measure: str = figure_only(default="accuracy")

    reading = (
        "The whisker is the 95 % interval over test rows, which allows for answers of one row that "
        "are right or wrong together. The grey bars need no training: shortcuts that look at the "
        "row, and the oracle, plain code that works out the answer."
    )

    @property
    def title(self) -> str:  # type: ignore[override]
        """Of the figure, by what is measured."""
        return f"Test {self.measure} against rules that need no training"

    @property
    def ending(self) -> str:
        """How the run ended, in words."""
        return name_ending(self.stopped)

    @property
    def headline(self) -> str:
        """The verdict as one plain sentence."""
        steps = f"{self.steps:,} steps" if self.steps != 1 else "1 step"
        if self.stopped == "diverged":
            return f"Training diverged after {steps}; there is no {self.measure} to report."
        if self.accuracy is None or self.interval is None:
            return f"This run has not ended: {steps} on record, no result yet."
        done = self.accuracy >= self.solved_at
        opening = {
            "solved": "Solved after",
            "interrupted": "Interrupted after",
            "out of time": "Stopped at the time limit after",
        }.get(self.stopped, "Solved, after all of its" if done else "Not solved within")
        return f"{opening} {steps}: {percent(self.accuracy)} {RIGHT[self.measure]}."

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
        text, right = f"A blind guess is right in {percent(chance)} of cases.", "is right in"
        if self.measure != "accuracy":
            text, right = f"Answering zero explains {percent(chance)}.", "explains"
        if score:
            best = max(score, key=score.__getitem__)
            meaning = f" which {MEANINGS[best]}," if best in MEANINGS else ""
            text += f" The best shortcut, “{best}”,{meaning} {right} {percent(score[best])}."
        return (
            f"{text} The oracle, plain code that works out the answer, {right} {percent(oracle)}."
        )

    @property
    def says(self) -> str:
        """Which rules the model beats, equals or falls short of."""
        if self.interval is None:
            return f"There is no {self.measure} to compare; how the run ended: {self.ending}."
        low, high = self.interval
        rivals = [
            (name if name == "chance" else f"“{name}”", score)
            for name, score in zip(self.names, self.scores, strict=True)
            if name != "oracle"
        ]
        groups = {
            "above": [name for name, score in rivals if score < low],
            "level with": [name for name, score in rivals if low <= score <= high],
            "below": [name for name, score in rivals if score > high],
        }
        places = [f"{where} {join_names(names)}" for where, names in groups.items() if names]
        return f"The model's {self.measure} is {', '.join(places)}."

    def numbers(self) -> Table:
        """Return the interval, and why the run is not solved, as far as that is known."""
        known = " to ".join(percents(*self.interval)) if self.interval else ""
        rows = {
            f"95 % interval, {self.rows:,} test rows": known,
            "test rows for the rules": f"the first {self.rule_rows:,}",
            "weights set by hand": self.by_hand,
            "why it failed": self.failure,
        }
        return Table(("what", "found"), tuple(row for row in rows.items() if row[1]))

    def figure(self) -> go.Figure:
        """Draw bars of accuracy: the model on top, then oracle, shortcuts and chance."""
        order = sorted(zip(self.scores, self.names, strict=True), reverse=True)
        own = np.array([np.nan if self.accuracy is None else self.accuracy])
        ends = np.array([self.interval or (np.nan, np.nan)])
        decimals = count_decimals([*self.scores, self.accuracy or 0.0])
        scores = np.array([np.nan, *(score for score, _ in order)])
        texts = ["", *(percent(score, decimals) for score, _ in order)]
        rules = Bars("needs no training", scores, texts=texts, quiet=True)
        text = [f"<b>{percent(float(own[0]), decimals)}</b>"]
        model = Bars("model", own, ends, texts=text)
        axis = Axis(f"{self.measure} at scored positions", "share", ends=(0, 1.3), ticks=TICKS)
        fig = bars(["model", *(name for _, name in order)], [model, rules], axis)
        return fig.update_layout(barmode="overlay", showlegend=False)


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
            measure=run.task.measure,
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
