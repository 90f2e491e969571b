"""analysis.json: what was measured, as numbers that another program can read."""

import math
from dataclasses import field, fields, is_dataclass
from typing import Any

import numpy as np

STORED = "stored"


def drawn() -> Any:
    """Return a dataclass field for what only a figure needs: analysis.json leaves it out."""
    return field(metadata={STORED: False})


def plain(value: Any) -> Any:
    """Return a result as JSON takes it: dataclasses by field, arrays as lists, NaN and ±∞ as None.

    Raises:
        TypeError: for a value that is none of these.
    """
    if is_dataclass(value) and not isinstance(value, type):
        kept = [f.name for f in fields(value) if f.metadata.get(STORED, True)]
        return {name: plain(getattr(value, name)) for name in kept}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is nothing that analysis.json can hold")
