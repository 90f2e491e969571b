"""Findings as plain values, for analysis.json and for pages."""

import base64
import math
import zlib
from dataclasses import field, fields, is_dataclass
from typing import Any

import numpy as np

STORED = "stored"


def figure_only(**options: Any) -> Any:
    """Return a dataclass field that only figures need: analysis.json leaves it out."""
    return field(metadata={STORED: False}, **options)


def to_plain(value: Any) -> Any:
    """Convert a finding for JSON: dataclasses to dicts, arrays to lists, NaN and ±∞ to None.

    Raises:
        TypeError: for a value of any other type.
    """
    if is_dataclass(value) and not isinstance(value, type):
        kept = [f.name for f in fields(value) if f.metadata.get(STORED, True)]
        return {name: to_plain(getattr(value, name)) for name in kept}
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): to_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is a type that analysis.json cannot hold")


def deflate(data: bytes) -> str:
    """Compress bytes for a page: zlib's deflate as base64, which browsers inflate themselves."""
    return base64.b64encode(zlib.compress(data, 9)).decode()
