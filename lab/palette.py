"""The colours of pages and terminals.

They are Okabe and Ito's, which people with any common colour blindness can tell apart. Nothing is
shown by colour alone.
"""

from collections.abc import Sequence

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILLION, PURPLE, YELLOW = "#E69F00", "#D55E00", "#CC79A7", "#F0E442"
MUTED = "#808691"
"""A grey for lines and bars, visible on light and on dark backgrounds; too faint for text."""

ROLES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
"""The colours of a task's roles in order, except the last role."""


def color_roles(names: Sequence[str]) -> list[str]:
    """Return a colour for each role of a task: grey for the last, which is also padding's."""
    colours = [ROLES[i % len(ROLES)] for i in range(len(names))]
    return [*colours[:-1], MUTED] if len(names) > 1 else colours


def choose_ink(colour: str) -> str:
    """Return black or white, whichever contrasts more with a colour (WCAG)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#ffffff"
