"""How comparisons and numbers are named in sentences about frequencies."""

from analysis.words import name_head


def name_comparison(layer: int, sides: str, comparison: int, count: int) -> str:
    """Name one of a layer's comparisons, such as "layer 0 (Q/K, head 0.1)"."""
    name = name_head(layer, comparison) if sides == "Q/K" else f"group {comparison}"
    which = "" if count == 1 else f", {name}"
    return f"layer {layer} ({sides}{which})"


def join_parts(parts: list[str], most: int = 4) -> str:
    """Join the first parts of a sentence, and say how many are left out."""
    left = len(parts) - most
    return "; ".join(parts if left <= 0 else [*parts[:most], f"and {left} more"])


def format_range(values: list[int]) -> str:
    """Return the smallest and the largest value as text, or the only one."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
