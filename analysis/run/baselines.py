"""How good is it? Test accuracy beside chance, shortcuts and the oracle."""

import html
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from analysis.base import NotApplicableError, Subject, Words
from analysis.plots.style import MUTED, new_figure
from analysis.words import percent
from lab.intervals import wilson
from lab.training import experiment
from lab.training.runs import Run
from tasks.base import IGNORE

TITLE = "Verdict"


@dataclass(frozen=True)
class Standing:
    """How a run ended, and what it is measured against.

    Attributes:
        stopped: solved, budget, diverged, interrupted; "unfinished" while there is no result.
        steps: training steps taken.
        solved_at: accuracy that counts as solved.
        accuracy: share of the test split's scored positions answered right; None if unknown.
        interval: 95 % Wilson interval of the accuracy.
        scored: how many positions of the test split are scored.
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
    scored: int
    names: tuple[str, ...]
    scores: tuple[float, ...]
    by_hand: str = ""
    failure: str = ""


def measure(subject: Subject) -> list[Standing]:
    """Return the standing.

    Raises:
        NotApplicableError: for a model that no run trained.
    """
    run = subject.run
    if run is None:
        raise NotApplicableError("no run to read the result of")
    result, rows = run.result() or {}, run.metrics()
    right, scored, rules = result.get("accuracy"), scored_positions(run), scores(run)
    return [
        Standing(
            stopped=result.get("stopped", "unfinished"),
            steps=result.get("steps", rows[-1]["step"] if rows else 0),
            solved_at=run.train.solved_at,
            accuracy=right,
            interval=None if right is None else wilson(right, scored),
            scored=scored,
            names=tuple(rules),
            scores=tuple(rules.values()),
            by_hand=_by_hand(result),
            failure=_failure(result),
        )
    ]


def _by_hand(result: dict[str, Any]) -> str:
    """Say whether the model can represent a solution, so that failing it means not learning."""
    found, solved = result.get("set_by_hand"), result.get("stopped") == "solved"
    if found is None or (solved and found["verdict"] != "solves"):
        return ""
    if found["verdict"] == "solves":
        learned = (result["accuracy"] or 0.0) >= found["accuracy"]
        missing = "" if learned else ", so what is missing was not learned"
        return f"Weights set by hand solve the task in this very model{missing}."
    if found["verdict"] == "cannot":
        return f"No weights solve the task in this model: {found['because']}."
    return f"Whether weights solve the task in this model is open: {found['because']}."


def _failure(result: dict[str, Any]) -> str:
    """Say why the run failed; what no weights can is said of the weights set by hand."""
    found = result.get("diagnosis")
    if found is None or found["kind"] == "cannot":
        return ""
    stage = f"at rows of {found['seq_len']:,} tokens"
    return f"Why it is not solved, {stage}: {found['kind']}. {_sentence(found['because'])}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def scores(run: Run) -> dict[str, float]:
    """Return the test accuracy in [0, 1] of chance, of each shortcut and of the oracle, by name."""
    return (run.result() or {}).get("baselines") or experiment.baselines(run.task, run.train.seed)


def scored_positions(run: Run) -> int:
    """Return how many positions of the test split are scored; rows of a mixture differ in it."""
    train, count = run.train, 0
    for start in range(0, train.test_rows, train.batch_size):
        size = min(train.batch_size, train.test_rows - start)
        batch = run.task.batch(split="test", start=start, size=size, seed=train.seed)
        count += int((batch.targets != IGNORE).sum())
    return count


def headline(standing: Standing) -> str:
    """Return the verdict as one plain sentence."""
    steps = f"{standing.steps:,} steps" if standing.steps != 1 else "1 step"
    if standing.stopped == "diverged":
        return f"Training diverged after {steps}; there is no accuracy to report."
    if standing.accuracy is None or standing.interval is None:
        return f"This run has not ended: {steps} on record, no result yet."
    if standing.stopped == "solved":
        opening = f"Solved after {steps}"
    elif standing.stopped == "interrupted":
        opening = f"Interrupted after {steps}"
    elif standing.accuracy >= standing.solved_at:
        opening = f"Solved, after all of its {steps}"
    else:
        opening = f"Not solved within {steps}"
    right = percent(standing.accuracy)
    return f"{opening}: {right} of the answers are right. {_rules(standing)}"


def _rules(standing: Standing) -> str:
    """Say what chance and the best shortcut reach."""
    score = dict(zip(standing.names, standing.scores, strict=True))
    text = f"Chance gives {percent(score.pop('chance'))}"
    score.pop("oracle")
    if not score:
        return f"{text}."
    best = max(score, key=score.__getitem__)
    return f"{text}, the best shortcut, “{best}”, {percent(score[best])}."


def describe(standing: Standing) -> Words:
    """Put the verdict in words."""
    rules = list(zip(standing.names, standing.scores, strict=True))
    alt = "Bars of test accuracy: "
    if standing.accuracy is None or standing.interval is None:
        says = f"There is no model to place yet. {_rules(standing)} {standing.failure}".rstrip()
        reading = f"Each rule is scored on test rows; the run itself is {standing.stopped}."
    else:
        low, high = standing.interval
        rivals = [rule for rule in rules if rule[0] != "oracle"]
        above = [name for name, score in rivals if score < low]
        below = [name for name, score in rivals if score > high]
        level = [name for name, score in rivals if low <= score <= high]
        parts = [
            f"{relation} {_listed(names)}"
            for relation, names in (("above", above), ("level with", level), ("below", below))
            if names
        ]
        says = f"The model stands {', '.join(parts)}. {standing.by_hand}".rstrip()
        says = f"{says} {standing.failure}".rstrip()
        reading = (
            f"The whisker is the 95 % Wilson interval over {standing.scored:,} scored positions, "
            f"{percent(low)} to {percent(high)}, as if they were independent. The other bars need "
            "no learning: rules that see the row, and the oracle that solves the task."
        )
        alt += f"model {percent(standing.accuracy)}, "
    alt += ", ".join(f"{name} {percent(score)}" for name, score in rules) + "."
    return Words("Test accuracy against rules that need no learning", says, reading, alt)


def draw(standing: Standing) -> go.Figure:
    """Draw bars of accuracy: the model on top, then oracle, shortcuts and chance."""
    order = sorted(zip(standing.scores, standing.names, strict=True))
    names = [html.escape(name) for _, name in order]
    fig = new_figure(height=140 + 30 * (len(names) + 1))
    if standing.accuracy is not None and standing.interval is not None:
        low, high = standing.interval
        fig.add_bar(
            x=[standing.accuracy],
            y=["model"],
            orientation="h",
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [high - standing.accuracy],
                "arrayminus": [standing.accuracy - low],
                "thickness": 1.5,
                "width": 5,
            },
            hovertemplate="model: %{x:.2%}<extra></extra>",
        )
        label = f"<b>{percent(standing.accuracy)}</b>"
        fig.add_annotation(text=label, x=high, y="model", xanchor="left", xshift=6)
        names.append("model")
    fig.add_bar(
        x=[score for score, _ in order],
        y=names[: len(order)],
        orientation="h",
        marker={"color": MUTED, "opacity": 0.6},
        text=[percent(score) for score, _ in order],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.2%}<extra></extra>",
    )
    fig.update_xaxes(range=[0, 1.24], tickformat=".0%", tickvals=[0, 0.25, 0.5, 0.75, 1])
    fig.update_xaxes(title_text="accuracy at scored positions", showline=False, ticks="")
    fig.update_yaxes(
        categoryorder="array",
        categoryarray=names,
        showgrid=False,
        ticks="",
        automargin="left",
    )
    return fig.update_layout(showlegend=False, bargap=0.4, margin_t=58)


def _listed(names: list[str]) -> str:
    """Return "a", "a and b", "a, b and c", each in quotation marks but chance."""
    shown = [name if name == "chance" else f"“{name}”" for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
