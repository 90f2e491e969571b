"""What changed when? Quantities over a run's kept weights, their change-points, their order."""

import itertools
from collections.abc import Sequence

import plotly.graph_objects as go

from analysis.base import Words
from analysis.run.draw_paths import draw_onsets, draw_paths
from analysis.run.paths import Onset, Onsets, Path, Paths, across, changes, in_order, measure
from analysis.run.trajectories import Series
from analysis.statistics.change_points import FALSE_ALARMS
from analysis.words import percent

__all__ = ["TITLE", "across", "describe", "draw", "measure"]

TITLE = "Training dynamics"
DATED = (
    "A move is one of a tenth or more, in shares of 1 or nats; it has a time where its two levels "
    f"stand out as those of {FALSE_ALARMS:.0%} of random walks, and of white noise, do."
).replace("%", " %")
"""What a change is, for the reader."""


def describe(result: Paths | Onsets) -> Words:
    """Put the quantities by step, or the order in which they change, in words."""
    return _paths_in_words(result) if isinstance(result, Paths) else _onsets_in_words(result)


def draw(result: Paths | Onsets) -> go.Figure | None:
    """Draw the quantities by step, or the order in which they change, if any does."""
    if isinstance(result, Paths):
        return draw_paths(result)
    return draw_onsets(result) if in_order(result.onsets) else None


def _paths_in_words(result: Paths) -> Words:
    dated = [path for path in result.paths if path.change is not None]
    vague = [path for path in result.paths if path.change is None and path.moved]
    last = f"step {result.steps[-1]:,}"
    count = len(result.paths)
    if dated:
        many = f"All {count}" if len(dated) == count else f"{len(dated)} of {count}"
        verb = "changes" if len(dated) == 1 else "change"
        says = f"{many} quantities {verb} by {last}: {_listed(list(map(_moved, dated)))}"
    else:
        verb = "changes at a time that can be told" if vague else "moves by a tenth"
        says = f"None of {count} quantities {verb} up to {last}"
    if vague:
        says += f"; {_listed(list(map(_moved, vague)))}, but when cannot be said"
    rows = "1 test row" if result.rows == 1 else f"{result.rows} test rows"
    reading = f"The weights of {len(result.steps)} steps, each on the same {rows}. Thick: the layer"
    reading += " that changes most; thin: the others. Diamond and band: where it changes, which is"
    reading += " the split into two levels of least squared distance over log(1 + step), and its"
    reading += " bracket. Dotted: chance, or a uniform guess or row. The loss is said to change"
    reading += " where e^−loss does, the geometric mean of the right answers' probabilities. "
    reading += DATED
    names = ", ".join(path.lead.quantity for path in result.paths)
    return Words(
        "Quantities by training step", f"{says}.", reading, f"Lines of {names} by step. {says}."
    )


def _onsets_in_words(onsets: Onsets) -> Words:
    runs = len(onsets.runs)
    says = _order(onsets.onsets[0]) if runs == 1 else _agreement(onsets.onsets)
    reading = "Dot: half-way from one level to the other. Thick: between which kept steps that is,"
    reading += " rows drawn again included (95 %). Thin: from a tenth of the change to nine tenths."
    reading += f" Where thick lines overlap, the order is not decided. {DATED}"
    if runs > 1:
        all_runs = "both runs" if runs == 2 else f"all {runs} runs"
        reading += f" By chance two things come in the same order in {all_runs} once in "
        reading += f"{2 ** (runs - 1)} times."
    title = "In which order things change" + (f", {runs} runs" if runs > 1 else "")
    return Words(title, says, reading, f"Dots on an axis of steps, a row a quantity. {says}")


def _order(onsets: Sequence[Onset]) -> str:
    """Say in which order one run's quantities change; those not told apart stand together."""
    dated = sorted((o for o in onsets if o.change), key=_step)
    still = [o.quantity for o in onsets if not o.moved]
    vague = [o.quantity for o in onsets if o.moved and not o.change]
    parts = []
    if vague:
        move = "moves" if len(vague) == 1 else "move"
        parts.append(f"{_listed(vague)} {move}, but when cannot be said")
    if still and (dated or vague):
        parts.append(f"{_listed(still)} {'does' if len(still) == 1 else 'do'} not change")
    if not dated:
        nothing = f"Nothing moves by a tenth: neither {' nor '.join(still)}"
        return f"{'; '.join(parts) if vague else nothing}."
    tail = "".join(f"; {part}" for part in parts)
    groups: list[list[Onset]] = []
    for onset in dated:
        if groups and not all(_precedes(earlier, onset) for earlier in groups[-1]):
            groups[-1].append(onset)
        else:
            groups.append([onset])
    spans = [_spanned(group) for group in groups]
    if len(spans) > 1:
        return f"First {', then '.join(spans)}{tail}."
    if len(dated) > 1:
        return f"The order is not decided between {spans[0]}{tail}."
    return f"Only {spans[0]} changes{' at one time' if vague else ''}{tail}."


def _agreement(runs: Sequence[Sequence[Onset]]) -> str:
    """Say what comes before what in how many runs, in the order of the medians."""
    found = changes(runs)
    groups: dict[tuple[str, str], list[str]] = {}
    for first, second in itertools.combinations(in_order(runs), 2):
        both = [run for run in found if first in run and second in run]
        before = sum(run[first].precedes(run[second]) for run in both)
        after = sum(run[second].precedes(run[first]) for run in both)
        if before or after:
            often = f"in {before} of {len(both)} runs" + (f", after in {after}" if after else "")
            groups.setdefault((first, often), []).append(second)
    parts = [f"{first} before {_listed(names)} {often}" for (first, often), names in groups.items()]
    if not parts:
        return "In no run is the order of two changes decided."
    return f"What comes first: {'; '.join(parts)}. Elsewhere the order is not decided."


def _step(onset: Onset) -> tuple[float, int]:
    assert onset.change is not None
    return onset.change.step, onset.change.high


def _precedes(one: Onset, other: Onset) -> bool:
    assert one.change is not None
    assert other.change is not None
    return one.change.precedes(other.change)


def _spanned(group: Sequence[Onset]) -> str:
    """Name quantities, and the steps that hold all their changes."""
    low = min(onset.change.low for onset in group if onset.change)
    high = max(onset.change.high for onset in group if onset.change)
    return f"{_listed([onset.quantity for onset in group])} (steps {low:,} to {high:,})"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _moved(path: Path) -> str:
    """Say from where to where a quantity goes, beside what no learning gives."""
    series = path.lead
    name = series.quantity if series.layer is None else f"{series.quantity} of layer {series.layer}"
    ends = f"{name} from {_value(series, series.values[0])} to {_value(series, series.values[-1])}"
    if series.null is None:
        return ends
    return f"{ends} ({series.null_name} {_value(series, series.null)})"


def _value(series: Series, value: float) -> str:
    if series.unit == "share":
        return percent(float(value))
    return f"{value:.3g} nats" if series.unit == "nats" else f"{value:.1f}"
