"""Whether a candidate needs less than the holder of a track: a one-sided exact log-rank test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.records.entry import Entry, RecordTrial
from analysis.records.track import WORDS, Measure
from analysis.statistics.comparisons import estimate_median, log_rank_p
from lab.config import RECORD_SEEDS
from lab.files import RunError

LEVEL = 0.01
"""A record needs a p below this."""
CLOSE = 1e-6
"""Share by which a p may differ between machines: it is exact for ten runs against ten."""


@dataclass(frozen=True)
class Judgement:
    """What the runs of a candidate say.

    Attributes:
        is_record: whether it takes the track.
        because: why, in a sentence.
        p: of the one-sided test; None without a holder.
    """

    is_record: bool
    because: str
    p: float | None


def judge(
    trials: Sequence[RecordTrial], holder: Sequence[RecordTrial] | None, measure: Measure
) -> Judgement:
    """Judge a candidate's runs against those of the holder.

    A candidate's run that is not solved counts as unsolved for longer than any other run, so that
    a low limit of steps, or a run that diverges early, cannot help. One of the holder is censored
    where it ended.

    Args:
        trials: of the candidate.
        holder: runs of the holder; None where nobody holds the track.
        measure: what is counted.
    """
    median, unit = find_median(trials, measure)[0], WORDS[measure]
    solved = f"{sum(trial.solved for trial in trials)} of {len(trials)} runs were solved"
    if not math.isfinite(median):
        return Judgement(False, f"{solved}; a record needs more than half", None)
    if holder is None:
        return Judgement(
            True, f"nobody held the track; {solved}, median {median:,.0f} {unit}", None
        )
    p = _test(trials, holder, measure)
    theirs = find_median(holder, measure)[0]
    says = f"median {median:,.0f} {unit} against {theirs:,.0f} of the holder, p = {p:.2g}"
    if median < theirs and p < LEVEL:
        return Judgement(True, f"{says}; {solved}", p)
    return Judgement(False, f"{says}; a record needs a lower median and p < {LEVEL:g}", p)


def find_median(
    trials: Sequence[RecordTrial], measure: Measure
) -> tuple[float, tuple[float, float]]:
    """Return the Kaplan–Meier median of what is counted, and its 95 % interval."""
    return estimate_median(*_censor(trials, measure))


def _test(ours: Sequence[RecordTrial], theirs: Sequence[RecordTrial], measure: Measure) -> float:
    most = max(trial.count(measure) for trial in (*ours, *theirs))
    counts, solved = _censor(ours, measure, most)
    return log_rank_p(counts, solved, *_censor(theirs, measure), alternative="greater")


def _censor(
    trials: Sequence[RecordTrial], measure: Measure, most: float = 0.0
) -> tuple[list[float], list[bool]]:
    """Return what was counted and whether it was until solved; unsolved runs last at least `most`.

    The default is that of the runs themselves.
    """
    most = most or max(trial.count(measure) for trial in trials)
    counts = [trial.count(measure) if trial.solved else most for trial in trials]
    return counts, [trial.solved for trial in trials]


def verify_history(history: Sequence[Entry], measure: Measure) -> None:
    """Judge each entry of a track again.

    Raises:
        RunError: for an entry that its own numbers do not make a record, or with another p.
    """
    holder = None
    for entry in history:
        known = None if holder is None else entry.rerun or holder.trials
        found = judge(entry.trials, known, measure)
        if not found.is_record or not _agree(found.p, entry.p) or len(entry.trials) < RECORD_SEEDS:
            raise RunError(
                f"{entry.track}: entry {entry.number}, {entry.candidate.name}, is not a record by "
                f"its own numbers: p={entry.p}; {found.because}"
            )
        holder = entry


def _agree(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else math.isclose(one, other, rel_tol=CLOSE)
