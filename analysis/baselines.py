"""How good is it? Test accuracy beside chance, shortcuts and the oracle."""

import math
from dataclasses import dataclass

import plotly.graph_objects as go

from analysis.base import Subject, Words
from analysis.style import MUTED, figure, percent
from tasks.base import IGNORE

TITLE = "Verdict"
Z95 = 1.959963984540054
"""The normal distribution's 97.5 % point."""


@dataclass(frozen=True)
class Standing:
    """How a run ended, and what it is measured against.

    Attributes:
        stopped: solved, budget, diverged, interrupted; "unfinished" while there is no result.
        steps: training steps taken.
        accuracy: share of the test split's scored positions answered right; None if unknown.
        interval: 95 % Wilson interval of the accuracy.
        scored: how many positions of the test split are scored.
        names: chance, each shortcut, oracle.
        scores: their test accuracies, in [0, 1], in the order of `names`.
    """

    stopped: str
    steps: int
    accuracy: float | None
    interval: tuple[float, float] | None
    scored: int
    names: tuple[str, ...]
    scores: tuple[float, ...]

    @property
    def rival(self) -> tuple[str, float]:
        """The best of chance and the shortcuts: what an accuracy must exceed to mean anything."""
        rivals = [pair for pair in zip(self.names, self.scores, strict=True) if pair[0] != "oracle"]
        return max(rivals, key=lambda pair: pair[1])


def measure(subject: Subject) -> list[Standing]:
    """Return the standing."""
    run = subject.run
    result, rows = run.result() or {}, run.metrics()
    right, scored = result.get("accuracy"), scored_positions(subject)
    return [
        Standing(
            stopped=result.get("stopped", "unfinished"),
            steps=result.get("steps", rows[-1]["step"] if rows else 0),
            accuracy=right,
            interval=None if right is None else wilson(right, scored),
            scored=scored,
            names=tuple(subject.baselines),
            scores=tuple(subject.baselines.values()),
        )
    ]


def scored_positions(subject: Subject) -> int:
    """Return how many positions of the test split are scored; rows of a mixture differ in it."""
    train = subject.run.train
    return sum(
        int(
            (
                subject.run.task.batch(
                    split="test",
                    start=start,
                    size=min(train.batch_size, train.test_rows - start),
                    seed=train.seed,
                ).targets
                != IGNORE
            ).sum()
        )
        for start in range(0, train.test_rows, train.batch_size)
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share among `count` independent trials.

        (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927), 209.
    """
    square = Z95**2 / count
    middle = share + square / 2
    half = Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def headline(standing: Standing) -> str:
    """Return the verdict as one plain sentence."""
    steps = f"{standing.steps:,} steps" if standing.steps != 1 else "1 step"
    if standing.stopped == "diverged":
        return f"Training diverged after {steps}; there is no accuracy to report."
    if standing.accuracy is None or standing.interval is None:
        return f"This run has not ended: {steps} on record, no result yet."
    rival, best = standing.rival
    low, high = standing.interval
    if standing.stopped == "solved":
        opening = f"Solved after {steps}"
    elif standing.stopped == "interrupted":
        opening = f"Interrupted after {steps}"
    else:
        opening = f"Not solved within {steps}"
    if low > best:
        compared = f"well above {_plain(rival)}" if low > 2 * best else f"above {_plain(rival)}"
    elif high < best:
        compared = f"below {_plain(rival)}"
    else:
        compared = f"no better than {_plain(rival)}"
    right = percent(standing.accuracy)
    return f"{opening}: {right} of the answers are right, {compared} at {percent(best)}."


def describe(standing: Standing) -> Words:
    """Put the verdict in words."""
    rival, best = standing.rival
    if standing.accuracy is None or standing.interval is None:
        says = f"A model has learned something once it exceeds {_plain(rival)} ({percent(best)})."
        reading = f"Each rule is scored on test rows; the run itself is {standing.stopped}."
        alt = "Bars of accuracy; no model yet"
    else:
        margin = 100 * (standing.accuracy - best)
        low, high = standing.interval
        says = (
            f"The model stands {abs(margin):.1f} points {'above' if margin >= 0 else 'below'} "
            f"{_plain(rival)}, the best rule that does not solve the task."
        )
        reading = (
            f"The whisker is the 95 % Wilson interval over {standing.scored:,} scored positions, "
            f"{percent(low)} to {percent(high)}, as if they were independent."
        )
        alt = f"Bars of accuracy: model {percent(standing.accuracy)}"
    others = zip(standing.names, standing.scores, strict=True)
    alt += "".join(f", {name.replace('_', ' ')} {percent(score)}" for name, score in others) + "."
    return Words("Test accuracy against what needs no learning", says, reading, alt)


def draw(standing: Standing) -> go.Figure:
    """Draw bars of accuracy: the model on top, then oracle, shortcuts and chance."""
    others = sorted(zip(standing.scores, standing.names, strict=True))
    names = [name.replace("_", " ") for _, name in others]
    scores = [score for score, _ in others]
    drawn = figure(height=150 + 30 * (len(names) + 1))
    drawn.add_bar(
        x=scores,
        y=names,
        orientation="h",
        marker={"color": MUTED, "opacity": 0.55},
        text=[percent(score) for score in scores],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.2%}<extra></extra>",
    )
    if standing.accuracy is not None and standing.interval is not None:
        low, high = standing.interval
        drawn.add_bar(
            x=[standing.accuracy],
            y=["model"],
            orientation="h",
            text=[f"<b>{percent(standing.accuracy)}</b>"],
            textposition="outside",
            cliponaxis=False,
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
    drawn.update_xaxes(range=[0, 1.14], tickformat=".0%", tickvals=[0, 0.25, 0.5, 0.75, 1])
    drawn.update_xaxes(title_text="accuracy at scored positions")
    drawn.update_yaxes(showgrid=False, ticks="", showline=False, automargin="left")
    return drawn.update_layout(showlegend=False, bargap=0.38, margin_t=58)


def _plain(rival: str) -> str:
    return "chance" if rival == "chance" else f"the shortcut “{rival.replace('_', ' ')}”"
