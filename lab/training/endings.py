"""How a run ended, in the words that people read; result.json and tables of data keep the keys."""

from collections.abc import Mapping
from typing import Any

NOT_SOLVED = "not solved: "
ENDINGS = {
    "solved": "solved",
    "budget": f"{NOT_SOLVED}step limit reached",
    "out of time": f"{NOT_SOLVED}time limit reached",
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


def read_ending(text: str) -> str:
    """Return the key of an ending in words, with or without "not solved: "; other text stays."""
    keys = {words.removeprefix(NOT_SOLVED): key for key, words in ENDINGS.items()}
    return keys.get(text.removeprefix(NOT_SOLVED), text)


def name_ending(ending: str) -> str:
    """Return the words for how a run ended; what has no words of its own stays."""
    return ENDINGS.get(ending, ending)
