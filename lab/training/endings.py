"""How a run ended, in the words that people read; result.json and tables of data keep the keys."""

ENDINGS = {
    "solved": "solved",
    "budget": "not solved: step limit reached",
    "interrupted": "interrupted",
    "diverged": "diverged",
    "out of time": "not solved: time limit reached",
}
"""Words for `stopped` of result.json, and for the status of a study's cell."""


def name_ending(stopped: str) -> str:
    """Return the words for how a run ended; what has no words of its own stays."""
    return ENDINGS.get(stopped, stopped)
