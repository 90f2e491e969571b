"""How good mixers are at each ability: one number with its interval over seeds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import polars as pl

from analysis.sweeps.results import CLOSE
from analysis.sweeps.settings import HAS_RESULT, RATE, choose_rates
from analysis.words import percent
from lab.intervals import bound_mean
from lab.studies.profile import ABILITIES, CHOOSER, RATES, Ability
from lab.suite.audit import audit
from tasks import TASKS

HALF = 0.5
AUDIT_ROWS = 256
"""Rows on which a shortcut and the oracle are scored."""


@dataclass(frozen=True)
class AbilityScore:
    """How good a mixer is at something.

    Attributes:
        mixer: its name.
        ability: its key in `ABILITIES`.
        level: mean over seeds, in [0, 1]. Of a share or of bits it is the share of right answers
            above chance. Of a reach it is how far it goes between the shortest and the longest
            rows, in doublings: 0 where no rows are half right.
        interval: of the level, 95 % over seeds; NaN with one seed.
        accuracies: mean accuracy on test rows by row length.
        parameters: of the model; None if no run tells.
        state_bytes: that the model keeps of a row of the longest kind; None if not known.
        seeds: runs with a result; `solved` of them learned the task that they were trained on, and
            `diverged` diverged, which counts as having learned nothing.
    """

    mixer: str
    ability: str
    level: float
    interval: tuple[float, float]
    accuracies: Mapping[int, float]
    parameters: int | None
    state_bytes: int | None
    seeds: int
    solved: int
    diverged: int

    @property
    def value(self) -> float:
        """The level in the ability's own unit."""
        return self._convert(self.level)

    def _convert(self, level: float) -> float:
        about = ABILITIES[self.ability]
        if about.measure == "share":
            return level
        if about.measure == "bits":
            return level * count_bits(about) / self.parameters if self.parameters else math.nan
        low, high = min(about.lengths), max(about.lengths)
        return low * (high / low) ** level / about.unit_tokens

    def __str__(self) -> str:
        """Return the value with its unit."""
        unit = ABILITIES[self.ability].unit_of_value
        return f"{self.short} {unit}" if unit else self.short

    @property
    def short(self) -> str:
        """The value without its unit; "≥" and "<" stand at the ends of what was measured."""
        reach = ABILITIES[self.ability].measure == "reach"
        bound = {0.0: "< ", 1.0: "≥ "}.get(self.level, "") if reach else ""
        return f"{bound}{self._format(self.level)}"

    def describe_interval(self) -> str:
        """Return the interval as text; – where there is none, or all seeds are at one end."""
        if not all(map(math.isfinite, self.interval)) or self.level in (0, 1):
            return "–"
        return " … ".join(self._format(end) for end in self.interval)

    def _format(self, level: float) -> str:
        measure, value = ABILITIES[self.ability].measure, self._convert(level)
        if measure == "share":
            return percent(value)
        return f"{value:.3f}" if measure == "bits" else f"{value:,.0f}"


def collect_scores(table: pl.DataFrame) -> list[AbilityScore]:
    """Return the scores of all mixers of a table of one scale, each at its chosen rate."""
    known, found = table.filter(HAS_RESULT), []
    rates = {str(mixer): find_rate(table, str(mixer)) for mixer in known["mixer"].unique()}
    for (mixer, ability), rows in known.group_by("mixer", "ability", maintain_order=True):
        chosen = rows.filter(pl.col(RATE) == rates[str(mixer)])
        if len(chosen):
            found.append(_score(str(mixer), str(ability), chosen))
    return found


def find_rate(table: pl.DataFrame, mixer: str) -> str:
    """Return the name of a mixer's learning rate: the best on validation rows of recall, of those
    that the first seed tried; the lab's own while none has a result.

    It is the mean over all row lengths that counts: of the longest, some mixers recall nothing.
    """
    tried = choose_rates(_list_tried(table, mixer), [])
    return str(tried[RATE][0]) if len(tried) else next(iter(RATES))


def find_window(table: pl.DataFrame, mixer: str) -> tuple[str, ...]:
    """Return the learning rates whose validation accuracy is close to that of the best."""
    tried = _list_tried(table, mixer).group_by(RATE).agg(pl.mean("validation"))
    close = tried.filter(pl.col("validation") >= pl.col("validation").max() - CLOSE)
    return tuple(rate for rate in RATES if rate in {*close[RATE]})


def _list_tried(table: pl.DataFrame, mixer: str) -> pl.DataFrame:
    """Return the rows that choose a mixer's learning rate, one for each and each row length.

    Where a run diverged or was not validated, nothing was right.
    """
    tried = table.filter(HAS_RESULT, mixer=mixer, ability=CHOOSER, seed=0)
    right = pl.when(pl.col("status") != "diverged").then(pl.col("validation").fill_nan(None))
    return tried.with_columns(validation=right.fill_null(0.0))


def _score(mixer: str, key: str, rows: pl.DataFrame) -> AbilityScore:
    ability = ABILITIES[key]
    levels = [
        _find_level(ability, dict(run.select("seq_len", "accuracy").iter_rows()))
        for _, run in rows.group_by("seed", maintain_order=True)
    ]
    by_length = rows.group_by("seq_len").agg(pl.mean("accuracy")).drop_nulls().sort("seq_len")
    trained = rows.filter(seq_len=ability.options["seq_len"])
    return AbilityScore(
        mixer,
        key,
        sum(levels) / len(levels),
        bound_mean(levels),
        dict(by_length.iter_rows()),
        next(iter(rows["parameters"].drop_nulls()), None),
        max(rows["state_bytes"].drop_nulls(), default=None),
        len(levels),
        int(trained["solved"].fill_null(False).sum()),
        trained.filter(status="diverged").height,
    )


def _find_level(ability: Ability, accuracies: Mapping[int, float | None]) -> float:
    """Return the level of one run; its accuracy is None at all lengths if it diverged."""
    skills = {
        length: find_skill(ability, length, accuracy or 0.0)
        for length, accuracy in sorted(accuracies.items())
    }
    if ability.measure != "reach":
        return skills[max(skills)]
    first, last = min(ability.lengths), max(ability.lengths)
    return math.log(find_reach(skills) / first) / math.log(last / first)


def find_reach(skills: Mapping[int, float]) -> float:
    """Return the greatest row length at which the skill is a half, between two in logarithm.

    Rows that are shorter than those may be less than half right: where training left a length
    unlearned, its weights are still those that are asked there.

    >>> round(find_reach({16: 1.0, 32: 0.75, 64: 0.25}))
    45

    Args:
        skills: by row length, ascending.

    Returns:
        the shortest length if it is a half nowhere, the longest if it is a half there.
    """
    lengths = list(skills)
    reached = [i for i, skill in enumerate(skills.values()) if skill >= HALF]
    if not reached:
        return float(lengths[0])
    last, *after = lengths[reached[-1] :]
    if not after:
        return float(last)
    share = (skills[last] - HALF) / (skills[last] - skills[after[0]])
    return last * (after[0] / last) ** share


def find_skill(ability: Ability, length: int, accuracy: float) -> float:
    """Return where an accuracy lies between chance and the best possible: in [0, 1]."""
    floor, ceiling = _find_bounds(
        ability.task, length, tuple(ability.options.items()), ability.floor
    )
    return min(max((accuracy - floor) / (ceiling - floor), 0.0), 1.0)


@cache
def _find_bounds(
    task: str, length: int, options: tuple[tuple[str, Any], ...], floor: str
) -> tuple[float, float]:
    """Return the accuracy of chance, or of a shortcut in its place, and of the oracle."""
    made = TASKS[task](**dict(options))
    if length != made.seq_len:
        made = made.resize(length)
    if not floor:
        return made.chance, 1.0
    scores = {score.name: score.accuracy for score in audit(made, rows=AUDIT_ROWS).scores}
    return scores[floor], scores["oracle"]


def count_bits(ability: Ability) -> float:
    """Return the bits of the facts of a task of facts."""
    n_facts, vocab_size = (ability.options[name] for name in ("n_facts", "vocab_size"))
    return n_facts * math.log2(vocab_size // 2)
