"""Findings on what mixers are good at: one mixer's abilities, recall by bytes, and all at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from scipy import stats

from analysis.base import Finding, Table
from analysis.figures import Axis, Colors, Curves, Dots, Line, Map, Pairs, curves, heat, pairs
from analysis.profile.scores import HALF, AbilityScore
from analysis.words import percent, round_percent
from lab.bench.speed import Speed
from lab.studies.profile import ABILITIES, CHOOSER

FEWEST_PAIRS = min(ABILITIES[CHOOSER].lengths) / ABILITIES[CHOOSER].unit_tokens
"""Stored pairs of the shortest rows of recall."""
FEWEST = 5
"""Fewest mixers over which abilities are correlated."""
HIGH = 330
"""Height of a figure whose dots have names, px."""
CLOSE_BYTES, CLOSE_PAIRS = 1.5, 1.15
"""Dots that differ by less than both factors share one label."""
NAMES_A_LINE, MOST_NAMES = 3, 11


@dataclass(frozen=True)
class Abilities(Finding):
    """Every ability of one mixer, beside all others.

    Attributes:
        mixer: the one that is marked.
        scores: of it and of the others.
        against: others that are named.
    """

    mixer: str
    scores: tuple[AbilityScore, ...]
    against: tuple[str, ...] = ()
    title = "What it is good at"
    reading = (
        "A line is an ability: left is chance, or no rows half right; right is "
        "all that was measured. Reaches go in doublings. Grey rings are the other mixers; whiskers "
        "are 95 % intervals over seeds."
    )

    @property
    def own(self) -> list[AbilityScore]:
        """The scores of this mixer."""
        return [score for score in self.scores if score.mixer == self.mixer]

    def rank(self, score: AbilityScore) -> tuple[int, int]:
        """Return how many other mixers have a higher level, and how many there are."""
        others = [s for s in self.scores if s.ability == score.ability and s.mixer != self.mixer]
        return sum(other.level > score.level for other in others), len(others)

    @property
    def says(self) -> str:
        """In how many abilities no other mixer, or less than half of them, does better."""
        compared = [rank for rank in map(self.rank, self.own) if rank[1]]
        if not compared:
            return f"Abilities measured: {len(self.own)}; there is no other mixer to compare with."
        return (
            "Abilities in which no other mixer has a higher mean: "
            f"{sum(above == 0 for above, _ in compared)} of {len(compared)}; in which fewer than "
            f"half of them have: {sum(above < count / 2 for above, count in compared)}."
        )

    def numbers(self) -> Table:
        """Return the value of each ability, its interval, and how many mixers do better."""
        rows = []
        for score in self.own:
            above, count = self.rank(score)
            rows.append(
                (
                    ABILITIES[score.ability].title,
                    str(score),
                    score.describe_interval(),
                    f"{score.solved} of {score.seeds}",
                    f"{above} of {count}" if count else "–",
                    ABILITIES[score.ability].asks,
                )
            )
        heads = ("ability", "value", "95 %", "runs solved", "others above", "what is measured")
        return Table(heads, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a line for each ability, with a dot for each mixer."""
        keys, named = [score.ability for score in self.own], (self.mixer, *self.against)
        series = []
        for name in named:
            found = {s.ability: s for s in self.scores if s.mixer == name}
            known = [found.get(key) for key in keys]
            levels = np.array([math.nan if s is None else s.level for s in known])
            ends = np.array([(math.nan, math.nan) if s is None else s.interval for s in known])
            notes = ["" if s is None else str(s) for s in known]
            series.append(Dots(name, levels, ends, notes=notes))
        others = [s for s in self.scores if s.mixer not in named and s.ability in keys]
        if others:
            dots = Dots(
                "other mixers",
                np.array([s.level for s in others]),
                look="run",
                notes=[f"{s.mixer}: {s}" for s in others],
                lines=np.array([keys.index(s.ability) for s in others]),
            )
            series.append(dots)
        names = [f"{ABILITIES[s.ability].title}\n{s}" for s in self.own]
        return pairs(names, Pairs(series, Axis("of what was measured", "share")))


@dataclass(frozen=True)
class RecallCurves(Finding):
    """Share of recalled pairs by their number, a line for each mixer that is named."""

    mixers: tuple[str, ...]
    scores: tuple[AbilityScore, ...]
    title = "Recall by stored pairs"
    reading = (
        "A point is the mean accuracy on test rows with so many pairs, over the seeds that did not "
        "diverge, with the weights at the end of training on rows of this length, or with the last "
        "ones if training did not get there. The dotted line is a half."
    )

    @property
    def _shown(self) -> list[AbilityScore]:
        found = {s.mixer: s for s in self.scores if s.ability == CHOOSER}
        return [found[name] for name in self.mixers if name in found]

    @property
    def says(self) -> str:
        """The number of pairs of which each mixer recalls half."""
        parts = "; ".join(f"{score.mixer} {score}" for score in self._shown)
        return f"Stored pairs at which half are recalled: {parts}."

    def figure(self) -> go.Figure:
        """Draw a line for each mixer."""
        about = ABILITIES[CHOOSER]
        lines = [
            Line(
                score.mixer,
                np.array(list(score.accuracies)) / about.unit_tokens,
                np.array(list(score.accuracies.values())),
            )
            for score in self._shown
        ]
        panel = Curves(lines, Axis("accuracy", "share"), levels={"": HALF})
        return curves([panel], Axis("stored pairs", "count", "log", ticks=_list_pairs()))


@dataclass(frozen=True)
class RecallPerByte(Finding):
    """Pairs that are recalled against the bytes of state that a mixer keeps of such a row.

    Attributes:
        mixer: the one that is marked; "" for none.
    """

    scores: tuple[AbilityScore, ...]
    mixer: str = ""
    title = "Recall by bytes of state"
    reading = (
        "A dot is a mixer: across, the bytes that both layers keep of a row of the longest kind; "
        "up, the pairs at which half are recalled. The lowest place is also that of mixers which "
        "do not recall half of so few, the highest that of mixers which recall half of more than "
        "was tried. Dots that lie close together share one label, their names in the order of "
        "their bytes. Bits of recall are those that tell the recalled half of the "
        "values from all others."
    )

    @property
    def points(self) -> list[AbilityScore]:
        """The scores of mixers whose bytes are known, by bytes."""
        found = (s for s in self.scores if s.ability == CHOOSER and s.state_bytes)
        return sorted(found, key=lambda score: (score.state_bytes, score.value))

    @property
    def says(self) -> str:
        """The mixers with the most pairs per byte, of those that recall half of the fewest."""
        able = [score for score in self.points if score.level > 0]
        if not able:
            return f"No mixer whose state is known recalls half of {FEWEST_PAIRS:g} pairs."
        best = max(map(_count_per_byte, able))
        names = [
            f"{s.mixer}, {s} in {s.state_bytes:,} bytes" for s in able if _count_per_byte(s) == best
        ]
        return (
            f"The most pairs per byte of state: {'; '.join(names)}. Mixers whose state is known: "
            f"{len(self.points)}."
        )

    def numbers(self) -> Table:
        """Return bytes and pairs of each mixer, and which part of the state's bits tell values."""
        bits = math.log2(ABILITIES[CHOOSER].options["vocab_size"] / 2)
        rows = []
        for score in self.points:
            share = percent(HALF * bits * _count_per_byte(score) / 8, 2) if score.level else "–"
            rows.append((score.mixer, f"{score.state_bytes:,}", score.short, share))
        heads = ("mixer", "bytes of state", "pairs", "bits of recall / bits of state")
        return Table(heads, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a dot for each mixer, the one that is marked on top."""
        groups: dict[str, list[AbilityScore]] = {}
        labels = self._place_labels()
        for score in sorted(self.points, key=lambda score: score.mixer == self.mixer):
            own = score.mixer == self.mixer
            label = self.mixer if own else "other mixers" if self.mixer else "mixers"
            groups.setdefault(label, []).append(score)
        lines = [
            Line(
                label,
                np.array([score.state_bytes for score in group]),
                np.array([score.value for score in group]),
                shape="points",
                notes=[f"{score.mixer}, {score}" for score in group],
                labels=[labels.get(score.mixer, ("", "right")) for score in group],
            )
            for label, group in groups.items()
        ]
        y = Axis("pairs", "count", "log", ticks=_list_pairs())
        x = Axis("bytes of state", "count", "log", ticks=_list_sizes(self.points))
        return curves([Curves(lines, y, height=HIGH)], x)

    def _place_labels(self) -> dict[str, tuple[str, Literal["left", "right"]]]:
        """Return the names beside dots, by mixer: of dots that lie close together one has the names
        of all, the last one, or in the right half of the figure the first one, on its left.
        """
        groups: list[list[AbilityScore]] = []
        for score in self.points:  # by bytes
            near = (group for group in groups if _are_near(group[0], score))
            group = next(near, None)
            if group is None:
                groups.append([score])
            else:
                group.append(score)
        sizes = [score.state_bytes or 1 for score in self.points]
        middle = math.sqrt(sizes[0] * sizes[-1]) if sizes else 0.0
        labels: dict[str, tuple[str, Literal["left", "right"]]] = {}
        for group in groups:
            names = [score.mixer for score in group]
            left = (group[-1].state_bytes or 0) > middle
            shown = names[:MOST_NAMES]
            if len(names) > MOST_NAMES:
                shown.append(f"{len(names) - MOST_NAMES} more")
            lines = (shown[i : i + NAMES_A_LINE] for i in range(0, len(shown), NAMES_A_LINE))
            text = ",<br>".join(", ".join(line) for line in lines)
            labels[names[0 if left else -1]] = (text, "left" if left else "right")
        return labels


def _are_near(first: AbilityScore, second: AbilityScore) -> bool:
    """Say whether the dots of two mixers lie so close that their names would overlap."""
    size = (second.state_bytes or 1) / (first.state_bytes or 1)
    return size < CLOSE_BYTES and 1 / CLOSE_PAIRS < second.value / first.value < CLOSE_PAIRS


def _list_sizes(scores: Sequence[AbilityScore]) -> dict[float, str]:
    """Return powers of four of bytes around those of the states, as ticks of an axis."""
    sizes = [score.state_bytes or 1 for score in scores] or [2**16]
    first, last = (math.log(end(sizes), 4) for end in (min, max))
    powers = (4.0**i for i in range(math.floor(first), math.ceil(last) + 1))
    units = ((2**20, "MiB"), (2**10, "KiB"), (1, "B"))
    named = ((n, next((size, unit) for size, unit in units if n >= size)) for n in powers)
    return {n: f"{n / size:g} {unit}" for n, (size, unit) in named}


def _count_per_byte(score: AbilityScore) -> float:
    """Return pairs per byte; only of scores whose bytes are known."""
    return score.value / (score.state_bytes or math.nan)


def _list_pairs() -> dict[float, str]:
    """Return the stored pairs of each row length of recall, as ticks of an axis."""
    about = ABILITIES[CHOOSER]
    return {count: f"{count:g}" for count in (n / about.unit_tokens for n in about.lengths)}


@dataclass(frozen=True)
class Costs(Finding):
    """What a token costs in training and in decoding, by row length."""

    speeds: tuple[Speed, ...]
    title = "What a token costs"
    reading = (
        "Processor's time a token on one thread, one row at a time, two layers with MLPs, taken in "
        "turns. Left forward and backward, right one decoded token after a row of this length."
    )

    @property
    def names(self) -> list[str]:
        """The models, in order."""
        return list(dict.fromkeys(speed.name for speed in self.speeds))

    @property
    def says(self) -> str:
        """How many times as long as the last one the first one takes, at both ends."""
        first, last = self.names[0], self.names[-1]
        of = {(s.name, s.length): s.training for s in self.speeds}
        lengths = sorted({s.length for s in self.speeds})
        short, long = lengths[0], lengths[-1]
        if first == last:
            return (
                f"A token takes {1e6 * of[first, short]:,.0f} µs in training on rows of {short:,} "
                f"tokens, {1e6 * of[first, long]:,.0f} µs on rows of {long:,} tokens."
            )
        return (
            f"Training {first} on rows of {short:,} tokens takes "
            f"{of[first, short] / of[last, short]:.2f} × as long as {last}, on rows of {long:,} "
            f"tokens {of[first, long] / of[last, long]:.2f} ×."
        )

    def numbers(self) -> Table:
        """Return microseconds a token, training and decoding."""
        rows = [
            (
                speed.name,
                f"{speed.length:,}",
                f"{1e6 * speed.training:,.0f}",
                "–" if speed.decoding is None else f"{1e6 * speed.decoding:,.0f}",
            )
            for speed in self.speeds
        ]
        return Table(("mixer", "row length", "training, µs", "decoding, µs"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a panel for training and one for decoding, a line for each model."""
        panels = []
        for title, field in (("training", "training"), ("decoding", "decoding")):
            lines = []
            for name in self.names:
                known = [s for s in self.speeds if s.name == name]
                taken = [getattr(s, field) for s in known]
                y = np.array([math.nan if t is None else 1e6 * t for t in taken])
                lines.append(Line(name, np.array([s.length for s in known]), y))
            panels.append(Curves(lines, Axis("µs a token", "count", "log"), title))
        ticks = {float(n): f"{n:,}" for n in sorted({s.length for s in self.speeds})}
        return curves(panels, Axis("row length", "count", "log", ticks=ticks), across=2)


@dataclass(frozen=True)
class AbilityMap(Finding):
    """Abilities × mixers."""

    scores: tuple[AbilityScore, ...]
    title = "Abilities of all mixers"
    reading = (
        "A cell has the mean over seeds, in the unit of its column. Its colour is the level: 0 is "
        "chance, 100 % all that was measured; reaches go in doublings. Mixers are ordered by their "
        "mean level. An empty cell was not run."
    )

    @property
    def mixers(self) -> list[str]:
        """The mixers, the highest mean level first."""
        levels: dict[str, list[float]] = {}
        for score in self.scores:
            levels.setdefault(score.mixer, []).append(score.level)
        return sorted(levels, key=lambda name: -sum(levels[name]) / len(levels[name]))

    @property
    def abilities(self) -> list[str]:
        """The abilities that any mixer was tried on, by key."""
        return [key for key in ABILITIES if any(s.ability == key for s in self.scores)]

    @property
    def levels(self) -> Float[np.ndarray, "mixers abilities"]:
        """The levels; NaN for a cell that was not run."""
        found = {(s.mixer, s.ability): s.level for s in self.scores}
        return np.array(
            [[found.get((m, a), math.nan) for a in self.abilities] for m in self.mixers]
        )

    @property
    def says(self) -> str:
        """How many cells were run, and the ability in which mixers differ most."""
        levels = self.levels
        spread = np.nanmax(levels, 0) - np.nanmin(levels, 0)
        widest = ABILITIES[self.abilities[int(spread.argmax())]].title.lower()
        return (
            f"Cells that were run: {np.isfinite(levels).sum()} of {levels.size}. Mixers differ "
            f"most in {widest}, by {round_percent(float(spread.max()))} of what was measured."
        )

    def figure(self) -> go.Figure:
        """Draw the map."""
        found = {(score.mixer, score.ability): score.short for score in self.scores}
        texts = [[found.get((m, a), "") for a in self.abilities] for m in self.mixers]
        about = [ABILITIES[key] for key in self.abilities]
        titles = [", ".join(filter(None, (each.title, each.unit_of_value))) for each in about]
        colors = Colors("of what was measured", "share", (0.0, 1.0))
        return heat([Map(self.levels, self.mixers, titles, texts=texts)], colors, Axis(), Axis())


@dataclass(frozen=True)
class AbilityCorrelations(Finding):
    """Which abilities go together over the mixers.

    Attributes:
        keys: of the abilities.
        correlation: of each with each.
        mixers: how many.
    """

    keys: tuple[str, ...]
    correlation: Float[np.ndarray, "a a"]
    mixers: int
    title = "Abilities that go together"
    reading = (
        "Spearman's correlation of the levels of two abilities over the mixers. Near 1 one of them "
        "tells nothing new. Abilities that are the same for all, or not run for all, are left out."
    )

    @property
    def says(self) -> str:
        """The two abilities that are most alike, and the two that are least."""
        rows, columns = np.triu_indices(len(self.keys), 1)
        found = self.correlation[rows, columns]

        def describe(i: int) -> str:
            a, b = (ABILITIES[self.keys[place[i]]].title.lower() for place in (rows, columns))
            return f"{a} and {b} ({found[i]:+.2f})"

        return (
            f"Over {self.mixers} mixers the highest correlation is that of "
            f"{describe(int(found.argmax()))}, the lowest that of {describe(int(found.argmin()))}."
        )

    def figure(self) -> go.Figure:
        """Draw the correlations."""
        titles = [ABILITIES[key].title for key in self.keys]
        colors = Colors("Spearman's correlation", ends=(-1.0, 1.0))
        return heat([Map(self.correlation, titles, titles)], colors, Axis(), Axis(), numbers=True)


def correlate(scores: Sequence[AbilityScore]) -> tuple[AbilityCorrelations, ...]:
    """Return which abilities go together; nothing for too few mixers or abilities."""
    chart = AbilityMap(tuple(scores))
    levels, mixers = chart.levels, len(chart.mixers)
    whole = [np.isfinite(column).all() and np.ptp(column) > 0 for column in levels.T]
    keys = tuple(key for key, keep in zip(chart.abilities, whole, strict=True) if keep)
    if mixers < FEWEST or len(keys) < 2:
        return ()
    ranks = stats.rankdata(levels[:, whole], axis=0)
    return (AbilityCorrelations(keys, np.corrcoef(ranks, rowvar=False), mixers),)
