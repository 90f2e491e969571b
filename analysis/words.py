"""Format numbers and lists for sentences."""

from collections.abc import Sequence


def percent(share: float) -> str:
    """Format a share in [0, 1] with one decimal; three near 0 and 1, so as not to round to them."""
    digits = 3 if 0 < share < 0.001 or 0.999 < share < 1 else 1
    return f"{100 * share:.{digits}f} %"


def capitalize(text: str) -> str:
    """Return a text with its first letter in upper case, the others as they are."""
    return text[:1].upper() + text[1:]


def join_names(names: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def name_layers(layers: Sequence[int]) -> str:
    """Return "layer 0" or "layers 0, 2"."""
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
