"""Every analysis that applies, carried out on one subject; and analysis.json, which records it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from analysis import ANALYSES
from analysis.base import NotApplicableError, Subject
from analysis.record import collect_provenance, to_plain

FORMAT = 1
"""Of analysis.json."""


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        subject: what was looked at.
        results: of each analysis that applies, by its name, in the order of `ANALYSES`.
        not_applicable: why each other one does not apply.
        seconds: what each took, those that do not apply included.
    """

    subject: Subject
    results: dict[str, Sequence[Any]]
    not_applicable: dict[str, str]
    seconds: dict[str, float]


def select_analyses(only: Sequence[str] | None) -> list[str]:
    """Return the names of the analyses asked for, in their order; None asks for all.

    Raises:
        ValueError: for a name that is no analysis; the known ones are listed.
    """
    for name in only or ():
        if name not in ANALYSES:
            raise ValueError(f"only={name}: must be one of {', '.join(ANALYSES)}")
    return [name for name in ANALYSES if not only or name in only]


def examine(
    subject: Subject,
    only: Sequence[str] | None = None,
    on_begin: Callable[[str], None] = lambda name: None,
    *,
    lenient: bool = False,
) -> Examination:
    """Carry out analyses.

    Args:
        subject: what to look at.
        only: names of analyses; None takes all that apply.
        on_begin: told the name of each before it begins.
        lenient: let those that are asked for by name not apply.

    Raises:
        ValueError: for an unknown name.
        NotApplicableError: when one that is asked for by name does not apply.
        RunError: when weights or records of the run cannot be read.
    """
    results: dict[str, Sequence[Any]] = {}
    not_applicable, seconds = {}, {}
    for name in select_analyses(only):
        on_begin(name)
        began = time.perf_counter()
        try:
            results[name] = ANALYSES[name].measure(subject)
        except NotApplicableError as error:
            if only and not lenient:
                raise NotApplicableError(f"{name}: {error}") from error
            not_applicable[name] = str(error)
        seconds[name] = time.perf_counter() - began
    return Examination(subject, results, not_applicable, seconds)


def record(examination: Examination) -> dict[str, Any]:
    """Return what analysis.json holds: each result's numbers, and the words that go with them."""
    subject = examination.subject
    rows, seq_len = subject.batch.inputs.shape
    return {
        "format": FORMAT,
        "name": subject.name,
        "step": subject.step,
        "seed": subject.seed,
        "rows": rows,
        "seq_len": seq_len,
        "provenance": None if subject.run is None else collect_provenance(subject.run),
        "seconds": {name: round(value, 3) for name, value in examination.seconds.items()},
        "not_applicable": examination.not_applicable,
        "analyses": {
            name: [_told(name, result) for result in results]
            for name, results in examination.results.items()
        },
    }


def _told(name: str, result: Any) -> dict[str, Any]:
    words = ANALYSES[name].describe(result)
    return {"title": words.title, "says": words.says, **to_plain(result)}
