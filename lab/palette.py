"""The colours of the house, for pages and terminals.

They are Okabe and Ito's, told apart in all common kinds of colour blindness; nothing relies on
colour alone.
"""

from collections.abc import Sequence

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILLION, PURPLE, YELLOW = "#E69F00", "#D55E00", "#CC79A7", "#F0E442"
MUTED = "#808691"
"""A grey for lines and bars that stands out on light and on dark; too faint for text."""

ROLES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
"""Of a task's roles in turn, but for the last."""


def color_roles(names: Sequence[str]) -> list[str]:
    """Return a colour for each role of a task: grey for the last, which padding has too."""
    colours = [ROLES[i % len(ROLES)] for i in range(len(names))]
    return [*colours[:-1], MUTED] if len(names) > 1 else colours


def choose_ink(colour: str) -> str:
    """Return black or white, whichever is read more easily on a colour: WCAG's contrast."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#ffffff"
