"""How far does it reach? Accuracy at settings that the model was not trained on."""

from collections.abc import Sequence

import plotly.graph_objects as go

from analysis.base import NotApplicableError, Subject, Words
from analysis.run import draw_reached as figures
from analysis.run.reached import Reach, reach
from analysis.words import percent

TITLE = "How far does it reach?"


def measure(subject: Subject) -> list[Reach]:
    """Return the accuracy at other values of each option that was tried.

    Raises:
        NotApplicableError: for a model that no run trained, or that was not evaluated elsewhere.
    """
    run = subject.run
    if run is None:
        raise NotApplicableError("no run to read evaluations of")
    result = run.result() or {}
    entries = result.get("evaluations", [])
    if not entries:
        raise NotApplicableError("the run was evaluated in no setting but its own")
    names = dict.fromkeys(entry["option"] for entry in entries)
    return [
        reach(run, option, [entry for entry in entries if entry["option"] == option])
        for option in names
    ]


def describe(found: Reach) -> Words:
    """Say how far the accuracy holds, and where it falls to."""
    title = f"Accuracy by {found.option}, trained at {found.trained_as}"
    says = _says(found)
    for value, why in found.failed:
        says += f" Not at {value}: {why.rstrip('.')}."
    reading = (
        f"Dots are means over test rows, {_rows(found.rows)} a value; whiskers are 95 % intervals "
        "over rows, the dotted line is a guess. "
        if len(found.values)
        else ""
    )
    reading += f"Weights after step {found.step:,}."
    if found.trained is not None and found.trained[0] < found.trained[1]:
        reading += " What was trained on is the grey range."
    elif found.trained is not None:
        reading += " What was trained on is the grey line."
    if found.reference is not None:
        reading += " “Holds”: no sure difference, as the intervals meet."
    shown = ", ".join(
        f"{value} {percent(float(share))}"
        for value, share in zip(found.values, found.accuracy, strict=True)
    )
    return Words(title, says, reading, f"Accuracy at values of {found.option}: {shown}. {says}")


def _rows(rows: tuple[int, ...]) -> str:
    return f"{rows[0]:,}" if len(set(rows)) == 1 else f"{min(rows):,} to {max(rows):,}"


def _says(found: Reach) -> str:
    """Compare what was tried with training's own setting."""
    if not found.values:
        return "No value could be evaluated."
    if found.reference is None or found.reference_interval is None:
        return f"{_extremes(found)}; the run has no accuracy of its own to hold them to."
    own = f"Trained at {found.trained_as}, {percent(found.reference)} of the answers are right"
    low, high = found.reference_interval
    if found.trained is None or found.places is None:
        return f"{own}; {_each(found, low, high)}."
    beyond = [i for i, place in enumerate(found.places) if place > found.trained[1]]
    below = [i for i, place in enumerate(found.places) if place < found.trained[0]]
    if low <= found.reference_chance:
        return f"{own}, which is no more than a guess: there is nothing to hold."
    parts = []
    if beyond:
        parts.append(_outwards(found, beyond, "beyond"))
    if below:
        parts.append(_outwards(found, below[::-1], "below"))
    if not parts:
        parts.append("no other value was tried")
    return f"{own}; {'; '.join(parts)}."


def _outwards(found: Reach, order: Sequence[int], side: str) -> str:
    """Say up to which value it holds, and half of what is over a guess, outwards from training."""
    assert found.reference is not None
    assert found.reference_interval is not None
    holds = _prefix([bool(found.interval[i, 1] >= found.reference_interval[0]) for i in order])
    middle = (found.reference + found.chance) / 2
    half = _prefix([bool(found.accuracy[i] >= middle[i]) for i in order])
    far = order[-1]
    end = f"{percent(float(found.accuracy[far]))} at {found.values[far]}"
    if found.interval[far, 0] <= found.chance[far]:
        end += ", no more than a guess"
    if holds == len(order):
        return f"{side} that it holds as far as was tried, {end}"
    text = f"{side} that it "
    if holds:
        last = order[holds - 1]
        way = "down" if side == "below" else "up"
        text += f"holds {way} to {found.values[last]} ({percent(float(found.accuracy[last]))})"
    else:
        first = order[0]
        changed = "rises" if found.accuracy[first] > found.reference else "falls"
        text += f"{changed} at once, to {percent(float(found.accuracy[first]))} at "
        text += found.values[first]
    if half > max(holds, 1):
        way = "down" if side == "below" else "up"
        text += f", keeps half of what it has over a guess {way} to {found.values[order[half - 1]]}"
    return text if far == order[0] else f"{text}, and is at {end}"


def _prefix(flags: Sequence[bool]) -> int:
    """Return how many flags hold before the first that does not."""
    return flags.index(False) if False in flags else len(flags)


def _each(found: Reach, low: float, high: float) -> str:
    """Say which values, in no order, differ surely from training's own."""
    told = []
    for i, value in enumerate(found.values):
        differs = found.interval[i, 1] < low or found.interval[i, 0] > high
        word = "" if differs else ", no sure difference"
        told.append(f"{percent(float(found.accuracy[i]))} at {value}{word}")
    return "; ".join(told)


def _extremes(found: Reach) -> str:
    best, worst = int(found.accuracy.argmax()), int(found.accuracy.argmin())
    if best == worst:
        return f"{percent(float(found.accuracy[best]))} are right at {found.values[best]}"
    return (
        f"Between {percent(float(found.accuracy[worst]))} at {found.values[worst]} and "
        f"{percent(float(found.accuracy[best]))} at {found.values[best]}"
    )


def draw(found: Reach) -> go.Figure | None:
    """Draw a dot with its whisker a value, what was trained on marked; None where none was met."""
    return figures.draw(found)
