"""Certifying a target in a child process, which may hang, crash, or exhaust the memory.

Nothing here imports torch; the child does (`lab.certification.worker`). The child sends lines of
JSON over a pipe that the target does not know. A law that takes too long or kills the child is not
decided, and another child tries the remaining laws.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lab.certification.child import Child, StoppedError
from lab.certification.child import RefusedError as RefusedError
from lab.certification.request import Request

Certificate = dict[str, Any]
"""target, notes, lengths, d_model, seconds and laws; as JSON, with NaN and infinity as text."""

OUTCOMES = {
    "holds": ("holds", "hold"),
    "fails": ("fails", "fail"),
    "not applicable": ("not applicable", "not applicable"),
    "not decided": ("not decided", "not decided"),
}
"""Each outcome in the singular and in the plural."""

VERDICT = {"verdict", "evidence", "measured", "allowed"}
"""Entries that every verdict must have."""
SIGNS = {"holds": "✓", "fails": "✗", "not applicable": "–", "not decided": "?"}


def certify_in_child(
    request: Request,
    on_recognised: Callable[[Certificate], None],
    on_begin: Callable[[str, int], None],
    on_verdict: Callable[[Certificate], None],
) -> Certificate:
    """Return a target's certificate.

    Args:
        request: what to certify, and how.
        on_recognised: called before the first law with the notes, lengths, width and names of laws.
        on_begin: called with each law and its number, from 0.
        on_verdict: called with each entry of the certificate's laws once it is decided.

    Raises:
        RefusedError: when the target cannot be imported, made or called, or when it crashes or
            hangs before any law.
    """
    began = time.monotonic()
    decided: list[Certificate] = []
    child = Child(request)
    try:
        found = child.receive_start()
        laws = found["laws"]
        on_recognised(found)
        why = ""
        for number, law in enumerate(laws):
            on_begin(law, number)
            if not child.runs and not why:
                child = Child(replace(request, only=laws[number:]))
                try:
                    child.receive_start()
                except RefusedError as error:
                    why = f"before it, in another process: {error}"
            verdict = _leave_undecided(law, why) if why else _receive(child, law, request.seconds)
            decided.append(verdict)
            on_verdict(verdict)
    finally:
        child.kill()
    seconds = round(time.monotonic() - began, 1)
    kept = {name: found[name] for name in ("notes", "lengths", "d_model")}
    return {"target": request.target, **kept, "seconds": seconds, "laws": decided}


def count_outcomes(certificate: Certificate) -> str:
    """Say how many laws had which outcome: "10 hold, 1 fails"."""
    counts = Counter(law["verdict"] for law in certificate["laws"])
    return ", ".join(
        f"{counts[outcome]} {words[counts[outcome] > 1]}"
        for outcome, words in OUTCOMES.items()
        if counts[outcome]
    )


def _receive(child: Child, law: str, seconds: int | float) -> Certificate:
    """Return the child's verdict on a law; not decided if the child sends none in time."""
    try:
        verdict = child.receive(seconds)
    except StoppedError as error:
        child.kill()
        return _leave_undecided(law, str(error))
    if verdict.get("law") != law or not verdict.keys() >= VERDICT:
        # A process that the target has forked from the child answers in its place.
        child.kill()
        return _leave_undecided(law, "the target's own process answered for it")
    numbers = {name: _encode_number(verdict[name]) for name in ("measured", "allowed")}
    return {**verdict, **numbers}


def _leave_undecided(law: str, why: str) -> Certificate:
    nothing = dict.fromkeys(("counterexample", "measured", "allowed", "snippet", "where"))
    empty = {"left": "", "note": "", "tokens": 0}
    return {"law": law, "verdict": "not decided", "evidence": why, **nothing, **empty}


def _encode_number(value: int | float | None) -> int | float | str | None:
    """Return a number that JSON can hold: "NaN", "Infinity" and "-Infinity" are text."""
    return value if value is None or math.isfinite(value) else json.dumps(value)
