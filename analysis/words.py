"""Format numbers and lists for sentences."""

import math
from collections.abc import Callable, Iterable, Sequence

RIGHT = {
    "accuracy": "of the answers are right",
    "explained variance": "of what the oracle explains is explained",
}
"""What a share is of, by the task's measure (`tasks.base.Task`), as the end of a sentence."""


def percent(share: float, decimals: int | None = None) -> str:
    """Format a share in [0, 1]; without a number of decimals, with those that it needs.

    NaN is a dash.
    """
    if math.isnan(share):
        return "–"
    return f"{100 * share:.{count_decimals([share]) if decimals is None else decimals}f} %"


def count_decimals(shares: Iterable[float]) -> int:
    """Return the decimals that shares in a column need: three if any would round to 0 or 1."""
    return 3 if any(0 < share < 0.001 or 0.999 < share < 1 for share in shares) else 1


def count_interval_decimals(low: float, high: float) -> int:
    """Return the decimals at which the ends of an interval differ, three at most."""
    least = count_decimals((low, high))
    differ = (n for n in range(least, 3) if percent(low, n) != percent(high, n))
    return next(differ, 3 if low != high else least)


def percents(*shares: float) -> list[str]:
    """Format shares alike, such as the ends of an interval."""
    return [percent(share, count_decimals(shares)) for share in shares]


def round_percent(share: float) -> str:
    """Format a share as a whole per cent, for sentences in which digits would distract."""
    return f"{round(100 * share)} %"


def format_nats(value: float) -> str:
    """Format an amount in nats: with two decimals, small ones with two digits."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def capitalize(text: str) -> str:
    """Return a text with its first letter in upper case, unless an option such as n=2 is first."""
    return text if "=" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def format_digits(value: float) -> str:
    """Format a number with three digits, or all digits of its whole part; NaN as a dash."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_range(values: Iterable[float]) -> str:
    """Return the least and the greatest of some numbers: "5", "2 to 8", or "none"; NaN is none."""
    known = sorted(value for value in values if not math.isnan(value))
    ends = dict.fromkeys(map(format_digits, (known[0], known[-1]))) if known else {"none": None}
    return " to ".join(ends)


def format_ends(low: float, high: float, form: Callable[[float], str]) -> str:
    """Return the ends of an interval over rows in brackets; one row has none."""
    return "[one row: no interval]" if math.isnan(low) else f"[{form(low)}, {form(high)}]"


def join_names(names: Sequence[str], word: str = "and") -> str:
    """Return "a", "a and b" or "a, b and c", or with another word."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def name_head(layer: int, head: int) -> str:
    """Return "head 1.0" for head 0 of layer 1, as every sentence and figure names it."""
    return f"head {layer}.{head}"


def name_place(offset: int, noun: str) -> str:
    """Return "what lies two positions after" a noun for an offset of 2, the noun itself for 0."""
    if not offset:
        return noun
    count = ("one", "two", "three")[offset - 1] if offset <= 3 else str(offset)
    return f"what lies {count} position{'s' * (offset > 1)} after {noun}"


def name_layers(layers: Sequence[int]) -> str:
    """Return "layer 0" or "layers 0, 2"."""
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
