"""How a run ended, in the words that people read; result.json and tables of data keep the keys."""

from collections.abc import Mapping
from typing import Any

ENDINGS = {
    "solved": "solved",
    "budget": "not solved: step limit reached",
    "out of time": "not solved: time limit reached",
    "interrupted": "interrupted",
    "diverged": "diverged",
}
"""Words for each key that `find_ending` returns."""


def find_ending(result: Mapping[str, Any] | None) -> str:
    """Return how a run ended, as a key.

    It is `stopped` of result.json, but "out of time" for a run that its minutes ended, where
    result.json has "interrupted" without a signal.

    Args:
        result: the content of result.json; empty or None while there is none: "unfinished".
    """
    if not result:
        return "unfinished"
    stopped = result["stopped"]
    minutes_up = stopped == "interrupted" and result.get("signal", "") is None
    return "out of time" if minutes_up else stopped


def name_ending(ending: str) -> str:
    """Return the words for how a run ended; what has no words of its own stays."""
    return ENDINGS.get(ending, ending)
